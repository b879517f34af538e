# SPDX-License-Identifier: Apache-2.0
"""Storage: one map for each kind, one counter of resourceVersions, one short history for each kind.

Every method runs on the server's event loop and never waits, so a commit is atomic. A watcher that subscribes and reads
the history in one step misses nothing. Stored objects never change in place; events share them.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtier_localcluster.apiserver.store.api_errors import expired
from kvtier_localcluster.apiserver.store.objects import Json, ObjectKey, StorageKey, object_key, owner_uids

HISTORY_LIMIT: Final = 2000
"""How many events of one kind a watch can resume over; older resourceVersions are answered with 410."""

_FIRST_RESOURCE_VERSION = 100


class EventType(Enum):
    """The kinds of commits."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Event:
    """One commit."""

    version: int
    type: EventType
    key: StorageKey
    manifest: Json
    """The object after the commit; after a deletion, its last state."""
    old: Json | None
    """The object before the commit."""


Subscription = asyncio.Queue[Event | None]
"""The events of one kind from now on; `None` says that the server dropped the watch."""


class Storage:
    """All objects of all kinds."""

    def __init__(self) -> None:
        """Start empty."""
        self._objects: dict[StorageKey, dict[ObjectKey, Json]] = {}
        self._history: dict[StorageKey, list[Event]] = {}
        self._trimmed: dict[StorageKey, int] = {}
        self._subscriptions: dict[StorageKey, set[Subscription]] = {}
        self._dependents: dict[str, set[tuple[StorageKey, ObjectKey]]] = {}
        self._labelled: dict[tuple[StorageKey, str, str], set[ObjectKey]] = {}
        self._uids: dict[str, tuple[StorageKey, ObjectKey]] = {}
        self._namespace_counts: Counter[str] = Counter()
        self._compacted = 0
        self.version = _FIRST_RESOURCE_VERSION
        """The newest resourceVersion."""
        self.listeners: list[Callable[[Event], None]] = []
        """Called with every event, right after its commit."""

    # Reading

    def get(self, key: StorageKey, name: ObjectKey) -> Json | None:
        """Return an object, or None."""
        return self._objects.get(key, {}).get(name)

    def all(self, key: StorageKey) -> list[Json]:
        """Return every object of a kind, in order of namespace and name."""
        found = self._objects.get(key, {})
        return [found[name] for name in sorted(found, key=lambda name: (name[0] or "", name[1]))]

    def matching(
        self, key: StorageKey, is_wanted: Callable[[Json], bool], *, label: tuple[str, str] | None = None
    ) -> list[Json]:
        """Return the objects of a kind that are wanted, in order; only those with the label are looked at, if given."""
        objects = self._objects.get(key, {})
        among = objects if label is None else self._labelled.get((key, *label), ())
        found = [name for name in among if is_wanted(objects[name])]
        return [objects[name] for name in sorted(found, key=lambda name: (name[0] or "", name[1]))]

    def count(self, key: StorageKey) -> int:
        """Return how many objects of a kind there are."""
        return len(self._objects.get(key, {}))

    def count_in_namespace(self, namespace: str) -> int:
        """Return how many objects, of all kinds, a namespace holds."""
        return self._namespace_counts[namespace]

    def in_namespace(self, namespace: str) -> list[tuple[StorageKey, ObjectKey]]:
        """Return every object of a namespace."""
        return [(key, name) for key, found in self._objects.items() for name in found if name[0] == namespace]

    def by_uid(self, uid: str) -> tuple[StorageKey, ObjectKey] | None:
        """Return where the object with a uid lives, or None where it is gone."""
        return self._uids.get(uid)

    def dependents(self, uid: str) -> Iterator[tuple[StorageKey, Json]]:
        """Iterate over the objects that name a uid as their owner."""
        for key, name in list(self._dependents.get(uid, ())):
            found = self.get(key, name)
            if found is not None:
                yield key, found

    # Writing

    def commit(self, event_type: EventType, key: StorageKey, manifest: Json) -> Json:
        """Store (or, for DELETED, remove) an object under the next resourceVersion and tell the watchers."""
        self.version += 1
        manifest = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": str(self.version)}}
        name = object_key(manifest)
        found = self._objects.setdefault(key, {})
        old = found.get(name)
        self._unindex(key, name, old)
        if event_type is EventType.DELETED:
            found.pop(name, None)
        else:
            found[name] = manifest
            self._index(key, name, manifest)
        event = Event(self.version, event_type, key, manifest, old)
        self._remember(event)
        for subscription in list(self._subscriptions.get(key, ())):
            subscription.put_nowait(event)
        for listener in self.listeners:
            listener(event)
        return manifest

    def _index(self, key: StorageKey, name: ObjectKey, manifest: Json) -> None:
        self._uids[manifest["metadata"]["uid"]] = (key, name)
        for uid in owner_uids(manifest):
            self._dependents.setdefault(uid, set()).add((key, name))
        for label in (manifest["metadata"].get("labels") or {}).items():
            self._labelled.setdefault((key, *label), set()).add(name)
        if name[0] is not None:
            self._namespace_counts[name[0]] += 1

    def _unindex(self, key: StorageKey, name: ObjectKey, manifest: Json | None) -> None:
        if manifest is None:
            return
        self._uids.pop(manifest["metadata"]["uid"], None)
        for label in (manifest["metadata"].get("labels") or {}).items():
            labelled = self._labelled.get((key, *label), set())
            labelled.discard(name)
            if not labelled:
                self._labelled.pop((key, *label), None)
        for uid in owner_uids(manifest):
            dependents = self._dependents.get(uid, set())
            dependents.discard((key, name))
            if not dependents:
                self._dependents.pop(uid, None)
        if name[0] is not None:
            self._namespace_counts[name[0]] -= 1

    # Watching

    def _remember(self, event: Event) -> None:
        history = self._history.setdefault(event.key, [])
        history.append(event)
        if len(history) > 2 * HISTORY_LIMIT:
            self._trimmed[event.key] = history[HISTORY_LIMIT - 1].version
            del history[:HISTORY_LIMIT]

    def subscribe(self, key: StorageKey) -> Subscription:
        """Return a subscription to the events of a kind; `unsubscribe` it in the end."""
        subscription: Subscription = asyncio.Queue()
        self._subscriptions.setdefault(key, set()).add(subscription)
        return subscription

    def unsubscribe(self, key: StorageKey, subscription: Subscription) -> None:
        """Stop a subscription."""
        self._subscriptions.get(key, set()).discard(subscription)

    def since(self, key: StorageKey, version: int) -> list[Event]:
        """Return the events of a kind after a resourceVersion.

        Raises:
            ApiError: the history does not reach back that far, or the version is not one of this server's; 410.
        """
        self.check_version(version)
        if version < self._trimmed.get(key, 0):
            raise expired(version, self.version)
        history = self._history.get(key, [])
        return history[bisect.bisect_right(history, version, key=lambda event: event.version) :]

    def check_version(self, version: int) -> None:
        """Raise ApiError (410) for a resourceVersion that was compacted away or comes from another server."""
        if version < self._compacted or version > self.version:
            raise expired(version, self.version)

    def compact(self) -> None:
        """Forget the history: every resourceVersion handed out so far is answered with 410 from now on."""
        self.version += 1
        self._compacted = self.version
        self._history.clear()

    def drop_watches(self) -> None:
        """End every watch, as a load balancer or a restarting server does."""
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.put_nowait(None)
