# SPDX-License-Identifier: Apache-2.0
"""A bounded memory of the blocks that this engine wrote, read or saw on the volume; it answers lookups, never stores.

A block that is remembered may have been evicted since: its load is a miss then, and the block is forgotten. A block
that could not be read although its file is there is set aside for a while, so that each request does not try it again.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from kvtier_connector.store.layout import BlockKey

TRUST_SECONDS = 300.0
"""A block counts as present without a look at the volume for so long after it was written, read or seen."""
ASIDE_SECONDS = 10.0
"""A block that the volume did not give counts as absent for so long."""
DAMAGED_SECONDS = 600.0
"""A block whose file was damaged twice counts as absent for so long: the file cannot be moved to quarantine."""
_REMEMBERED = 1 << 16
"""Blocks that are kept at least; twice as many at most, about 25 MB."""
_MOST_ASIDE = 1 << 14
_HASH_BYTES = 13
"""With two bytes of the group a name has 15 bytes. Two of a million blocks agree in these once in 10^19 times, and
that costs a miss."""


class Presence(enum.Enum):
    """Knowledge about a block."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """The volume has to be asked."""


class BlockMemory:
    """The blocks that one engine knows. Owned by one thread."""

    def __init__(self, *, remembered: int = _REMEMBERED, now: Callable[[], float] = time.monotonic) -> None:
        """Start without a block.

        Args:
            remembered: How many blocks are kept at least.
            now: Seconds that never go back.
        """
        self._remembered = remembered
        self._now = now
        self._recent: dict[bytes, float] = {}
        self._older: dict[bytes, float] = {}
        """By name, when the block was last known to be there."""
        self._asides: OrderedDict[bytes, float] = OrderedDict()
        """Blocks that could not be read, and until when they count as absent."""
        self._damaged: OrderedDict[bytes, None] = OrderedDict()
        """Blocks whose files were damaged, and should have been moved to quarantine."""

    def __len__(self) -> int:
        """Return how many blocks are remembered, those set aside included."""
        return len(self._recent) + len(self._older) + len(self._asides) + len(self._damaged)

    def state(self, key: BlockKey) -> Presence:
        """Say what a lookup may go by without a look at the volume."""
        name = _compact(key)
        if self._asides and self._asides.get(name, 0.0) > self._now():
            return Presence.ABSENT
        seen = self._recent.get(name, self._older.get(name))
        is_fresh = seen is not None and self._now() - seen < TRUST_SECONDS
        return Presence.PRESENT if is_fresh else Presence.UNKNOWN

    @property
    def has_asides(self) -> bool:
        """Whether there are blocks that could not be read and are left alone for a while."""
        return bool(self._asides)

    def has(self, key: BlockKey) -> bool:
        """Say whether this engine wrote, read or saw the block, however long ago, and not in vain since."""
        name = _compact(key)
        return name in self._recent or name in self._older

    def add(self, key: BlockKey) -> None:
        """Note that this engine wrote the block, or read it."""
        name = _compact(key)
        if self._asides:
            self._asides.pop(name, None)
        if self._damaged:
            self._damaged.pop(name, None)
        self._remember(name)

    def see(self, key: BlockKey) -> None:
        """Note that the volume has a file of the block, which may be one that was set aside."""
        name = _compact(key)
        if name not in self._asides:
            self._remember(name)

    def _remember(self, name: bytes) -> None:
        if len(self._recent) >= self._remembered and name not in self._recent:
            self._older, self._recent = self._recent, {}
        self._recent[name] = self._now()

    def discard(self, key: BlockKey) -> None:
        """Note that the volume does not have the block."""
        self._forget(_compact(key))

    def set_aside(self, key: BlockKey, seconds: float | None = None) -> None:
        """Note that the block could not be read: it counts as absent for so long, or until it is written anew.

        The default is `ASIDE_SECONDS`.
        """
        name = _compact(key)
        self._forget(name)
        self._asides[name] = self._now() + (ASIDE_SECONDS if seconds is None else seconds)
        self._asides.move_to_end(name)
        if len(self._asides) > _MOST_ASIDE:
            self._asides.popitem(last=False)

    def note_damage(self, key: BlockKey) -> None:
        """Note that the file of the block was damaged, and should be in quarantine by now."""
        name = _compact(key)
        if name in self._damaged:
            self.set_aside(key, DAMAGED_SECONDS)
            return
        self._forget(name)
        self._damaged[name] = None
        if len(self._damaged) > _MOST_ASIDE:
            self._damaged.popitem(last=False)

    def clear(self) -> None:
        """Forget all blocks: the directory was removed or made anew."""
        self._recent, self._older = {}, {}
        self._asides.clear()
        self._damaged.clear()

    def _forget(self, name: bytes) -> None:
        self._recent.pop(name, None)
        self._older.pop(name, None)


def _compact(key: BlockKey) -> bytes:
    name = key.hash[:_HASH_BYTES]
    if key.tenant:
        name = (int.from_bytes(name, "big") ^ _mask(key.tenant)).to_bytes(_HASH_BYTES, "big")
    return name + (key.group & 0xFFFF).to_bytes(2, "little")


@functools.lru_cache(maxsize=4096)
def _mask(tenant: str) -> int:
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:_HASH_BYTES], "big")
