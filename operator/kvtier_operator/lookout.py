# SPDX-License-Identifier: Apache-2.0
"""What the operator has seen and written, so that it notices a dead watch and does not write the same thing twice.

`Lookout` stands between a pass and the cluster: reads and writes go through it. From the lists that passes make anyway
it learns which version of an object stands, and compares it with what the watches told. And it leaves out an apply that
would repeat the last one on an object which nobody has touched since: an idle tier costs the API server no write.

Thread-safe: the event loop tells what it heard, the workers read and write.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvtier_operator import names
from kvtier_operator.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.recent import Recent, which_of


class _Where(NamedTuple):
    kind: str
    namespace: str
    name: str


class _Stand(NamedTuple):
    uid: str
    resource_version: str
    stamp: str
    """Changes when somebody writes what we might have written."""


class _Unheard(NamedTuple):
    since: float
    seen_at: float
    """When it was last read so. What is gone is never read again, and its last event may have come before the list."""


class Lookout:
    """Remembers versions, of every object of every tier: some hundred bytes each."""

    def __init__(
        self,
        watched_kinds: frozenset[str],
        *,
        recent: Recent | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Know nothing yet.

        Args:
            watched_kinds: kinds whose changes a watch should tell.
            recent: lists that are read again and again within moments; None reads them each time.
            clock: seconds that only grow.
        """
        self._watched_kinds = watched_kinds
        self._clock = clock
        self._lock = threading.Lock()
        self._heard: dict[_Where, str] = {}
        self._unheard: dict[_Where, _Unheard] = {}
        self._standing: dict[_Where, _Stand] = {}
        self._applied: dict[_Where, tuple[_Stand, bytes]] = {}
        self.recent = recent or Recent(frozenset(), seconds=0.0)
        """What stands of the tiers that passes are about now."""

    def heard(self, body: Mapping[str, Any], *, is_deleted: bool) -> None:
        """Take note of what a watch told."""
        self.recent.heard(body, is_deleted=is_deleted)
        metadata = body["metadata"]
        where = _Where(body["kind"], metadata.get("namespace", ""), metadata["name"])
        with self._lock:
            self._unheard.pop(where, None)
            if is_deleted:
                for memory in (self._heard, self._standing, self._applied):
                    memory.pop(where, None)
            else:
                self._heard[where] = metadata.get("resourceVersion", "")

    def longest_unheard(self) -> tuple[float, str]:
        """Return over how many seconds a change was read that no watch told of, and which object changed."""
        with self._lock:
            if not self._unheard:
                return 0.0, ""
            where, (since, seen_at) = max(self._unheard.items(), key=lambda item: item[1].seen_at - item[1].since)
            return seen_at - since, f"{where.kind} {where.namespace}/{where.name}"

    def found(self, body: Manifest) -> None:
        """Take note of an object as it was just read."""
        metadata = body["metadata"]
        where = _Where(body["kind"], metadata.get("namespace", ""), metadata["name"])
        version = metadata["resourceVersion"]
        with self._lock:
            self._standing[where] = _stand(body)
            if where.kind != names.KIND and names.LABEL_TIER not in (metadata.get("labels") or {}):
                return  # a user's own claim, say: watches of ours do not tell of it
            if where.kind not in self._watched_kinds or self._heard.get(where) == version:
                self._unheard.pop(where, None)
            else:
                # An event on its way looks the same: only what is read so again after minutes says something.
                now, known = self._clock(), self._unheard.get(where)
                self._unheard[where] = _Unheard(now if known is None else known.since, now)

    def is_applied(self, manifest: Manifest, *, over: str) -> _Stand | None:
        """Return how the object stands if this was applied to it last and nobody has written it since."""
        where = _where(manifest)
        with self._lock:
            stand = self._standing.get(where)
            known = self._applied.get(where)
        if stand is None or known is None or stand.uid != over:
            return None
        before, digest = known
        is_untouched = (before.uid, before.stamp) == (stand.uid, stand.stamp)
        return stand if is_untouched and digest == _digest(manifest) else None

    def applied(self, manifest: Manifest, result: Manifest) -> None:
        """Take note of an apply that succeeded."""
        stand = _stand(result)
        with self._lock:
            self._standing[_where(manifest)] = stand
            self._applied[_where(manifest)] = (stand, _digest(manifest))


class WatchfulCluster:
    """A cluster whose every read is noted, and whose repeated writes are left out."""

    def __init__(self, cluster: Cluster, lookout: Lookout) -> None:
        """Stand before that cluster."""
        self._cluster = cluster
        self._lookout = lookout
        self.patch_status = cluster.patch_status
        self.post_event = cluster.post_event
        self.events = cluster.events

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object, and note how it stands."""
        found = self._cluster.get(key, namespace)
        if found is not None:
            self._lookout.found(found)
        return found

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> builtins.list[Manifest]:
        """Return the objects that carry the labels of the selector, and note how they stand.

        What was read a moment ago, and watched since, is not read again.
        """
        recent, which = self._lookout.recent, which_of(kind, namespace=namespace, selector=selector)
        found = None if which is None else recent.get(which)
        if found is None:
            if which is not None:
                recent.begin(which)
            found = self._cluster.list(api_version, kind, namespace=namespace, selector=selector)
            if which is not None:
                recent.end(which, found)
        for body in found:
            self._lookout.found(body)
        return found

    def pages(self, api_version: str, kind: str, *, namespace: str) -> Iterator[builtins.list[Manifest]]:
        """Return all objects of a kind, some at a time, and note how they stand."""
        for page in self._cluster.pages(api_version, kind, namespace=namespace):
            for body in page:
                self._lookout.found(body)
            yield page

    def apply(self, manifest: Manifest, *, over: str | None) -> Manifest:
        """Create or update an object, unless that would change nothing as far as we know."""
        if over is not None and (stand := self._lookout.is_applied(manifest, over=over)) is not None:
            metadata = {**manifest["metadata"], "uid": stand.uid, "resourceVersion": stand.resource_version}
            return {**manifest, "metadata": metadata}
        result = self._cluster.apply(manifest, over=over)
        self._lookout.applied(manifest, result)
        self._lookout.recent.heard(result, is_deleted=False)
        return result

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        """Delete that incarnation of the object; whether it goes at once is for the next read to tell."""
        self._lookout.recent.forget_kind(key.kind, namespace)
        self._cluster.delete(key, namespace, uid=uid)


def _where(manifest: Manifest) -> _Where:
    return _Where(manifest["kind"], manifest["metadata"]["namespace"], names.key_of(manifest).name)


def _stand(body: Manifest) -> _Stand:
    metadata = body["metadata"]
    version = metadata["resourceVersion"]
    if body["kind"] not in _BUSY:
        return _Stand(metadata["uid"], version, version)
    ours = [metadata.get(field) for field in ("generation", "labels", "annotations", "ownerReferences")]
    if body["kind"] == names.CLAIM_KIND:
        # It has no generation. Whoever binds it names the volume in its spec, beside what is ours.
        spec = body.get("spec") or {}
        ours += [spec.get("resources"), spec.get("accessModes"), spec.get("storageClassName")]
    return _Stand(metadata["uid"], version, json.dumps(ours, sort_keys=True))


_BUSY: Final = frozenset({"Deployment", "Lease", names.CLAIM_KIND})
"""Kinds whose versions move all the time: by a status, or by the janitor that holds the Lease."""


def _digest(manifest: Manifest) -> bytes:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).digest()
