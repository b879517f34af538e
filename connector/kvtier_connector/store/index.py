# SPDX-License-Identifier: Apache-2.0
"""Remembers which blocks the volume has, so that asking for one costs no system call.

Pure memory: others feed it with what they did, heard and saw. It may be wrong for a while, and either error is cheap: a
block that is not there after all is a miss, one that is there unknown to us is computed again.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from kvtier_connector.store.layout import BlockKey

_SHARDS = 256
"""A dict of a million keys stops every thread for tens of milliseconds when it grows or is swept; small ones do not."""
_HASH_BYTES = 13
"""With two bytes of the group, 15 bytes fit a small allocation. Two of a million blocks agree in these once in 10^19
times, and that costs a miss."""
NAME_BYTES = _HASH_BYTES + 2
_GENERATIONS = 250
"""Numbers up to 256 are shared objects in CPython, so a value takes no memory of its own."""


class Presence(enum.Enum):
    """What is known about a block."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """Somebody has to ask the volume."""


class BlockIndex:
    """Every method may be called from any thread. `state` takes no lock and never waits; `_lock` guards the changes.

    Until a walk of the whole root has ended, a block that nobody told of is UNKNOWN. Afterwards it is ABSENT, while
    the news of other processes arrive; `lapse` says that they do not, `renew` that they do again.
    """

    def __init__(
        self,
        *,
        negative_seconds: float = 30.0,
        aside_seconds: float = 30.0,
        most_negatives: int = 1 << 16,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings.

        Args:
            negative_seconds: How long a block that the volume did not have counts as ABSENT before somebody asks again.
            aside_seconds: How long a block that is there and could not be read counts as ABSENT.
            most_negatives: How many of those answers are kept; the oldest go.
            now: Seconds that never go back.
        """
        self._negative_seconds = negative_seconds
        self._aside_seconds = aside_seconds
        self._most_negatives = most_negatives
        self._now = now
        self._lock = threading.Lock()
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        self._negatives: OrderedDict[bytes, float] = OrderedDict()
        self._asides: OrderedDict[bytes, float] = OrderedDict()
        """Blocks that are present, and until when nobody is to try them again."""
        self._generation = 0
        self._walk_began = now()
        self._is_walked = False
        self._is_current = True

    def state(self, key: BlockKey) -> Presence:
        """Say what is known about the block, from memory."""
        name = compact(key)
        if name in self._shards[name[0]]:
            # Nearly always empty, and then not even asked.
            is_aside = bool(self._asides) and self._asides.get(name, 0.0) > self._now()
            return Presence.ABSENT if is_aside else Presence.PRESENT
        if self.is_complete:
            return Presence.ABSENT
        expires = self._negatives.get(name)
        return Presence.UNKNOWN if expires is None or expires <= self._now() else Presence.ABSENT

    @property
    def is_complete(self) -> bool:
        """Whether a block that is not known to be present is known to be absent."""
        return self._is_walked and self._is_current

    def __len__(self) -> int:
        """Return the number of blocks known to be present."""
        return sum(len(shard) for shard in self._shards)

    def add(self, key: BlockKey) -> bool:
        """Note that the volume has the block; say whether that is new."""
        name = compact(key)
        shard = self._shards[name[0]]
        if shard.get(name) == self._generation:
            return False
        with self._lock:
            is_new = name not in shard
            shard[name] = self._generation
            self._negatives.pop(name, None)
        return is_new

    def set_aside(self, key: BlockKey) -> None:
        """Note that the volume did not give the block, which says nothing about the file: ABSENT for a while."""
        name = compact(key)
        with self._lock:
            if name in self._shards[name[0]]:
                self._asides[name] = self._now() + self._aside_seconds
                self._asides.move_to_end(name)
                while len(self._asides) > self._most_negatives:
                    self._asides.popitem(last=False)

    def renew_block(self, key: BlockKey) -> None:
        """Note that the block was written anew: it may be tried at once."""
        if self._asides:
            with self._lock:
                self._asides.pop(compact(key), None)

    def find(self, names: bytes) -> None:
        """Note that the walk found blocks, by their names, but for those discarded after the walk may have seen them.

        A few hundred take a tenth of a millisecond, during which no other thread of the process runs.
        """
        generation, shards, negatives = self._generation, self._shards, self._negatives
        with self._lock:
            youngest = self._walk_began + self._negative_seconds
            for start in range(0, len(names), NAME_BYTES):
                name = names[start : start + NAME_BYTES]
                if negatives and (expires := negatives.get(name)) is not None:
                    if expires >= youngest:
                        continue
                    del negatives[name]
                shards[name[0]][name] = generation

    def discard(self, key: BlockKey) -> bool:
        """Note that the volume does not have the block, or none that can be read; say whether it was thought to.

        The block is ABSENT until somebody tells of it again, or the negative answer expires.
        """
        name = compact(key)
        with self._lock:
            was_present = self._shards[name[0]].pop(name, None) is not None
            self._asides.pop(name, None)
            self._negatives[name] = self._now() + self._negative_seconds
            self._negatives.move_to_end(name)
            while len(self._negatives) > self._most_negatives:
                self._negatives.popitem(last=False)
        return was_present

    def begin_walk(self) -> None:
        """Begin to tell, with `find`, of every block that a walk of the whole root finds."""
        with self._lock:
            self._generation = (self._generation + 1) % _GENERATIONS
            self._walk_began = self._now()

    def end_walk(self, *, pause: Callable[[], None] = lambda: None) -> int:
        """Forget what neither the walk found nor anybody told of since it began; return how many those were.

        In between, `pause` lets other threads run.
        """
        dropped = 0
        for shard in self._shards:
            pause()
            with self._lock:
                stale = [name for name, generation in shard.items() if generation != self._generation]
                for name in stale:
                    del shard[name]
            dropped += len(stale)
        self._is_walked = True
        return dropped

    def lapse(self) -> None:
        """Note that the news of other processes do not arrive: what is not known is UNKNOWN until `renew`."""
        self._is_current = False

    def renew(self) -> None:
        """Note that the news arrive again, and that none was lost."""
        self._is_current = True


def compact(key: BlockKey) -> bytes:
    """Return the `NAME_BYTES` by which the index knows a block."""
    name = key.hash[:_HASH_BYTES]
    if key.tenant:
        name = (int.from_bytes(name, "big") ^ _mask(key.tenant)).to_bytes(_HASH_BYTES, "big")
    return name + (key.group & 0xFFFF).to_bytes(2, "little")


@functools.lru_cache(maxsize=4096)
def _mask(tenant: str) -> int:
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:_HASH_BYTES], "big")
