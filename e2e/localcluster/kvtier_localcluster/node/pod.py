# SPDX-License-Identifier: Apache-2.0
"""One pod on the node: its containers in order, its status in the API, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from kvtier_localcluster import kinds
from kvtier_localcluster.errors import ApiFailure, Conflict, NotFound, VolumeMissing
from kvtier_localcluster.kinds import Json, Kind
from kvtier_localcluster.node.container import ContainerRunner
from kvtier_localcluster.node.environment import Lookup, Sources
from kvtier_localcluster.node.services import NodeServices, PodServices
from kvtier_localcluster.node.status import INITIALIZING, PodState, status_for
from kvtier_localcluster.node.volumes import PodVolumes
from kvtier_localcluster.recorder import Happening

_LOG = logging.getLogger(__name__)
_RETRY_SECONDS = 0.5
_MOUNT_RETRY_SECONDS = 5.0
_DEFAULT_GRACE_SECONDS = 30


class PodRunner:
    """Runs one pod; made when it is given to the node, and ended when it is deleted."""

    def __init__(self, pod: Json, node: NodeServices) -> None:
        """Take an address; `start` runs the containers."""
        self._pod = pod
        self._node = node
        self._pod_ip = node.addresses.allocate()
        self._began = kinds.timestamp()
        self._config_changed = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._is_ending = False
        sources = Sources(
            pod=pod, pod_ip=self._pod_ip, config_map=self._lookup(kinds.CONFIG_MAP), secret=self._lookup(kinds.SECRET)
        )
        self._volumes = PodVolumes(sources, node.data, claim=self._lookup(kinds.PERSISTENT_VOLUME_CLAIM))
        services = PodServices(
            node=node,
            sources=sources,
            volumes=self._volumes,
            tell=self._tell,
            report=self._state_changed.set,
            config_changed=self._config_changed,
        )
        spec = pod["spec"]
        self._init = [ContainerRunner(each, services, is_init=True) for each in spec.get("initContainers") or []]
        self._containers = [ContainerRunner(each, services) for each in spec["containers"]]
        for each in self._containers if self._init else ():
            each.state.waiting_reason = INITIALIZING
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def namespace(self) -> str:
        """Return the pod's namespace."""
        return kinds.key_of(self._pod)[0]

    @property
    def name(self) -> str:
        """Return the pod's name."""
        return kinds.key_of(self._pod)[1]

    def start(self) -> None:
        """Run the containers and report on them, in tasks of their own."""
        self._state_changed.set()
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._keep_reporting())]

    def refresh(self) -> None:
        """Notice that a ConfigMap, Secret or claim of the namespace changed."""
        self._config_changed.set()
        self._config_changed.clear()
        for each in (*self._init, *self._containers):
            each.refresh()

    async def execute(
        self,
        container: str,
        command: list[str],
        send: Callable[[int, bytes], Awaitable[None]],
        given: AsyncIterator[bytes] | None,
    ) -> int:
        """Run a command in one of the containers and return its exit code."""
        runner = next(each for each in self._containers if each.state.name == container)
        return await runner.execute(command, send, given)

    async def end(self, grace_seconds: float) -> None:
        """End all containers; return when none of their processes is left. Calling again with less hurries."""
        self._is_ending = True
        self._config_changed.set()
        self._state_changed.set()
        await asyncio.gather(*(each.stop(grace_seconds) for each in (*self._init, *self._containers)))
        await self._tasks[0]

    async def leave(self) -> None:
        """Write the last status, tell the API that nothing of the pod is left, and clean up; once, after `end`."""
        self._tasks[1].cancel()
        await asyncio.gather(self._tasks[1], return_exceptions=True)
        try:
            await self._report()
            current = self._current()
            if current is not None and kinds.is_deleting(current):
                await self._node.client.delete(kinds.POD, current, grace_seconds=0)
        except ApiFailure as problem:
            _LOG.debug("pod %s is gone already: %s", kinds.key_of(self._pod), problem)
        self._node.addresses.release(self._pod_ip)
        await asyncio.to_thread(self._volumes.remove)

    def _lookup(self, kind: Kind) -> Lookup:
        informer = self._node.informers[kind]
        return lambda name: informer.get((kinds.key_of(self._pod)[0], name))

    async def _mount(self) -> None:
        """Wait until all volumes of the pod can be set up: no container starts before."""
        while not self._is_ending:
            try:
                self._volumes.check()
            except VolumeMissing as problem:
                self._tell(Happening(reason="FailedMount", message=str(problem), is_warning=True))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._config_changed.wait(), _MOUNT_RETRY_SECONDS)
            else:
                return

    async def _run(self) -> None:
        await self._mount()
        for each in self._init:
            await each.run()
            if self._is_ending or not each.state.is_initialized:
                break
        else:
            await asyncio.gather(*(each.run() for each in self._containers))
        self._state_changed.set()

    async def _keep_reporting(self) -> None:
        while True:
            await self._state_changed.wait()
            self._state_changed.clear()
            try:
                await self._report()
            except NotFound:
                return
            except ApiFailure as problem:
                _LOG.debug("status of %s will be written again: %s", kinds.key_of(self._pod), problem)
                self._state_changed.set()
                await asyncio.sleep(0 if isinstance(problem, Conflict) else _RETRY_SECONDS)

    async def _report(self) -> None:
        current = self._current()
        if current is None:
            return
        state = PodState(
            pod_ip=self._pod_ip,
            started_at=self._began,
            containers=[each.state for each in self._containers],
            init_containers=[each.state for each in self._init],
            is_ending=self._is_ending,
        )
        before = current.get("status") or {}
        difference = kinds.merge_difference(before, status_for(state, before, kinds.timestamp()))
        if difference:
            written = await self._node.client.patch(kinds.POD, current, {"status": difference}, subresource="status")
            self._node.informers[kinds.POD].remember(written)

    def _current(self) -> Json | None:
        known = self._node.informers[kinds.POD].get(kinds.key_of(self._pod))
        return known if known is not None and kinds.uid_of(known) == kinds.uid_of(self._pod) else None

    def _tell(self, happening: Happening) -> None:
        self._node.recorder.record(self._current() or self._pod, happening)


def grace_seconds_of(pod: Json) -> float:
    """Return how long the containers of a pod that is being deleted may take to end."""
    asked = pod["metadata"].get("deletionGracePeriodSeconds")
    if asked is None:
        asked = pod["spec"].get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)
    return float(asked)
