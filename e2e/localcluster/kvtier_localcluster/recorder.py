# SPDX-License-Identifier: Apache-2.0
"""Post Events about objects, one for each distinct message, counting repetitions.

Best effort: an Event that cannot be posted is logged and dropped, and no caller waits for one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.errors import ApiFailure
from kvtier_localcluster.kinds import EVENT, Json, key_of, timestamp, uid_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Happening:
    """The content of an Event about an object."""

    reason: str
    message: str
    is_warning: bool = False


class EventRecorder:
    """Posts the Events of one component from a queue of its own."""

    def __init__(self, client: ApiClient, component: str) -> None:
        """Store; `run` posts."""
        self._client = client
        self._component = component
        self._queue: asyncio.Queue[tuple[Json, Happening]] = asyncio.Queue()
        self._posted: dict[tuple[str, Happening], Json] = {}

    def record(self, about: Json, happening: Happening) -> None:
        """Post an Event soon."""
        self._queue.put_nowait((about, happening))

    async def run(self) -> None:
        """Post what was recorded, until cancelled."""
        while True:
            about, happening = await self._queue.get()
            try:
                await self._post(about, happening)
            except ApiFailure as problem:
                self._posted.pop((uid_of(about), happening), None)
                _LOG.debug("event %s not posted: %s", happening.reason, problem)

    async def _post(self, about: Json, happening: Happening) -> None:
        known = self._posted.get((uid_of(about), happening))
        if known is None:
            posted = await self._client.create(EVENT, self._manifest(about, happening))
        else:
            posted = await self._client.patch(EVENT, known, {"count": known["count"] + 1, "lastTimestamp": timestamp()})
        self._posted[uid_of(about), happening] = posted

    def _manifest(self, about: Json, happening: Happening) -> Json:
        namespace, name = key_of(about)
        now = timestamp()
        involved = {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": name,
            "uid": uid_of(about),
            "resourceVersion": about["metadata"]["resourceVersion"],
        }
        if namespace:
            involved["namespace"] = namespace
        return {
            "metadata": {"generateName": f"{name}.", "namespace": namespace or "default"},
            "involvedObject": involved,
            "reason": happening.reason,
            "message": happening.message,
            "type": "Warning" if happening.is_warning else "Normal",
            "source": {"component": self._component, "host": "local"},
            "reportingComponent": self._component,
            "reportingInstance": "local",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
