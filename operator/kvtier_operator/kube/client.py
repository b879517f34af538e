# SPDX-License-Identifier: Apache-2.0
"""Which cluster to talk to, and which namespace is meant: from the pod's service account, or as kubectl finds it.

The only door to the API server: read, server-side apply, delete, write status, post events.

The only user of the `kubernetes` package, whose transport is used without its typed models: those reject answers that
carry fields newer than the package. Safe to use from several threads. Every failure is raised as one of our own
exceptions.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import urllib3
from kubernetes import client, config

from kvtier_operator import names
from kvtier_operator.errors import (
    ClusterConflict,
    ClusterError,
    ClusterExpired,
    ClusterForbidden,
    ClusterRejected,
    ClusterUnavailable,
    KindMissing,
)
from kvtier_operator.kube.object_store import Scope, read_json
from kvtier_operator.names import Manifest, ObjectKey, TierRef

NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def read_settings(*, kubeconfig: str | None = None, context: str | None = None) -> client.Configuration:
    """Return how to reach the cluster of the pod's service account, or else of the kubeconfig.

    Raises:
        ClusterUnavailable: there is neither.
    """
    settings = client.Configuration()
    if not kubeconfig and not context:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config(client_configuration=settings)
            return settings
    try:
        # The package looks at the variable when it is imported, which may be too early.
        file = kubeconfig or os.environ.get("KUBECONFIG")
        config.load_kube_config(config_file=file, context=context, client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        raise ClusterUnavailable(f"no cluster to talk to: {_why_no_settings(error, file, context)}") from error
    return settings


def _why_no_settings(error: Exception, file: str | None, context: str | None) -> str:
    """Return why a kubeconfig cannot be used, with the remedy."""
    if file and not any(Path(each).is_file() for each in file.split(os.pathsep)):
        return f"there is no file {file}; set KUBECONFIG to a file that kubectl can use"
    if context:
        with contextlib.suppress(config.ConfigException, OSError):
            every, _ = config.list_kube_config_contexts(config_file=file)
            known = sorted(each["name"] for each in every)
            if context not in known:
                return f"the kubeconfig has no context {context}; it has {', '.join(known)}"
    return f"{str(error).rstrip('.')}; set KUBECONFIG to a file that kubectl can use"


def _in_words(error: Exception, server: str) -> str:
    """Return why the API server gave no answer, without the classes of the HTTP library."""
    if isinstance(error, urllib3.exceptions.NameResolutionError):
        return f"the name in {server} is not known"
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        reason = (getattr(error.__cause__ or error.__context__, "strerror", None) or "no connection").lower()
        return f"no API server answers at {server} ({reason}): does the cluster run, and is the context right?"
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError | urllib3.exceptions.ReadTimeoutError):
        return f"{server} does not answer in time"
    if isinstance(error, urllib3.exceptions.SSLError):
        return f"the certificate of {server} is not trusted ({error})"
    return str(error)


def user_kubeconfig(kubeconfig: str | None) -> str | None:
    """Return the file that a user means, as kubectl does: in a pod, too, it goes before the pod's account."""
    named = kubeconfig or os.environ.get("KUBECONFIG")
    if named:
        return named
    with contextlib.suppress(RuntimeError):  # an account without a home
        usual = Path("~/.kube/config").expanduser()
        return str(usual) if usual.is_file() else None
    return None


def read_namespace(*, kubeconfig: str | None = None, context: str | None = None) -> str:
    """Return the namespace of the context, or else of the pod that this is, as kubectl would take it."""
    if not kubeconfig and not context and "KUBERNETES_SERVICE_HOST" in os.environ and NAMESPACE_FILE.exists():
        return own_namespace()
    try:
        every, current = config.list_kube_config_contexts(config_file=kubeconfig or os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError):
        return "default"
    chosen = next((each for each in every if each["name"] == context), current)
    return (chosen.get("context") or {}).get("namespace") or "default"


def own_namespace() -> str:
    """Return the namespace of this pod, or ``default`` outside of one."""
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


PAGE: Final = 100
"""Objects that are read of a long list at a time: parsed, each takes some ten kilobytes, and its list ten times that
of a tier that is looked at."""

_ERRORS: Final = 400
"""Where HTTP's errors begin."""

_TIMEOUT_SECONDS: Final = (10.0, 60.0)
"""To connect and to read: a hung API server must not hold a worker for ever."""


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

        `may_write` is asked right before each request that is no GET; `on_answer` gets the status, 0 without an answer.
        """
        self._api = api
        self._timeout_seconds = timeout_seconds
        self._may_write = may_write
        self._on_answer = on_answer

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object, or None where there is none."""
        try:
            return self.request("GET", _path(key.api_version, key.kind, namespace, key.name), what=f"read {key}")
        except _NotFoundError:
            return None

    refresh = get

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> list[Manifest]:
        """Return the objects that carry the labels of the selector."""
        answer = self.request(
            "GET",
            _path(api_version, kind, namespace) + _query({"labelSelector": selector} if selector else {}),
            what=f"list {kind} objects of {namespace or 'all namespaces'}",
        )
        # Items of a list carry neither, and every reader wants both.
        return [{**item, "apiVersion": api_version, "kind": kind} for item in answer["items"]]

    def tiers_on(self, claim: str, namespace: str) -> builtins.list[Manifest]:
        """Return the tiers that keep their blocks on a claim."""
        tiers = self.list(names.API_VERSION, names.KIND, namespace=namespace, selector="")
        return [each for each in tiers if names.claim_of(each) == claim]

    def pages(self, api_version: str, kind: str, *, namespace: str) -> Iterator[builtins.list[Manifest]]:
        """Return all objects of a kind, some at a time; the empty namespace is all of them."""
        for items, _ in self.read_all(Scope(api_version, kind, namespace), page=PAGE):
            yield items

    def read_all(self, scope: Scope, *, page: int) -> Iterator[tuple[builtins.list[Manifest], str]]:
        """Return all objects of a scope, some at a time, each time with the version of the list."""
        query = {**dict(scope.query), "limit": str(page)}
        path = _path(scope.api_version, scope.kind, scope.namespace)
        while True:
            answer = self.request("GET", path + _query(query), what=f"list {scope}")
            items = [{**item, "apiVersion": scope.api_version, "kind": scope.kind} for item in answer["items"]]
            yield items, answer["metadata"]["resourceVersion"]
            query["continue"] = answer["metadata"].get("continue", "")
            if not query["continue"]:
                return

    @contextlib.contextmanager
    def watch(self, scope: Scope, *, version: str, seconds: int) -> Iterator[Events]:
        """Follow what changes in a scope after a version, until the API server ends it after so many seconds."""
        query = {**dict(scope.query), "watch": "true", "allowWatchBookmarks": "true"}
        query |= {"resourceVersion": version, "timeoutSeconds": str(seconds)}
        path = _path(scope.api_version, scope.kind, scope.namespace) + _query(query)
        with self._answer("GET", path, what=f"watch {scope}", read_seconds=seconds * 1.1, is_whole=False) as response:
            yield Events(response, scope)

    def try_apply(self, manifest: Manifest, *, over: str | None) -> None:
        """Have the API server judge an apply without storing anything."""
        try:
            self.apply(manifest, over=over, dry_run=True)
        except ClusterForbidden as error:
            # The right to apply is that to try: what is refused here is the object, by an admission policy.
            raise ClusterRejected(str(error)) from error

    def apply(self, manifest: Manifest, *, over: str | None, dry_run: bool = False) -> Manifest:
        """Create or update an object by server-side apply and return it as it then stands."""
        key, metadata = names.key_of(manifest), manifest["metadata"]
        # The uid is a precondition: what replaced our object meanwhile is not ours to write.
        return self.request(
            "PATCH",
            _path(key.api_version, key.kind, metadata["namespace"], key.name)
            + _query(
                {
                    "fieldManager": names.FIELD_MANAGER,
                    "force": "false" if over is None else "true",
                    **({"dryRun": "All"} if dry_run else {}),
                }
            ),
            body=manifest if over is None else {**manifest, "metadata": {**metadata, "uid": over}},
            content_type="application/apply-patch+yaml",
            what=f"apply {key}",
        )

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        """Delete that incarnation of the object; no error where it is gone already."""
        options = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self.request(
                "DELETE", _path(key.api_version, key.kind, namespace, key.name), body=options, what=f"delete {key}"
            )
        except _NotFoundError:
            return

    def patch_status(self, tier: TierRef, changes: Mapping[str, Any], *, resource_version: str) -> Manifest | None:
        """Merge changes into the status of that incarnation of a tier, in that version; see `Cluster`."""
        try:
            return self.request(
                "PATCH",
                _path(names.API_VERSION, names.KIND, tier.namespace, tier.name)
                + "/status"
                + _query({"fieldManager": names.FIELD_MANAGER}),
                body={"metadata": {"uid": tier.uid, "resourceVersion": resource_version}, "status": dict(changes)},
                content_type="application/merge-patch+json",
                what=f"write the status of {tier}",
            )
        except _NotFoundError:
            return None

    def post_event(self, event: Manifest) -> None:
        """Create an Event."""
        self.request("POST", _path("v1", "Event", event["metadata"]["namespace"]), body=event, what="post an Event")

    def events(self, namespace: str, *, uid: str) -> builtins.list[Manifest]:
        """Return the Events about one object."""
        path = _path("v1", "Event", namespace) + _query({"fieldSelector": f"involvedObject.uid={uid}"})
        found: builtins.list[Manifest] = self.request("GET", path, what="list Events")["items"]
        return found

    def request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """Send a request and return the answer; `what` tells an error what was tried."""
        if method != "GET" and not self._may_write():
            raise ClusterUnavailable(f"cannot {what}: this operator does not hold its Lease any more")
        with self._answer(method, path, what=what, body=body, content_type=content_type) as response:
            return read_json(response.data)

    @contextlib.contextmanager
    def _answer(  # noqa: PLR0913  what a request is made of
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Mapping[str, Any] | Sequence[Any] | None = None,
        content_type: str = "application/json",
        read_seconds: float | None = None,
        is_whole: bool = True,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Send a request and return the answer, read as a whole or as it comes."""
        headers = {**self._api.default_headers, "Accept": "application/json", "Content-Type": content_type}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        timeout = urllib3.Timeout(connect=self._timeout_seconds[0], read=read_seconds or self._timeout_seconds[1])
        try:
            # Past the package's own serialisation, which looks at every value of a body that is plain already.
            response = self._api.rest_client.pool_manager.request(
                method,
                f"{self._api.configuration.host}{path}",
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=timeout,
                preload_content=is_whole,
            )
        except (urllib3.exceptions.HTTPError, client.ApiException, OSError) as error:
            self._on_answer(method, 0)
            raise ClusterUnavailable(f"cannot {what}: {_in_words(error, self._api.configuration.host)}") from error
        try:
            if is_whole or response.status >= _ERRORS:
                self._on_answer(method, response.status)
            if response.status >= _ERRORS:
                raise _error(response.status, response.data, what)
            yield response
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterUnavailable(f"cannot {what}: {error}") from error
        finally:
            if not is_whole:
                response.close()


class Events:
    """The events of one watch, as they come."""

    def __init__(self, response: urllib3.BaseHTTPResponse, scope: Scope) -> None:
        """Read from that answer."""
        self._response = response
        self._scope = scope

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Return each event; raises `ClusterUnavailable` where the connection breaks."""
        rest = b""
        for chunk in self._response.stream(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in filter(None, lines):
                event = read_json(line)
                if event["type"] != "ERROR":
                    event["object"] |= {"apiVersion": self._scope.api_version, "kind": self._scope.kind}
                yield event

    def stop(self) -> None:
        """End it, from another thread."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()


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
    settings = read_settings()
    # One connection for each watch, beside those of the workers.
    settings.connection_pool_maxsize = 64
    # Retries are the work queue's: urllib3's own would hide faults and outlast the time-outs.
    settings.retries = False
    return KubernetesCluster(
        client.ApiClient(settings), timeout_seconds=timeout_seconds, may_write=may_write, on_answer=on_answer
    )


def _path(api_version: str, kind: str, namespace: str, name: str = "") -> str:
    root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
    scope = f"/namespaces/{namespace}" if namespace else ""
    plural = "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"
    return f"{root}{scope}/{plural}{f'/{name}' if name else ''}"


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
        410: ClusterExpired,
        422: ClusterRejected,
    }
    return by_status.get(status, ClusterUnavailable)(text)
