# SPDX-License-Identifier: Apache-2.0
"""Apply and read Kubernetes objects, as kubectl does: a machine for the demo need not have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from kubernetes import config, dynamic
from kubernetes.client.exceptions import ApiException


class Kube:
    """One cluster, reached through a kubeconfig file."""

    def __init__(self, kubeconfig: Path) -> None:
        """Read the kubeconfig; nothing is asked of the cluster yet."""
        self.kubeconfig = kubeconfig
        self._api = config.new_client_from_config(str(kubeconfig))
        self._dynamic: dynamic.DynamicClient | None = None
        self._discovered = kubeconfig.with_name("discovered.json")
        self._discovered.unlink(missing_ok=True)

    def apply(self, file: Path) -> str:
        """Apply a YAML file server-side and return what kubectl would print."""
        lines = []
        for manifest in yaml.safe_load_all(file.read_text()):
            metadata, kind = manifest["metadata"], manifest["kind"]
            self._resource(manifest["apiVersion"], kind).server_side_apply(
                body=manifest, name=metadata["name"], namespace=metadata.get("namespace"), field_manager="kubectl"
            )
            lines.append(f"{kind.lower()}/{metadata['name']} serverside-applied")
        return "\n".join(lines)

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = "default") -> dict[str, Any] | None:
        """Return the object, or None where there is none."""
        try:
            return dict(self._resource(api_version, kind).get(name=name, namespace=namespace).to_dict())
        except (ApiException, dynamic.exceptions.DynamicApiError) as error:
            if getattr(error, "status", None) == 404:  # noqa: PLR2004 - HTTP
                return None
            raise

    def list(
        self, api_version: str, kind: str, *, labels: str = "", namespace: str = "default"
    ) -> list[dict[str, Any]]:
        """Return the objects of a namespace that carry the labels."""
        found = self._resource(api_version, kind).get(namespace=namespace, label_selector=labels)
        return [item.to_dict() for item in found.items]

    def delete(self, api_version: str, kind: str, name: str, namespace: str = "default") -> None:
        """Delete the object; do not wait for what it owns."""
        self._resource(api_version, kind).delete(name=name, namespace=namespace)

    def _resource(self, api_version: str, kind: str) -> Any:
        if self._dynamic is None:
            self._dynamic = self._discover()
        try:
            return self._dynamic.resources.get(api_version=api_version, kind=kind)
        except dynamic.exceptions.ResourceNotFoundError:
            self._dynamic = self._discover()  # a CRD may have arrived since
            return self._dynamic.resources.get(api_version=api_version, kind=kind)

    def _discover(self) -> dynamic.DynamicClient:
        # left to itself, the client leaves what it learns about a server in /tmp, under the server's address
        return dynamic.DynamicClient(self._api, cache_file=str(self._discovered))
