# SPDX-License-Identifier: Apache-2.0
"""The base class of controllers: a queue of keys, each reconciled from the present state.

A key is in the queue at most once and handled by one task, so an object is never reconciled twice at the same time.
A controller adopts the objects that match its selector and have no controller, and releases those that no longer match.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import ClassVar

from kvtier_localcluster import kinds
from kvtier_localcluster.apiserver.store.selectors import labels_match
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.errors import ApiFailure, Conflict, NotFound
from kvtier_localcluster.informers import Change, Informer, Informers
from kvtier_localcluster.kinds import Json, Key, Kind
from kvtier_localcluster.recorder import EventRecorder


def selects(owner: Json, child: Json) -> bool:
    """Tell whether an object is one that its owner's selector asks for."""
    is_near = kinds.key_of(owner)[0] == kinds.key_of(child)[0]
    return is_near and labels_match(owner["spec"].get("selector"), child["metadata"].get("labels") or {})


async def adopt(client: ApiClient, owner_kind: Kind, owner: Json, children: Informer) -> None:
    """Adopt and release until the owner references agree with the owner's selector."""
    for child in children:
        is_ours = kinds.controller_uid(child) == kinds.uid_of(owner)
        is_orphan = kinds.controller_uid(child) is None and not kinds.is_deleting(child)
        references = child["metadata"].get("ownerReferences") or []
        if is_orphan and selects(owner, child):
            wanted = [*references, kinds.controlled_by(owner_kind, owner)]
        elif is_ours and not selects(owner, child):
            wanted = [reference for reference in references if reference["uid"] != kinds.uid_of(owner)]
        else:
            continue
        try:
            children.remember(await client.patch(children.kind, child, {"metadata": {"ownerReferences": wanted}}))
        except (NotFound, Conflict):
            continue  # it has gone meanwhile, or another of its name has come: the watch will tell


_LOG = logging.getLogger(__name__)
_SOON_SECONDS = 0.05
_LATER_SECONDS = 2.0


class Controller(ABC):
    """Reconciles the objects of one kind."""

    kind: ClassVar[Kind]
    component: ClassVar[str] = ""
    """The name in Events, where it is not the kind's controller."""

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen; `run` works."""
        self.client = client
        self.informers = informers
        self.recorder = EventRecorder(client, self.component or f"{self.kind.name.lower()}-controller")
        self._queue: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self.own.listen(lambda change: self.enqueue(kinds.key_of(change.object)))

    @property
    def own(self) -> Informer:
        """Return the copy of the kind that this controller reconciles."""
        return self.informers[self.kind]

    @abstractmethod
    async def sync(self, key: Key) -> None:
        """Bring one object, and what it controls, to where its spec wants it; a missing object is no error."""

    def enqueue(self, key: Key) -> None:
        """Reconcile soon."""
        if key not in self._queued:
            self._queued.add(key)
            self._queue.put_nowait(key)

    def enqueue_after(self, key: Key, seconds: float) -> None:
        """Reconcile when some time has passed, whatever else happens until then; the latest wish counts."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(seconds, self._expire, key)

    def enqueue_controller_of(self, child: Json) -> None:
        """Reconcile the object of our kind that controls this one, if one does."""
        uid = kinds.controller_uid(child)
        for reference in child["metadata"].get("ownerReferences") or []:
            if reference["uid"] == uid and reference["kind"] == self.kind.name:
                self.enqueue((child["metadata"]["namespace"], reference["name"]))

    def notice_child(self, change: Change) -> None:
        """Reconcile the present and former controller of an object, and those that may adopt it."""
        for child in filter(None, (change.object, change.old)):
            self.enqueue_controller_of(child)
        if not change.is_gone and kinds.controller_uid(change.object) is None:
            for owner in self.own:
                if selects(owner, change.object):
                    self.enqueue(kinds.key_of(owner))

    async def run(self) -> None:
        """Reconcile until cancelled."""
        posting = asyncio.create_task(self.recorder.run())
        try:
            while True:
                key = await self._queue.get()
                self._queued.discard(key)
                await self._reconcile(key)
        finally:
            posting.cancel()
            for timer in self._timers.values():
                timer.cancel()

    async def write_status(self, current: Json, status: Json) -> None:
        """Write a status, if it differs from the one we know."""
        difference = kinds.merge_difference(current.get("status"), status)
        if difference:
            patched = await self.client.patch(self.kind, current, {"status": difference}, subresource="status")
            self.own.remember(patched)

    def _expire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.enqueue(key)

    async def _reconcile(self, key: Key) -> None:
        try:
            await self.sync(key)
        except (NotFound, Conflict) as problem:
            _LOG.debug("%s %s will be tried again: %s", self.kind.name, key, problem)
            self.enqueue_after(key, _SOON_SECONDS)
        except ApiFailure as problem:
            _LOG.warning("%s %s will be tried again: %s", self.kind.name, key, problem)
            self.enqueue_after(key, _LATER_SECONDS)
        except Exception:  # noqa: BLE001 - the edge: one bad object must not end the controller
            _LOG.exception("%s %s cannot be reconciled", self.kind.name, key)
            self.enqueue_after(key, _LATER_SECONDS)
