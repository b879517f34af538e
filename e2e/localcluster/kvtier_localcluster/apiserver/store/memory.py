# SPDX-License-Identifier: Apache-2.0
"""Storage: one map for each kind, one counter of resourceVersions, one short history for each kind.

Every method runs on the server's event loop and never waits, so a commit is atomic. A watcher that subscribes and reads
the history in one step misses nothing. Stored objects never change in place; events share them. Each commit writes its
object as JSON once, for all lists and watches that will show it.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvtier_localcluster.apiserver.store import objects
from kvtier_localcluster.apiserver.store.api_errors import expired
from kvtier_localcluster.apiserver.store.objects import Json, ObjectKey, StorageKey
from kvtier_localcluster.apiserver.store.selectors import Selection

HISTORY_LIMIT: Final = 2000
"""How many events of one kind a watch can resume over; older resourceVersions are answered with 410."""

_FIRST_RESOURCE_VERSION = 100


class EventType(Enum):
    """The kinds of commits."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, and its JSON without apiVersion and kind, in which served versions differ."""

    manifest: Json
    """After a deletion, its last state."""
    fields: bytes
    """Begins after the opening brace."""


@dataclass(frozen=True, slots=True)
class Event(Stored):
    """One commit."""

    version: int
    type: EventType
    key: StorageKey
    old: Json | None
    """The object before the commit."""


Subscription = asyncio.Queue[Event | None]
"""The events of one kind from now on; `None` says that the server dropped the watch."""


class Storage:
    """All objects of all kinds."""

    def __init__(self) -> None:
        """Start empty."""
        self._objects: dict[StorageKey, dict[ObjectKey, Stored]] = {}
        self._names: dict[StorageKey, list[ObjectKey]] = {}
        self._history: dict[StorageKey, list[Event]] = {}
        self._trimmed: dict[StorageKey, int] = {}
        self._subscriptions: dict[StorageKey, set[Subscription]] = {}
        self._dependents: dict[str, set[tuple[StorageKey, ObjectKey]]] = {}
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
        found = self._objects.get(key, {}).get(name)
        return None if found is None else found.manifest

    def all(self, key: StorageKey) -> list[Json]:
        """Return every object of a kind, in order of namespace and name."""
        return [self._objects[key][name].manifest for name in self._names.get(key, ())]

    def select(
        self, key: StorageKey, selection: Selection, *, after: ObjectKey | None = None, most: int | None = None
    ) -> tuple[list[Stored], int]:
        """Return the selected objects of a kind in order, and how many names are left where `most` cuts them off."""
        names, place, found = self._names.get(key, []), selection.namespace, list[Stored]()
        first = after or (None if place is None else (place, ""))
        begin = 0 if first is None else bisect.bisect_right(names, first)
        end = len(names) if place is None else bisect.bisect_left(names, (f"{place}\0", ""))
        for number in range(begin, end):
            each = self._objects[key][names[number]]
            if selection.matches(each.manifest):
                if len(found) == most:
                    return found, end - number
                found.append(each)
        return found, 0

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
        name = objects.object_key(manifest)
        found = self._objects.setdefault(key, {})
        old = self.get(key, name)
        self._unindex(key, name, old)
        shown = {field: value for field, value in manifest.items() if field not in {"apiVersion", "kind"}}
        stored = Stored(manifest, objects.compact_json(shown)[1:].encode())
        if event_type is EventType.DELETED:
            found.pop(name, None)
        else:
            found[name] = stored
            self._index(key, name, manifest)
        event = Event(manifest, stored.fields, self.version, event_type, key, old)
        self._remember(event)
        for subscription in list(self._subscriptions.get(key, ())):
            subscription.put_nowait(event)
        for listener in self.listeners:
            listener(event)
        return manifest

    def _index(self, key: StorageKey, name: ObjectKey, manifest: Json) -> None:
        bisect.insort(self._names.setdefault(key, []), name)
        self._uids[manifest["metadata"]["uid"]] = (key, name)
        for uid in objects.owner_uids(manifest):
            self._dependents.setdefault(uid, set()).add((key, name))
        if name[0] is not None:
            self._namespace_counts[name[0]] += 1

    def _unindex(self, key: StorageKey, name: ObjectKey, manifest: Json | None) -> None:
        if manifest is None:
            return
        del self._names[key][bisect.bisect_left(self._names[key], name)]
        self._uids.pop(manifest["metadata"]["uid"], None)
        for uid in objects.owner_uids(manifest):
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
