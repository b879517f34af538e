# SPDX-License-Identifier: Apache-2.0
"""The whole cluster: API server, controllers and node, in one event loop.

    async with LocalCluster(ClusterSettings(data=path)) as cluster: ...     in an event loop
    with ClusterThread(ClusterSettings(data=path)) as cluster: ...          in tests with kopf's runner, for example

Both have `url` and `kubeconfig` (the path of the file) once started. After the end no process of a pod is alive.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import aiohttp

from kvtier_localcluster.apiserver.server import ApiServer
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.claims import ClaimController
from kvtier_localcluster.controllers.deployments import DeploymentController
from kvtier_localcluster.controllers.endpoints import EndpointsController
from kvtier_localcluster.controllers.jobs import JobController
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.controllers.replicasets import ReplicaSetController
from kvtier_localcluster.controllers.scheduler import Scheduler
from kvtier_localcluster.controllers.service_proxy import ServiceProxy
from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.errors import ClusterUnavailable
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.loop_thread import LoopThread
from kvtier_localcluster.node import registration
from kvtier_localcluster.node.agent import NodeAgent
from kvtier_localcluster.node.container import read_log
from kvtier_localcluster.node.environment import ImageProfile
from kvtier_localcluster.node.processes import end_leftovers
from kvtier_localcluster.node.services import NodeServices, NodeSettings, PodAddresses
from kvtier_localcluster.node.simulated import SimulatedNode
from kvtier_localcluster.recorder import EventRecorder

_LOG = logging.getLogger(__name__)
_THREAD_SECONDS = 60
_LOCK_ATTEMPTS = 10
_LOCK_SECONDS = 0.05


def default_images() -> list[ImageProfile]:
    """Return what our own images hold, found where this interpreter finds it, and how the operator's starts."""
    paths = []
    for package in ("kvtier_connector", "kvtier_cli"):
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            paths.append(str(Path(found.submodule_search_locations[0]).parent))
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    command = ("python3", "-m", "kvtier_cli")
    return [
        ImageProfile(prefix="ghcr.io/kvtier/", environment=environment),
        ImageProfile(prefix="ghcr.io/kvtier/operator:", environment=environment, entrypoint=command),
    ]


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Settings of a cluster."""

    data: Path
    """Where claims, logs and the kubeconfig go; claims are found again by the next cluster on the same directory."""
    port: int = 0
    """Of the API server; 0 takes a free one."""
    kubeconfig: Path | None = None
    """Where to write the kubeconfig, if not into the data directory."""
    simulate: bool = False
    """Pods become Ready without any process."""
    allocatable: Mapping[str, str] = field(default_factory=dict)
    """Overrides of what the node offers, such as `{"nvidia.com/gpu": "8"}`."""
    node: NodeSettings = field(default_factory=lambda: NodeSettings(images=default_images()))


class LocalCluster:
    """A cluster in the running event loop."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Store; nothing runs before `start`."""
        self._settings = settings
        self.data = DataDirectory(settings.data.resolve())
        self._lock: IO[str] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._controllers: Sequence[Controller] = ()
        self._agent: NodeAgent | None = None
        self._addresses: PodAddresses | None = None
        self._session: aiohttp.ClientSession | None = None
        self.server = ApiServer(protects_claims=True)
        """The API server, for its audit log and for injecting faults."""
        self.client: ApiClient
        self.informers: Informers

    @property
    def url(self) -> str:
        """Return where the API server listens."""
        return self.server.url

    @property
    def kubeconfig(self) -> Path:
        """Return the path of the kubeconfig."""
        return (self._settings.kubeconfig or self.data.kubeconfig).absolute()

    async def start(self) -> None:
        """Start everything; return when pods can be created.

        Raises:
            ClusterUnavailable: the data directory or the port is in use.
        """
        self._lock = await _take_lock(self.data)
        try:
            await asyncio.to_thread(self._clean_up)
            self._addresses = PodAddresses()
            await self._start_server(self._addresses)
            await self._start_components(self._addresses)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the pods, then everything else; when this returns, none of their processes is left."""
        for task in self._tasks:
            task.cancel()  # first, or controllers would replace the pods that end now
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._agent is not None:
            await self._agent.stop()
        for controller in self._controllers:
            if isinstance(controller, ServiceProxy):
                await controller.stop()
        if hasattr(self, "informers"):
            await self.informers.stop()
            await self.client.close()
        if self._session is not None:
            await self._session.close()
        await self.server.stop()
        if self._addresses is not None:
            self._addresses.close()
        if self._lock is not None:
            self.data.release()
            self._lock.close()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    def _clean_up(self) -> None:
        if ended := end_leftovers(self.data.pods):
            _LOG.warning("ended %d processes that an earlier run of this cluster left behind", ended)
        self.data.discard_pods()
        self.data.prepare()

    async def _start_server(self, addresses: PodAddresses) -> None:
        self.server.pod_logs = self._read_log
        self.server.use_services(addresses.services)
        try:
            await self.server.start(self._settings.port)
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE:
                raise
            port = self._settings.port
            message = f"port {port} is taken: choose another with --port, or stop what listens there (ss -ltnp)"
            raise ClusterUnavailable(message) from problem
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(self.kubeconfig, self.server.kubeconfig())

    async def _start_components(self, addresses: PodAddresses) -> None:
        client = self.client = ApiClient(self.server.url)
        informers = self.informers = Informers(client)
        await client.start()
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        machine = registration.machine_resources(self.data.root)
        offered = registration.SIMULATED if self._settings.simulate else machine
        self._controllers = [
            Scheduler(client, informers),
            ReplicaSetController(client, informers),
            DeploymentController(client, informers),
            JobController(client, informers),
            ClaimController(client, informers, self.data),
            EndpointsController(client, informers),
            ServiceProxy(client, informers),
        ]
        recorder = EventRecorder(client, "kubelet")
        if self._settings.simulate:
            self._controllers = [*self._controllers, SimulatedNode(client, informers, addresses)]
        else:
            services = NodeServices(
                client=client,
                informers=informers,
                recorder=recorder,
                data=self.data,
                addresses=addresses,
                session=self._session,
                settings=self._settings.node,
                kubeconfig=self.kubeconfig,
            )
            self._agent = NodeAgent(services)
            self.server.pod_exec = self._agent.execute
        await registration.register(client, {**offered, **self._settings.allocatable})
        await informers.start()
        running = [each.run() for each in self._controllers]
        self._tasks = [asyncio.create_task(each) for each in (*running, recorder.run())]

    async def _read_log(
        self, namespace: str, pod: str, container: str, tail: int | None, is_previous: bool
    ) -> bytes | None:
        key = (namespace, pod)
        path = self.data.previous_log(key, container) if is_previous else self.data.log(key, container)
        return None if is_previous and not path.exists() else await asyncio.to_thread(read_log, path, tail)


class ClusterThread(LoopThread):
    """A cluster in a thread of its own."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Store; `start` starts, or entering the context."""
        super().__init__("localcluster", limit_seconds=_THREAD_SECONDS)
        self.cluster = LocalCluster(settings)

    @property
    def url(self) -> str:
        """Return where the API server listens."""
        return self.cluster.url

    @property
    def kubeconfig(self) -> Path:
        """Return the path of the kubeconfig."""
        return self.cluster.kubeconfig

    async def _begin(self) -> None:
        await self.cluster.start()

    async def _end(self) -> None:
        await self.cluster.stop()


def _write_whole(path: Path, text: str) -> None:
    """Write a file whose readers wait for it to appear, and must not see half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


def is_running(data: DataDirectory) -> bool:
    """Tell whether some process runs a cluster on this data directory."""
    if not data.lock.exists():
        return False
    with data.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


async def _take_lock(data: DataDirectory) -> IO[str]:
    """Lock a data directory for as long as the file stays open: two clusters would run over each other's pods."""
    lock = await asyncio.to_thread(_open_lock, data)
    for _ in range(_LOCK_ATTEMPTS):  # who asks whether a cluster is running holds the lock for a moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            await asyncio.sleep(_LOCK_SECONDS)
        else:
            return lock
    lock.close()
    message = f"a cluster is running on {data.root} already: stop it with Ctrl-C where it runs, or choose --data"
    raise ClusterUnavailable(message)


def _open_lock(data: DataDirectory) -> IO[str]:
    data.root.mkdir(parents=True, exist_ok=True)
    return data.lock.open("a")
