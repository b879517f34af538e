# SPDX-License-Identifier: Apache-2.0
"""The objects of the tiers that passes are about now, kept up to date by the watches for a moment.

A tier that is made is looked at several times within seconds, each time through a dozen lists. So a list that was read
is kept for a while, and each change that a watch tells of, or a write of ours brings about, is entered in it. It is
never the last word: it is dropped soon, after every failure, and whenever a watch may have missed something.

Thread-safe: the event loop tells what it heard, the workers read and write.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kvtier_operator import names
from kvtier_operator.names import Manifest


class Which(NamedTuple):
    """One list: the objects of one kind that carry the label of one tier."""

    kind: str
    namespace: str
    tier: str


class _Object(NamedTuple):
    uid: str
    version: str
    text: bytes
    """The object: a tenth of the memory of one that is parsed, and nobody can change it."""


class _List(NamedTuple):
    read_at: float
    objects: dict[str, _Object]


class Recent:
    """Lists of the last moments: some kilobytes for each object of each tier that is busy."""

    def __init__(self, kinds: frozenset[str], *, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet.

        Args:
            kinds: kinds that are kept; a watch should tell of them.
            seconds: for how long a list is good.
            clock: seconds that only grow.
        """
        self._kinds = kinds
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._lists: dict[Which, _List] = {}
        self._begun: dict[Which, float] = {}

    def get(self, which: Which) -> list[Manifest] | None:
        """Return the objects as they stand, as far as is known; None where they must be read."""
        with self._lock:
            known = self._lists.get(which)
            if known is None or self._clock() - known.read_at >= self._seconds:
                return None
            texts = [each.text for each in known.objects.values()]
        return [json.loads(text) for text in texts]

    def begin(self, which: Which) -> None:
        """Expect a list that is about to be read."""
        if which.kind in self._kinds:
            with self._lock:
                self._lists.pop(which, None)
                self._begun[which] = self._clock()

    def end(self, which: Which, found: Iterable[Manifest]) -> None:
        """Keep a list that was read, unless something changed meanwhile, which it may have or not."""
        objects = {each["metadata"]["name"]: _object(each) for each in found} if which.kind in self._kinds else {}
        with self._lock:
            read_at = self._begun.pop(which, None)
            if read_at is not None:
                self._lists[which] = _List(read_at, objects)

    def heard(self, body: Mapping[str, Any], *, is_deleted: bool) -> None:
        """Enter what a watch told, or what a write returned."""
        if body["kind"] not in self._kinds:
            return
        metadata = body["metadata"]
        tier = (metadata.get("labels") or {}).get(names.LABEL_TIER)
        if tier is None:
            # Ours no longer, or never; which list it may be in, nobody knows.
            self.forget_kind(body["kind"], metadata.get("namespace", ""))
            return
        which = Which(body["kind"], metadata.get("namespace", ""), tier)
        with self._lock:
            self._begun.pop(which, None)
            known = self._lists.get(which)
            if known is None:
                return
            name, before = metadata["name"], known.objects.get(metadata["name"])
            if is_deleted and before is not None and before.uid == metadata["uid"]:
                del known.objects[name]  # what was made anew under its name has another uid, and stays
            elif not is_deleted and (before is None or _is_newer(metadata["resourceVersion"], before.version)):
                known.objects[name] = _object(body)

    def forget(self, namespace: str, tier: str) -> None:
        """Read everything of a tier anew."""
        with self._lock:
            for kind in self._kinds:
                self._lists.pop(Which(kind, namespace, tier), None)
                self._begun.pop(Which(kind, namespace, tier), None)

    def forget_kind(self, kind: str, namespace: str) -> None:
        """Read everything of a kind in a namespace anew."""
        with self._lock:
            self._lists = {each: known for each, known in self._lists.items() if each[:2] != (kind, namespace)}
            self._begun = {each: since for each, since in self._begun.items() if each[:2] != (kind, namespace)}

    def forget_all(self) -> None:
        """Read everything anew: a watch began, and what happened before is unknown."""
        with self._lock:
            self._lists.clear()
            self._begun.clear()

    def forget_old(self) -> None:
        """Free the memory of what is good no more."""
        with self._lock:
            now = self._clock()
            for which in [each for each, known in self._lists.items() if now - known.read_at >= self._seconds]:
                del self._lists[which]


def which_of(kind: str, *, namespace: str, selector: str) -> Which | None:
    """Return which list that is; None for one of another sort. No two kinds of ours have the same name."""
    label, _, tier = selector.partition("=")
    is_one_tiers = label == names.LABEL_TIER and bool(tier) and "," not in tier
    return Which(kind, namespace, tier) if is_one_tiers else None


def _object(body: Mapping[str, Any]) -> _Object:
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    text = json.dumps({**body, "metadata": metadata}, separators=(",", ":")).encode()
    return _Object(metadata["uid"], metadata["resourceVersion"], text)


def _is_newer(version: str, than: str) -> bool:
    """Compare versions; the API server promises since 1.35 what has always been so: they are numbers that grow."""
    try:
        return int(version) > int(than)
    except ValueError:
        return version != than
