# SPDX-License-Identifier: Apache-2.0
"""The API server: `ApiServer` for code in an event loop, `ApiServerThread` for other code.

It starts with the usual namespaces and the ClusterRoles for people, which name only kinds that are served here.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import yaml
from aiohttp import web

from kvtier_localcluster.apiserver import reading, routing, streams
from kvtier_localcluster.apiserver.authorization import Authorizer
from kvtier_localcluster.apiserver.registry.deletion import Deleter, GarbageCollector
from kvtier_localcluster.apiserver.registry.writes import ClusterIps, WriteOptions, Writer
from kvtier_localcluster.apiserver.requests import AuditEntry
from kvtier_localcluster.apiserver.store.memory import Event, EventType, Storage
from kvtier_localcluster.apiserver.store.objects import Json
from kvtier_localcluster.apiserver.store.resources import Registry
from kvtier_localcluster.loop_thread import LoopThread

_NAMESPACES: Final = ("default", "kube-system", "kube-public", "kube-node-lease")
_RBAC: Final = "rbac.authorization.k8s.io"
_READ: Final = ["get", "list", "watch"]
_WRITE: Final = ["create", "delete", "deletecollection", "patch", "update"]
_OF_PEOPLE: Final = {
    "": ["configmaps", "endpoints", "persistentvolumeclaims", "pods", "serviceaccounts", "services"],
    "apps": ["daemonsets", "deployments", "deployments/scale", "replicasets", "replicasets/scale", "statefulsets"],
    "autoscaling": ["horizontalpodautoscalers"],
    "batch": ["cronjobs", "jobs"],
    "networking.k8s.io": ["ingresses", "networkpolicies"],
    "policy": ["poddisruptionbudgets"],
}
_STATUS_READ: Final = [
    "events",
    "limitranges",
    "namespaces",
    "persistentvolumeclaims/status",
    "pods/log",
    "pods/status",
]


def _rule(group: str, resources: list[str], verbs: list[str]) -> Json:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _role(name: str, labels: tuple[str, ...] = (), **content: object) -> Json:
    marks = {f"{_RBAC}/aggregate-to-{role}": "true" for role in labels}
    metadata = {"name": name, "labels": {"kubernetes.io/bootstrapping": "rbac-defaults", **marks}}
    return {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": metadata, **content}


def _aggregated(name: str, part_of: str = "") -> Json:
    rule = {"clusterRoleSelectors": [{"matchLabels": {f"{_RBAC}/aggregate-to-{name}": "true"}}]}
    return _role(name, (part_of,) if part_of else (), aggregationRule=rule, rules=[])


def initial_objects() -> Iterator[Json]:
    """Yield what there is before anybody has made anything."""
    for name in _NAMESPACES:
        yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    everything = [_rule("*", ["*"], ["*"]), {"nonResourceURLs": ["*"], "verbs": ["*"]}]
    reads = [_rule(group, resources, _READ) for group, resources in _OF_PEOPLE.items()]
    writes = [_rule(group, resources, _WRITE) for group, resources in _OF_PEOPLE.items()]
    more = [
        _rule("", ["secrets"], _READ + _WRITE),
        _rule("", ["pods/exec", "pods/portforward"], ["create", "get"]),
    ]
    yield _role("cluster-admin", rules=everything)
    yield _aggregated("admin")
    yield _aggregated("edit", part_of="admin")
    yield _aggregated("view", part_of="edit")
    yield _role("system:aggregate-to-view", ("view",), rules=[*reads, _rule("", _STATUS_READ, _READ)])
    yield _role("system:aggregate-to-edit", ("edit",), rules=[*writes, *more])
    administers = [_rule(_RBAC, ["rolebindings", "roles"], _READ + _WRITE)]
    yield _role("system:aggregate-to-admin", ("admin",), rules=administers)
    subject = {"kind": "Group", "apiGroup": _RBAC, "name": "system:masters"}
    reference = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "cluster-admin"}
    binding = {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "cluster-admin"}}
    yield {**binding, "subjects": [subject], "roleRef": reference}


_HOST: Final = "127.0.0.1"
_BODY_LIMIT_BYTES: Final = 64 << 20
_START_SECONDS: Final = 30
_CRDS: Final = ("apiextensions.k8s.io", "customresourcedefinitions")

Result = TypeVar("Result")


class ApiServer:
    """An in-memory Kubernetes API server on the loopback interface.

    All methods but `kubeconfig` are for the event loop that ran `start`. The attributes may be used from any thread.
    """

    def __init__(
        self, *, service_cidr: str = "127.96.0.0/16", bookmark_seconds: float = 30.0, protects_claims: bool = False
    ) -> None:
        """Make a server with empty storage; nothing listens before `start`.

        `protects_claims` gives every claim the finalizer that its controller takes off when no pod uses it.
        """
        self._storage = Storage()
        self._registry = Registry()
        self._storage.listeners.append(self._follow_crds)
        self._deleter = Deleter(self._storage, self._registry)
        self._collector = GarbageCollector(self._storage, self._registry, self._deleter)
        self._cluster_ips = ClusterIps(service_cidr, self._storage)
        self._writer = Writer(self._storage, self._deleter, self._cluster_ips, protects_claims=protects_claims)
        self._api = routing.Api(
            storage=self._storage,
            registry=self._registry,
            writer=self._writer,
            deleter=self._deleter,
            authorizer=Authorizer(self._storage),
            bookmark_seconds=bookmark_seconds,
        )
        self._runner: web.AppRunner | None = None
        self._collecting: asyncio.Task[None] | None = None
        self.url = ""
        """Where the server listens, once it does."""

    def use_services(self, cidr: str) -> None:
        """Give Services addresses of this range; call it before `start`."""
        self._cluster_ips.use(cidr)

    @property
    def faults(self) -> list[routing.Fault]:
        """Functions that look at each request and may answer it with an ApiError; append and remove at will."""
        return self._api.faults

    @property
    def audit(self) -> list[AuditEntry]:
        """Every request so far, oldest first."""
        return self._api.audit

    @property
    def version(self) -> int:
        """The newest resourceVersion: each write has one of its own."""
        return self._storage.version

    @property
    def pod_logs(self) -> reading.PodLogs | None:
        """The function that reads the log of a container: `async (namespace, pod, container, tail) -> bytes`."""
        return self._api.pod_logs

    @pod_logs.setter
    def pod_logs(self, source: reading.PodLogs | None) -> None:
        self._api.pod_logs = source

    @property
    def pod_exec(self) -> streams.PodExec | None:
        """The function that runs a command in a container."""
        return self._api.pod_exec

    @pod_exec.setter
    def pod_exec(self, source: streams.PodExec | None) -> None:
        self._api.pod_exec = source

    def _follow_crds(self, event: Event) -> None:
        if event.key == _CRDS:
            self._registry.sync_crd(event.manifest, is_deleted=event.type is EventType.DELETED)

    async def start(self, port: int = 0) -> str:
        """Listen, on a free port unless one is given, and return the URL."""
        for manifest in initial_objects():
            await self.create(manifest)
        self._collecting = asyncio.create_task(self._collector.run())
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, port).start()
        self.url = f"http://{_HOST}:{self._runner.addresses[0][1]}"
        return self.url

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        return await routing.handle(self._api, request)

    async def stop(self) -> None:
        """End all watches and stop listening; the objects stay readable through `get` and `list`."""
        self.drop_watches()
        if self._collecting is not None:
            self._collecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._collecting
        if self._runner is not None:
            await self._runner.cleanup()

    def kubeconfig(self) -> str:
        """Return the text of a kubeconfig for this server."""
        name = "kvtier-local"
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": name, "cluster": {"server": self.url}}],
                "users": [{"name": name, "user": {"token": "local"}}],
                "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
                "current-context": name,
            },
            sort_keys=False,
        )

    async def create(self, manifest: Json) -> Json:
        """Create an object as a client would, without HTTP; validation and defaults apply."""
        resource = self._registry.for_manifest(manifest)
        created = await self._writer.create(resource, manifest, options=WriteOptions(manager="local"))
        return copy.deepcopy(resource.view(created))

    def get(self, resource: str, namespace: str | None, name: str) -> Json | None:
        """Return an object by `plural` or `plural.group`, or None where there is none."""
        found = self._registry.named(resource)
        stored = self._storage.get(found.key, (namespace if found.is_namespaced else None, name))
        return None if stored is None else copy.deepcopy(found.view(stored))

    def list(self, resource: str, namespace: str | None = None) -> list[Json]:
        """Return all objects of a kind by `plural` or `plural.group`, in one namespace or in all."""
        found = self._registry.named(resource)
        stored = self._storage.all(found.key)
        kept = [each for each in stored if namespace in (None, each["metadata"].get("namespace"))]
        return [copy.deepcopy(found.view(each)) for each in kept]

    def compact(self) -> None:
        """Expire every resourceVersion handed out so far: who resumes a watch from one gets 410."""
        self._storage.compact()

    def drop_watches(self) -> None:
        """End every watch that is open."""
        self._storage.drop_watches()


class ApiServerThread(LoopThread):
    """Runs an `ApiServer` in a thread of its own: a context manager for tests and tools without an event loop."""

    def __init__(self, *, service_cidr: str = "127.96.0.0/16", bookmark_seconds: float = 30.0, port: int = 0) -> None:
        """Keep the settings; the server starts with `start`, or on entering the context."""
        super().__init__("apiserver", limit_seconds=_START_SECONDS)
        self._port = port
        self.server = ApiServer(service_cidr=service_cidr, bookmark_seconds=bookmark_seconds)
        """The server; its attributes (`faults`, `audit`, `pod_logs`) may be used from any thread."""

    async def _begin(self) -> None:
        try:
            await self.server.start(self._port)
        except BaseException:
            await self.server.stop()
            raise

    async def _end(self) -> None:
        await self.server.stop()

    def _call_plain(self, action: Callable[[], Result]) -> Result:
        async def run() -> Result:
            return action()

        return self.call(run)

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self.server.url

    def kubeconfig(self) -> str:
        """Return the text of a kubeconfig."""
        return self.server.kubeconfig()

    def write_kubeconfig(self, path: Path) -> Path:
        """Write a kubeconfig and return its path."""
        path.write_text(self.kubeconfig())
        return path

    def create(self, manifest: Json) -> Json:
        """Create an object; see `ApiServer.create`."""
        return self.call(lambda: self.server.create(manifest))

    def get(self, resource: str, namespace: str | None, name: str) -> Json | None:
        """Return an object, or None; see `ApiServer.get`."""
        return self._call_plain(lambda: self.server.get(resource, namespace, name))

    def list(self, resource: str, namespace: str | None = None) -> list[Json]:
        """Return objects; see `ApiServer.list`."""
        return self._call_plain(lambda: self.server.list(resource, namespace))

    def compact(self) -> None:
        """Expire every resourceVersion; see `ApiServer.compact`."""
        self._call_plain(self.server.compact)

    def drop_watches(self) -> None:
        """End every watch; see `ApiServer.drop_watches`."""
        self._call_plain(self.server.drop_watches)
