# SPDX-License-Identifier: Apache-2.0
"""The node agent: one runner for each pod of this node, from its start to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from kvtier_localcluster import kinds
from kvtier_localcluster.informers import Change
from kvtier_localcluster.kinds import Json
from kvtier_localcluster.node.pod import PodRunner, grace_seconds_of
from kvtier_localcluster.node.services import NODE_NAME, NodeServices

_LOG = logging.getLogger(__name__)


class NodeAgent:
    """Runs the pods of the node as local processes."""

    def __init__(self, services: NodeServices) -> None:
        """Listen to pods, and to what they read from."""
        self._services = services
        self._runners: dict[str, PodRunner] = {}
        self._ends: dict[str, asyncio.Task[None]] = {}
        self._hurries: set[asyncio.Task[None]] = set()
        self._grace_seconds: dict[str, float] = {}
        self._is_stopping = False
        informers = services.informers
        informers[kinds.POD].listen(self._notice_pod)
        for kind in (kinds.CONFIG_MAP, kinds.SECRET, kinds.PERSISTENT_VOLUME_CLAIM):
            informers[kind].listen(self._notice_source)

    async def stop(self) -> None:
        """End every pod; when this returns, none of their processes is left."""
        self._is_stopping = True
        limit_seconds = self._services.settings.stop_grace_seconds
        for uid in list(self._runners):
            self._end(uid, limit_seconds)
        await asyncio.gather(*self._ends.values(), *self._hurries, return_exceptions=True)

    async def execute(  # noqa: PLR0913, PLR0917 - what kubectl exec names
        self,
        namespace: str,
        pod: str,
        container: str,
        command: list[str],
        send: Callable[[int, bytes], Awaitable[None]],
        given: AsyncIterator[bytes] | None = None,
    ) -> int:
        """Run a command in a container of a pod of this node and return its exit code."""
        for runner in self._runners.values():
            if (runner.namespace, runner.name) == (namespace, pod):
                return await runner.execute(container, command, send, given)
        await send(2, f"pod {namespace}/{pod} does not run on this node".encode())
        return 1

    def _notice_pod(self, change: Change) -> None:
        pod = change.object
        uid = kinds.uid_of(pod)
        if uid in self._runners:
            if change.is_gone or kinds.is_deleting(pod):
                self._end(uid, grace_seconds_of(pod))
        elif not change.is_gone and self._is_ours(pod) and not self._is_stopping:
            self._begin(pod)

    def _is_ours(self, pod: Json) -> bool:
        is_new = not kinds.is_finished(pod) and kinds.uid_of(pod) not in self._ends
        return pod["spec"].get("nodeName") == NODE_NAME and is_new

    def _begin(self, pod: Json) -> None:
        runner = PodRunner(pod, self._services)
        self._runners[kinds.uid_of(pod)] = runner
        runner.start()
        if kinds.is_deleting(pod):
            self._end(kinds.uid_of(pod), grace_seconds_of(pod))

    def _end(self, uid: str, grace_seconds: float) -> None:
        known = self._grace_seconds.get(uid)
        if known is not None and grace_seconds >= known:
            return
        self._grace_seconds[uid] = grace_seconds
        loop = asyncio.get_running_loop()
        if known is None:
            self._ends[uid] = loop.create_task(self._see_out(uid, grace_seconds))
        else:
            hurry = loop.create_task(self._runners[uid].end(grace_seconds))
            self._hurries.add(hurry)
            hurry.add_done_callback(self._hurries.discard)

    async def _see_out(self, uid: str, grace_seconds: float) -> None:
        runner = self._runners[uid]
        try:
            await runner.end(grace_seconds)
            await runner.leave()
        except Exception:
            _LOG.exception("pod %s did not end in order", uid)
            raise
        finally:
            del self._runners[uid], self._ends[uid], self._grace_seconds[uid]

    def _notice_source(self, change: Change) -> None:
        namespace, name = kinds.key_of(change.object)
        _LOG.debug("%s %s/%s changed", change.object["kind"], namespace, name)
        for runner in self._runners.values():
            if runner.namespace == namespace:
                runner.refresh()
