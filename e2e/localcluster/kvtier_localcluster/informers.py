# SPDX-License-Identifier: Apache-2.0
"""A local copy of the objects of each kind, kept fresh by a watch; listeners are called with every change.

One event loop: nothing here is locked. A component that writes remembers the answer at once, so its next decision never
uses a copy older than its own last write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.errors import ApiFailure, Expired
from kvtier_localcluster.kinds import Json, Key, Kind, controller_uid, key_of, uid_of

_LOG = logging.getLogger(__name__)
_FIRST_RETRY_SECONDS = 0.1
_LAST_RETRY_SECONDS = 2.0
_REMEMBERED_DELETIONS = 4096


class Change(NamedTuple):
    """Something happened to an object; `old` is what we knew before."""

    type: str
    object: Json
    old: Json | None

    @property
    def is_gone(self) -> bool:
        """Tell whether the object no longer exists."""
        return self.type in ("DELETED", "LOST")


Listener = Callable[[Change], None]


class Informer:
    """The copy of one kind.

    A change of type LOST is a deletion that the watch missed: the object was there before a new listing, and not after.
    """

    def __init__(self, client: ApiClient, kind: Kind) -> None:
        """Store; `run` does the work."""
        self.kind = kind
        self.is_synced = asyncio.Event()
        self._client = client
        self._objects: dict[Key, Json] = {}
        self._listeners: list[Listener] = []
        self._deleted: deque[str] = deque(maxlen=_REMEMBERED_DELETIONS)

    def listen(self, listener: Listener) -> None:
        """Call the listener at every change, also for what the first listing finds."""
        self._listeners.append(listener)

    def get(self, key: Key) -> Json | None:
        """Return the object, or None; it is shared, so copy before changing."""
        return self._objects.get(key)

    def __iter__(self) -> Iterator[Json]:
        """Iterate over a snapshot of all objects."""
        return iter(list(self._objects.values()))

    def controlled_by(self, uid: str) -> list[Json]:
        """Return the objects that the owner with this uid controls."""
        return [item for item in self if controller_uid(item) == uid]

    def remember(self, written: Json) -> None:
        """Take over what the server answered to our own write, unless the watch knows better already."""
        key = key_of(written)
        known = self._objects.get(key)
        if uid_of(written) in self._deleted or (known is not None and _version(known) >= _version(written)):
            return
        self._objects[key] = {"apiVersion": self.kind.api_version, "kind": self.kind.name, **written}

    def forget(self, removed: Json) -> None:
        """Drop an object that the server has just deleted for us; listeners hear of it from the watch."""
        known = self._objects.get(key_of(removed))
        if known is not None and uid_of(known) == uid_of(removed):
            del self._objects[key_of(removed)]
            self._deleted.append(uid_of(removed))

    async def run(self) -> None:
        """Keep the copy fresh until cancelled."""
        retry_seconds = _FIRST_RETRY_SECONDS
        version: str | None = None
        while True:
            try:
                if version is None:
                    items, version = await self._client.list(self.kind)
                    self._replace_all(items)
                    self.is_synced.set()
                async for event in self._client.watch(self.kind, version):
                    version = str(event.object["metadata"]["resourceVersion"])
                    retry_seconds = _FIRST_RETRY_SECONDS
                    if event.type != "BOOKMARK":
                        self._take(event.type, event.object)
            except Expired:
                version = None
            except ApiFailure as problem:
                _LOG.debug("watch of %s interrupted: %s", self.kind.plural, problem)
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, _LAST_RETRY_SECONDS)

    def _replace_all(self, items: list[Json]) -> None:
        listed = {key_of(item): item for item in items}
        for key, known in list(self._objects.items()):
            if key not in listed or uid_of(listed[key]) != uid_of(known):
                self._take("LOST", known)
        for item in items:
            self._take("ADDED", item)

    def _take(self, kind: str, item: Json) -> None:
        key = key_of(item)
        old = self._objects.get(key)
        if kind in ("DELETED", "LOST"):
            self._deleted.append(uid_of(item))
            if old is not None and uid_of(old) == uid_of(item):
                del self._objects[key]
        elif old is None or _version(old) <= _version(item):
            self._objects[key] = item
        else:
            return  # our own later write is known already, and its event is on the way
        for listener in self._listeners:
            listener(Change(kind, item, old))


class Informers:
    """One informer for each kind that was asked for before the start."""

    def __init__(self, client: ApiClient) -> None:
        """Store; `start` runs what was asked for until then."""
        self._client = client
        self._informers: dict[Kind, Informer] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def __getitem__(self, kind: Kind) -> Informer:
        """Return the informer of a kind, making it at the first request."""
        if kind not in self._informers:
            self._informers[kind] = Informer(self._client, kind)
        return self._informers[kind]

    async def start(self) -> None:
        """Run every informer and wait for the first listing of each."""
        self._tasks = [asyncio.create_task(informer.run()) for informer in self._informers.values()]
        for informer in self._informers.values():
            await informer.is_synced.wait()

    async def stop(self) -> None:
        """End the watches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _version(item: Json) -> int:
    return int(item["metadata"]["resourceVersion"])
