# SPDX-License-Identifier: Apache-2.0
"""The API server: `ApiServer` for code in an event loop, `ApiServerThread` for other code.

It starts with the usual namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib.resources
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import yaml
from aiohttp import web

from kvtier_localcluster.apiserver import routing
from kvtier_localcluster.apiserver.registry.deletion import Deleter, GarbageCollector
from kvtier_localcluster.apiserver.registry.writes import ClusterIps, WriteOptions, Writer
from kvtier_localcluster.apiserver.store.memory import Event, EventType, Storage
from kvtier_localcluster.apiserver.store.objects import Json
from kvtier_localcluster.apiserver.store.resources import Registry
from kvtier_localcluster.loop_thread import LoopThread

_HOST: Final = "127.0.0.1"
_BODY_LIMIT_BYTES: Final = 64 << 20
_START_SECONDS: Final = 30
_CRDS: Final = ("apiextensions.k8s.io", "customresourcedefinitions")

Result = TypeVar("Result")


class ApiServer(routing.Api):
    """An in-memory Kubernetes API server on the loopback interface.

    All methods but `kubeconfig` are for the event loop that ran `start`. The attributes may be used from any thread.
    """

    def __init__(
        self, *, service_cidr: str = "127.96.0.0/16", bookmark_seconds: float = 30.0, protects_claims: bool = False
    ) -> None:
        """Make a server with empty storage; nothing listens before `start`.

        `protects_claims` gives every claim the finalizer that its controller takes off when no pod uses it.
        """
        storage, registry = Storage(), Registry()
        deleter = Deleter(storage, registry)
        self._cluster_ips = ClusterIps(service_cidr, storage)
        super().__init__(
            storage=storage,
            registry=registry,
            writer=Writer(storage, deleter, self._cluster_ips, protects_claims=protects_claims),
            deleter=deleter,
            bookmark_seconds=bookmark_seconds,
        )
        storage.listeners.append(self._follow_crds)
        self._collector = GarbageCollector(storage, registry, deleter)
        self._runner: web.AppRunner | None = None
        self._collecting: asyncio.Task[None] | None = None
        self.url = ""
        """Where the server listens, once it does."""

    def use_services(self, cidr: str) -> None:
        """Give Services addresses of this range; call it before `start`."""
        self._cluster_ips.use(cidr)

    @property
    def version(self) -> int:
        """The newest resourceVersion: each write has one of its own."""
        return self.storage.version

    def _follow_crds(self, event: Event) -> None:
        if event.key == _CRDS:
            self.registry.sync_crd(event.manifest, is_deleted=event.type is EventType.DELETED)

    async def start(self, port: int = 0) -> str:
        """Listen, on a free port unless one is given, and return the URL."""
        text = (importlib.resources.files(__package__) / "initial.yaml").read_text()
        for manifest in yaml.safe_load_all(text):
            await self.create(manifest)
        self._collecting = asyncio.create_task(self._collector.run())
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", functools.partial(routing.handle, self))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, _HOST, port).start()
        self.url = f"http://{_HOST}:{self._runner.addresses[0][1]}"
        return self.url

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
        resource = self.registry.for_manifest(manifest)
        created = self.writer.create(resource, manifest, options=WriteOptions(manager="local"))
        return copy.deepcopy(resource.view(created))

    def get(self, resource: str, namespace: str | None, name: str) -> Json | None:
        """Return an object by `plural` or `plural.group`, or None where there is none."""
        found = self.registry.named(resource)
        stored = self.storage.get(found.key, (namespace if found.is_namespaced else None, name))
        return None if stored is None else copy.deepcopy(found.view(stored))

    def list(self, resource: str, namespace: str | None = None) -> list[Json]:
        """Return all objects of a kind by `plural` or `plural.group`, in one namespace or in all."""
        found = self.registry.named(resource)
        stored = self.storage.all(found.key)
        kept = [each for each in stored if namespace in (None, each["metadata"].get("namespace"))]
        return [copy.deepcopy(found.view(each)) for each in kept]

    def compact(self) -> None:
        """Expire every resourceVersion handed out so far: who resumes a watch from one gets 410."""
        self.storage.compact()

    def drop_watches(self) -> None:
        """End every watch that is open."""
        self.storage.drop_watches()


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
