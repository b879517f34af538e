# SPDX-License-Identifier: Apache-2.0
"""Apply and read Kubernetes objects: with the machine's kubectl, or the same through the Python client."""

from __future__ import annotations

import os
import shutil
import subprocess
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
        self.kubectl = shutil.which("kubectl")
        self._api = config.new_client_from_config(str(kubeconfig))
        self._dynamic: dynamic.DynamicClient | None = None
        self._discovered = kubeconfig.with_name("discovered.json")
        self._discovered.unlink(missing_ok=True)

    def apply(self, file: Path) -> str:
        """Apply a YAML file server-side and return what kubectl would print."""
        if self.kubectl:
            return self._run("apply", "--server-side", "-f", str(file))
        lines = []
        for manifest in yaml.safe_load_all(file.read_text()):
            resource = self._resource(manifest["apiVersion"], manifest["kind"])
            name = manifest["metadata"]["name"]
            resource.server_side_apply(
                body=manifest,
                name=name,
                namespace=manifest["metadata"].get("namespace"),
                field_manager="kubectl",
                force_conflicts=False,
            )
            lines.append(f"{manifest['kind'].lower()}/{name} serverside-applied")
        return "\n".join(lines)

    def show(self, *arguments: str) -> str:
        """Return the output of ``kubectl get ...``, or an empty text without kubectl."""
        return self._run("get", *arguments) if self.kubectl else ""

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = "default") -> dict[str, Any] | None:
        """Return the object, or None where there is none."""
        try:
            found = self._resource(api_version, kind).get(name=name, namespace=namespace)
        except (ApiException, dynamic.exceptions.DynamicApiError) as error:
            if getattr(error, "status", None) == 404:  # noqa: PLR2004 - HTTP
                return None
            raise
        return dict(found.to_dict())

    def list(
        self, api_version: str, kind: str, *, labels: str = "", namespace: str = "default"
    ) -> list[dict[str, Any]]:
        """Return the objects of a namespace that carry the labels."""
        found = self._resource(api_version, kind).get(namespace=namespace, label_selector=labels)
        return [item.to_dict() for item in found.items]

    def delete(self, api_version: str, kind: str, name: str, namespace: str = "default") -> None:
        """Delete the object if it is there; do not wait for what it owns."""
        try:
            self._resource(api_version, kind).delete(name=name, namespace=namespace)
        except (ApiException, dynamic.exceptions.DynamicApiError) as error:
            if getattr(error, "status", None) != 404:  # noqa: PLR2004 - HTTP
                raise

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

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.kubectl), *arguments],
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.strip()
