# SPDX-License-Identifier: Apache-2.0
"""A bounded memory of the blocks that this engine wrote, read or saw on the volume; it answers lookups, never stores.

A block that is remembered may have been evicted since: its load is a miss then, and the block is forgotten. A block
that could not be read although its file is there is set aside for a while, so that each request does not try it again.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from kvtier_connector.store.layout import BlockKey

TRUST_SECONDS = 300.0
"""A block counts as present without a look at the volume for so long after it was written, read or seen."""
ASIDE_SECONDS = 10.0
"""A block that the volume did not give counts as absent for so long."""
DAMAGED_SECONDS = 60.0
"""A block with a damaged file counts as absent for so long: if the file cannot be moved to quarantine, it stays."""
_REMEMBERED = 1 << 16
"""Blocks that are kept, the latest; about 25 MB."""
_MOST_ASIDE = 1 << 14

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Presence(enum.Enum):
    """Knowledge about a block."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"
    """The volume has to be asked."""


class BlockMemory:
    """The blocks that one engine knows. Owned by one thread."""

    def __init__(self, *, remembered: int = _REMEMBERED, now: Callable[[], float] = time.monotonic) -> None:
        """Start without a block; so many are kept, and `now` gives seconds that never go back."""
        self._remembered = remembered
        self._now = now
        self._seen: OrderedDict[BlockKey, float] = OrderedDict()
        """When each block was last known to be there; the latest comes last."""
        self._asides: OrderedDict[BlockKey, float] = OrderedDict()
        """Blocks that could not be read, and until when they count as absent."""

    def __len__(self) -> int:
        """Return how many blocks are remembered, those set aside included."""
        return len(self._seen) + len(self._asides)

    def state(self, key: BlockKey) -> Presence:
        """Say what a lookup may go by without a look at the volume."""
        if self._asides and self._asides.get(key, 0.0) > self._now():
            return Presence.ABSENT
        seen = self._seen.get(key)
        is_fresh = seen is not None and self._now() - seen < TRUST_SECONDS
        return Presence.PRESENT if is_fresh else Presence.UNKNOWN

    @property
    def has_asides(self) -> bool:
        """Whether there are blocks that could not be read and are left alone for a while."""
        # Those whose time is over go, or each later lookup would take as long as with some.
        while self._asides and next(iter(self._asides.values())) <= self._now():
            self._asides.popitem(last=False)
        return bool(self._asides)

    def has(self, key: BlockKey) -> bool:
        """Say whether this engine wrote, read or saw the block, however long ago, and not in vain since."""
        return key in self._seen

    def add(self, key: BlockKey) -> None:
        """Note that this engine wrote the block, or read it."""
        self._asides.pop(key, None)
        self.see(key)

    def see(self, key: BlockKey) -> None:
        """Note that the volume has a file of the block, which may be one that was set aside."""
        if key not in self._asides:
            keep_last(self._seen, key, self._now(), most=self._remembered)

    def discard(self, key: BlockKey) -> None:
        """Note that the volume does not have the block."""
        self._seen.pop(key, None)

    def set_aside(self, key: BlockKey, *, is_damaged: bool = False) -> None:
        """Note that the block could not be read: it counts as absent for a while, or until it is written anew."""
        self.discard(key)
        until = self._now() + (DAMAGED_SECONDS if is_damaged else ASIDE_SECONDS)
        keep_last(self._asides, key, until, most=_MOST_ASIDE)

    def clear(self) -> None:
        """Forget all blocks: the directory was removed or made anew."""
        self._seen.clear()
        self._asides.clear()


def keep_last(entries: OrderedDict[_Key, _Value], key: _Key, value: _Value, *, most: int) -> None:
    """Set an entry of a dictionary that keeps the last ones only."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > most:
        entries.popitem(last=False)
