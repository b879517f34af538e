# SPDX-License-Identifier: Apache-2.0
"""The only door to the API server: read, server-side apply, delete, write status, post events.

`Cluster` is what the rest of the operator sees; `KubernetesCluster` is the real one and the only user of the
`kubernetes` package, whose transport is used without its typed models: those reject answers that carry fields newer
than the package. Safe to use from several threads. Every failure is raised as one of our own exceptions.
"""

from __future__ import annotations

import builtins
import json
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import urllib3
from kubernetes import client, config

from kvtier_operator import names
from kvtier_operator.errors import (
    ClusterConflict,
    ClusterError,
    ClusterForbidden,
    ClusterRejected,
    ClusterUnavailable,
    KindMissing,
)
from kvtier_operator.names import Manifest, ObjectKey, TierRef

_PLURALS: Final[Mapping[tuple[str, str], str]] = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Event"): "events",
    ("v1", "Node"): "nodes",
    ("v1", "PersistentVolumeClaim"): "persistentvolumeclaims",
    ("v1", "Pod"): "pods",
    ("v1", "Secret"): "secrets",
    ("v1", "Service"): "services",
    ("v1", "ServiceAccount"): "serviceaccounts",
    ("apps/v1", "Deployment"): "deployments",
    ("batch/v1", "Job"): "jobs",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudgets",
    (names.COORDINATION, names.LEASE_KIND): "leases",
    (names.RBAC, "Role"): "roles",
    (names.RBAC, "RoleBinding"): "rolebindings",
    (names.API_VERSION, names.KIND): names.PLURAL,
}

PAGE: Final = 100
"""Objects that are read of a long list at a time: parsed, each takes some ten kilobytes, and its list ten times that
of a tier that is looked at."""

_TIMEOUT_SECONDS: Final = (10.0, 60.0)
"""To connect and to read: a hung API server must not hold a worker for ever."""


class Cluster(Protocol):
    """What a reconcile may do to a cluster; every method may raise `ClusterError`."""

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object, or None where there is none."""
        ...

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> list[Manifest]:
        """Return the objects that carry the labels of the selector."""
        ...

    def pages(self, api_version: str, kind: str, *, namespace: str) -> Iterator[builtins.list[Manifest]]:
        """Return all objects of a kind, some at a time; the empty namespace is all of them."""
        ...

    def apply(self, manifest: Manifest, *, over: str | None) -> Manifest:
        """Create or update an object by server-side apply and return it as it then stands.

        Args:
            manifest: every field we own, and no other.
            over: uid of the object of ours that is to be updated, whose conflicting fields we take; None creates, and
                takes no field from anybody.
        """
        ...

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        """Delete that incarnation of the object; no error where it is gone already."""
        ...

    def patch_status(self, tier: TierRef, changes: Mapping[str, Any], *, resource_version: str) -> None:
        """Merge changes into the status of that incarnation of a tier, in that version; None removes a field.

        Raises:
            ClusterConflict: it changed since: the changes were worked out for a status that is not there any more.
        """
        ...

    def post_event(self, event: Manifest) -> None:
        """Create an Event."""
        ...

    def events(self, namespace: str, *, uid: str) -> builtins.list[Manifest]:
        """Return the Events about one object."""
        ...


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """How to reach the API server, for whoever brings another client."""

    server: str
    ca_path: str | None
    is_insecure: bool
    username: str | None
    password: str | None
    authorization: str | None
    """Value of the Authorization header."""
    certificate_path: str | None
    private_key_path: str | None


class KubernetesCluster:
    """The cluster that a kubeconfig or the pod's service account points at."""

    def __init__(
        self,
        api: client.ApiClient,
        *,
        timeout_seconds: tuple[float, float] = _TIMEOUT_SECONDS,
        may_write: Callable[[], bool] = lambda: True,
        on_answer: Callable[[str, int], None] = lambda _method, _status: None,
    ) -> None:
        """Use the client's connection pool and credentials; `connect` makes one.

        Args:
            api: the client.
            timeout_seconds: to connect, and to read.
            may_write: asked right before each request that is no GET.
            on_answer: told the method and the HTTP status of each request; 0 where there was no answer.
        """
        self._api = api
        self._timeout_seconds = timeout_seconds
        self._may_write = may_write
        self._on_answer = on_answer

    def credentials(self) -> Credentials:
        """Return what this client connects with now."""
        settings = self._api.configuration
        return Credentials(
            server=settings.host,
            ca_path=settings.ssl_ca_cert,
            is_insecure=not settings.verify_ssl,
            username=settings.username or None,
            password=settings.password or None,
            authorization=settings.get_api_key_with_prefix("BearerToken")
            or settings.get_api_key_with_prefix("authorization"),
            certificate_path=settings.cert_file,
            private_key_path=settings.key_file,
        )

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object, or None where there is none."""
        try:
            return self._request("GET", _path(key.api_version, key.kind, namespace, key.name), what=f"read {key}")
        except _NotFoundError:
            return None

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> list[Manifest]:
        """Return the objects that carry the labels of the selector."""
        answer = self._request(
            "GET",
            _path(api_version, kind, namespace) + _query({"labelSelector": selector} if selector else {}),
            what=f"list {kind} objects of {namespace or 'all namespaces'}",
        )
        # Items of a list carry neither, and every reader wants both.
        return [{**item, "apiVersion": api_version, "kind": kind} for item in answer["items"]]

    def pages(self, api_version: str, kind: str, *, namespace: str) -> Iterator[builtins.list[Manifest]]:
        """Return all objects of a kind, some at a time; the empty namespace is all of them."""
        query = {"limit": str(PAGE)}
        while True:
            answer = self._request(
                "GET",
                _path(api_version, kind, namespace) + _query(query),
                what=f"list {kind} objects of {namespace or 'all namespaces'}",
            )
            yield [{**item, "apiVersion": api_version, "kind": kind} for item in answer["items"]]
            query["continue"] = answer["metadata"].get("continue", "")
            if not query["continue"]:
                return

    def apply(self, manifest: Manifest, *, over: str | None) -> Manifest:
        """Create or update an object by server-side apply and return it as it then stands."""
        key, metadata = names.key_of(manifest), manifest["metadata"]
        # The uid is a precondition: what replaced our object meanwhile is not ours to write.
        body = manifest if over is None else {**manifest, "metadata": {**metadata, "uid": over}}
        return self._request(
            "PATCH",
            _path(key.api_version, key.kind, metadata["namespace"], key.name)
            + _query({"fieldManager": names.FIELD_MANAGER, "force": "false" if over is None else "true"}),
            body=body,
            content_type="application/apply-patch+yaml",
            what=f"apply {key}",
        )

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        """Delete that incarnation of the object; no error where it is gone already."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self._request(
                "DELETE", _path(key.api_version, key.kind, namespace, key.name), body=options, what=f"delete {key}"
            )
        except _NotFoundError:
            return

    def patch_status(self, tier: TierRef, changes: Mapping[str, Any], *, resource_version: str) -> None:
        """Merge changes into the status of that incarnation of a tier, in that version; None removes a field.

        Raises:
            ClusterConflict: it changed since: the changes were worked out for a status that is not there any more.
        """
        try:
            self._request(
                "PATCH",
                _path(names.API_VERSION, names.KIND, tier.namespace, tier.name)
                + "/status"
                + _query({"fieldManager": names.FIELD_MANAGER}),
                body={
                    "metadata": {"uid": tier.uid, "resourceVersion": resource_version},
                    "status": dict(changes),
                },
                content_type="application/merge-patch+json",
                what=f"write the status of {tier}",
            )
        except _NotFoundError:
            # Deleted since we looked: nobody is left to read it.
            return

    def post_event(self, event: Manifest) -> None:
        """Create an Event."""
        self._request("POST", _path("v1", "Event", event["metadata"]["namespace"]), body=event, what="post an Event")

    def events(self, namespace: str, *, uid: str) -> builtins.list[Manifest]:
        """Return the Events about one object."""
        path = _path("v1", "Event", namespace) + _query({"fieldSelector": f"involvedObject.uid={uid}"})
        found: builtins.list[Manifest] = self._request("GET", path, what="list Events")["items"]
        return found

    def request(self, method: str, path: str, *, what: str, body: Mapping[str, Any] | None = None) -> Manifest:
        """Send a request that no other method covers and return the answer; `what` tells an error what was tried."""
        return self._request(method, path, what=what, body=body)

    def _request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        if method != "GET" and not self._may_write():
            raise ClusterUnavailable(f"cannot {what}: this operator does not lead any more")
        headers = {**self._api.default_headers, "Accept": "application/json", "Content-Type": content_type}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        connect_seconds, read_seconds = self._timeout_seconds
        try:
            # Past the package's own serialisation, which looks at every value of a body that is plain already.
            response = self._api.rest_client.pool_manager.request(
                method,
                f"{self._api.configuration.host}{path}",
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(connect=connect_seconds, read=read_seconds),
            )
            data = response.data
        except (urllib3.exceptions.HTTPError, client.ApiException, OSError) as error:
            self._on_answer(method, 0)
            raise ClusterUnavailable(f"cannot {what}: {error}") from error
        self._on_answer(method, response.status)
        if response.status >= 400:  # noqa: PLR2004  where HTTP's errors begin
            raise _error(response.status, data, what)
        document: Manifest = json.loads(data)
        return document


class _NotFoundError(KindMissing):
    """404, which only some callers take for an answer."""


def connect(
    *,
    timeout_seconds: tuple[float, float] = _TIMEOUT_SECONDS,
    may_write: Callable[[], bool] = lambda: True,
    on_answer: Callable[[str, int], None] = lambda _method, _status: None,
) -> KubernetesCluster:
    """Connect with the pod's service account, or else with the kubeconfig; see `KubernetesCluster`.

    Raises:
        ClusterUnavailable: there is neither.
    """
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException:
        try:
            # The package looks at the variable when it is imported, which may be too early.
            config.load_kube_config(config_file=os.environ.get("KUBECONFIG"), client_configuration=settings)
        except (config.ConfigException, OSError) as error:
            raise ClusterUnavailable(
                f"no cluster to talk to: {error}; set KUBECONFIG to a file that kubectl can use"
            ) from error
    # Retries are the work queue's: urllib3's own would hide faults and outlast the time-outs.
    settings.retries = False
    return KubernetesCluster(
        client.ApiClient(settings), timeout_seconds=timeout_seconds, may_write=may_write, on_answer=on_answer
    )


def check_access(cluster: Cluster, namespaces: tuple[str, ...]) -> None:
    """List tiers once, so that a missing CRD or a missing permission is said at once and in words.

    Raises:
        ClusterError: they cannot be listed.
    """
    for namespace in namespaces or ("",):
        try:
            next(cluster.pages(names.API_VERSION, names.KIND, namespace=namespace))
        except KindMissing as error:
            raise KindMissing(
                f"the cluster does not know {names.KIND} resources: kubectl apply -f crds/kvcachetier.yaml ({error})"
            ) from error


def _path(api_version: str, kind: str, namespace: str, name: str = "") -> str:
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{scope}/{_PLURALS[api_version, kind]}{f'/{name}' if name else ''}"


def _query(parameters: Mapping[str, str]) -> str:
    return f"?{urllib.parse.urlencode(parameters)}" if parameters else ""


def _error(status: int, data: bytes, what: str) -> ClusterError:
    """Return our exception for an answer of the API server."""
    try:
        document = json.loads(data)
    except ValueError:
        document = {}
    message = document.get("message") if isinstance(document, dict) else None
    text = f"cannot {what}: {status} {message or data[:200].decode(errors='replace')}"
    by_status: Mapping[int, type[ClusterError]] = {
        400: ClusterRejected,
        401: ClusterForbidden,
        403: ClusterForbidden,
        404: _NotFoundError,
        409: ClusterConflict,
        422: ClusterRejected,
    }
    return by_status.get(status, ClusterUnavailable)(text)
