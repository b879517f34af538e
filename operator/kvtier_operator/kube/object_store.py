# SPDX-License-Identifier: Apache-2.0
"""The objects of one kind in memory: compressed, grouped by tier, each in its newest known version.

Objects are stored trimmed to the fields we read, and compressed against others of their kind: all objects of a tier
take some kilobytes. The result of a write is entered at once and stays until the watch has caught up. So a reconcile
never reads a state from before its own write. A result that comes after the news of the object's deletion is dropped.

Thread-safe: informers write, workers read and write.
"""

from __future__ import annotations

import builtins
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pydantic_core import PydanticSerializationError, from_json, to_json

from kvtier_operator import names
from kvtier_operator.names import Manifest


class Scope(NamedTuple):
    """Which objects: of one kind, in one namespace or (empty) in all, with these labels."""

    api_version: str
    kind: str
    namespace: str = ""
    query: tuple[tuple[str, str], ...] = ()
    """Selectors, as the API server takes them."""

    def __str__(self) -> str:
        """Return what messages call it."""
        return f"{self.kind} objects of {self.namespace or 'all namespaces'}"


def _of_label(body: Mapping[str, Any]) -> str:
    return str((body["metadata"].get("labels") or {}).get(names.LABEL_TIER, ""))


def _slim(body: Manifest) -> Manifest:
    """Leave out what moves with each write, and who wrote which field, where that is of no use."""
    metadata = {
        name: value for name, value in body["metadata"].items() if name not in {"managedFields", "resourceVersion"}
    }
    fields = [
        {name: value for name, value in each.items() if name != "time"}
        for each in body["metadata"].get("managedFields") or ()
        if each.get("subresource") != "status" and body["kind"] not in _NEVER_APPLIED
    ]
    return {**body, "metadata": {**metadata, **({"managedFields": fields} if fields else {})}}


_NEVER_APPLIED: Final = frozenset({names.KIND, "Pod", "Job", names.LEASE_KIND})
"""Kinds whose managed fields are not used: nothing is applied to them again and again."""


@dataclass(frozen=True, kw_only=True)
class WatchedKind:
    """One kind that is kept in memory."""

    api_version: str
    kind: str
    query: tuple[tuple[str, str], ...] = (("labelSelector", names.LABEL_TIER),)
    is_namespaced: bool = True
    is_followed: bool = True
    keep: Callable[[Manifest], Manifest] = _slim
    group: Callable[[Mapping[str, Any]], str] = _of_label
    """By what objects are found: the tier that they are of."""
    matters: Callable[[Mapping[str, Any]], str] | None = None
    """Returns the part of an object that matters to the others of its group; None for all of it."""


class _Kept(NamedTuple):
    uid: str
    version: str
    group: str
    like: bytes
    """The object that it was compressed against."""
    packed: bytes
    mark: str = ""
    """The part that matters to the others of its group."""


_MOST_ALIKE: Final = 8
"""Objects of one kind, against which the others are packed."""

_MOST_GONE: Final = 4096
"""Deletions that are remembered: far more than are reported while the answer to a write is on its way."""


class ObjectStore:
    """The objects of one kind. Informers of several namespaces may fill one store."""

    def __init__(self, watched: WatchedKind, on_change: Callable[[str, str, builtins.set[str]], None]) -> None:
        """Start empty; `on_change` is called with the namespace, the name and the groups of a changed object."""
        self._watched = watched
        self._on_change = on_change
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._groups: dict[tuple[str, str], tuple[str, ...]] = {}
        self._alike: dict[str, bytes] = {}
        """By component of a tier, one object: all others of it differ in names and numbers."""
        self._gone: dict[str, str] = {}
        """The version of the latest deletions, by the uid of the object."""
        self.stamp = 0
        """Changes with every change of what is kept."""
        self.is_followed = watched.is_followed

    def on_update(self, body: Manifest) -> None:
        """Keep an object as a watch or a list has it."""
        where = _where(body)
        if (change := self._enter(where, body)) is not None:
            self._on_change(*where, change)

    def enter(self, body: Manifest) -> None:
        """Keep an object as a write of ours, or a read, returned it."""
        self._enter(_where(body), body)

    def on_delete(self, body: Manifest) -> None:
        """Forget an object, unless it was written since."""
        where, metadata = _where(body), body["metadata"]
        with self._lock:
            self._note_deletion(metadata["uid"], metadata["resourceVersion"])
            before = self._kept.get(where)
            if (
                before is None
                or before.uid != metadata["uid"]
                or _is_newer(before.version, metadata["resourceVersion"])
            ):
                return
            self._take(where)
        self._on_change(*where, {before.group})

    def on_list(self, scope: Scope, uids: frozenset[str], version: str) -> None:
        """Forget what a list did not show any more, unless it was written since."""
        with self._lock:
            vanished = {
                where: kept
                for where, kept in self._kept.items()
                if scope.namespace in {"", where[0]} and kept.uid not in uids and not _is_newer(kept.version, version)
            }
            for where, kept in vanished.items():
                self._take(where)
                self._note_deletion(kept.uid, version)
        for where, kept in vanished.items():
            self._on_change(*where, {kept.group})

    def on_readable(self, _scope: Scope) -> None:
        """Have every tier reconciled."""
        self._on_change("", "", set())

    def state(self, namespace: str, name: str) -> tuple[str, str]:
        """Return the uid and the version of an object, or its part that matters to others; empty where none is kept."""
        with self._lock:
            kept = self._kept.get((namespace, name))
        return ("", "") if kept is None else (kept.uid, kept.version if self._watched.matters is None else kept.mark)

    def forget(self, namespace: str, name: str, *, uid: str) -> None:
        """Forget an incarnation that a read has shown to be gone; another one may have come meanwhile."""
        with self._lock:
            kept = self._kept.get((namespace, name))
            if kept is not None and kept.uid == uid:
                self._take((namespace, name))

    def get(self, namespace: str, name: str) -> Manifest | None:
        """Return an object as it stands, as far as is known."""
        with self._lock:
            kept = self._kept.get((namespace, name))
        return None if kept is None else _unpack(kept)

    def of(self, namespace: str, group: str) -> list[Manifest]:
        """Return the objects of one group."""
        with self._lock:
            found = [self._kept[namespace, name] for name in self._groups.get((namespace, group), ())]
        return [_unpack(each) for each in found]

    def names_of(self, namespace: str, group: str) -> tuple[str, ...]:
        """Return the names of the objects of one group."""
        with self._lock:
            return self._groups.get((namespace, group), ())

    def places(self) -> list[tuple[str, str]]:
        """Return namespace and name of everything that is kept."""
        with self._lock:
            return list(self._kept)

    def all(self) -> Iterator[Manifest]:
        """Return all objects, unpacked one at a time."""
        for where in self.places():
            found = self.get(*where)
            if found is not None:
                yield found

    def _enter(self, where: tuple[str, str], body: Manifest) -> set[str] | None:
        """Keep an object; return the groups that it is and was in, or None where it has not changed."""
        metadata = body["metadata"]
        watched = self._watched
        with self._lock:
            if self._is_known(where, metadata):
                return None
        text = _write_json(watched.keep(body))
        like = self._like(metadata, text)
        kept = _Kept(
            metadata["uid"],
            metadata["resourceVersion"],
            sys.intern(watched.group(body)),
            like,
            _pack(text, like),
            "" if watched.matters is None else watched.matters(body),
        )
        with self._lock:
            if self._is_known(where, metadata):
                return None
            before = self._kept.get(where)
            if before is not None and (before.uid, before.packed) == (kept.uid, kept.packed):
                self._kept[where] = kept
                return None
            self._take(where)
            self._kept[where] = kept
            if kept.group:
                key = (where[0], kept.group)
                self._groups[key] = (*self._groups.get(key, ()), where[1])
            self.stamp += 1
        if before is None:
            return {kept.group}
        is_only_its_own = watched.matters is not None and (before.group, before.mark) == (kept.group, kept.mark)
        return set() if is_only_its_own else {kept.group, before.group}

    def _is_known(self, where: tuple[str, str], metadata: Mapping[str, Any]) -> bool:
        """Tell whether this version, or what came after it, was entered before. Caller holds the lock."""
        # Of another incarnation, too: kopf reports the end of one and the beginning of the next in any order.
        before, gone = self._kept.get(where), self._gone.get(metadata["uid"])
        versions = [gone] if before is None else [gone, before.version]
        return any(each is not None and not _is_newer(metadata["resourceVersion"], each) for each in versions)

    def _like(self, metadata: Mapping[str, Any], text: bytes) -> bytes:
        component = (metadata.get("labels") or {}).get(names.LABEL_COMPONENT, "")
        if component in self._alike or len(self._alike) < _MOST_ALIKE:
            return self._alike.setdefault(component, text)
        return next(iter(self._alike.values()))

    def _note_deletion(self, uid: str, version: str) -> None:
        """Remember a deletion. Caller holds the lock."""
        self._gone[uid] = version
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def _take(self, where: tuple[str, str]) -> None:
        before = self._kept.pop(where, None)
        if before is None:
            return
        self.stamp += 1
        rest = tuple(name for name in self._groups.pop((where[0], before.group), ()) if name != where[1])
        if rest:
            self._groups[where[0], before.group] = rest


def _where(body: Mapping[str, Any]) -> tuple[str, str]:
    """Return namespace and name; of a tier's dozen objects many have the same, which is kept once."""
    metadata = body["metadata"]
    return sys.intern(metadata.get("namespace", "")), sys.intern(metadata["name"])


def read_json(text: bytes) -> Manifest:
    """Read JSON quickly, or where it is nested too deeply for that, as Python does."""
    try:
        found: Manifest = from_json(text)
    except ValueError:
        found = json.loads(text)
    return found


def _write_json(body: Manifest) -> bytes:
    try:
        return to_json(body)
    except PydanticSerializationError:
        return json.dumps(body).encode()


def _pack(text: bytes, like: bytes) -> bytes:
    # With less memory than by default, which would take longer to clear than all else, and without a checksum.
    packer = zlib.compressobj(1, wbits=-zlib.MAX_WBITS, memLevel=5, zdict=like)
    return packer.compress(text) + packer.flush()


def _unpack(kept: _Kept) -> Manifest:
    body: Manifest = read_json(zlib.decompressobj(-zlib.MAX_WBITS, zdict=kept.like).decompress(kept.packed))
    body["metadata"]["resourceVersion"] = kept.version
    return body


def _is_newer(version: str, than: str) -> bool:
    """Compare versions; the API server promises since 1.35 what has always been so: they are numbers that grow."""
    try:
        return int(version) > int(than)
    except ValueError:
        return version != than
