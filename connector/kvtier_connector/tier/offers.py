# SPDX-License-Identifier: Apache-2.0
"""Counts how often vLLM offered a block, so that one nobody asks for twice is not written.

Worth it where writes or room are scarce: most blocks are never read again, but a block that is not written at its first
offer cannot be read at its second. Pure memory of this engine: after a restart the counts begin anew.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier_connector.store.blockstore import Present
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.tier import metrics
from kvtier_connector.tier.jobs import Job

REMEMBERED = 1 << 17
"""Blocks offered last whose counts are kept, twice this many at most; about 30 MB."""
_NAME_BYTES = 16
"""Of the end of vLLM's key: the group, and enough of the hash to tell a million blocks apart."""


class Offers:
    """The counts of one tier. Every method is the scheduler's; not thread-safe."""

    def __init__(self, min_reuse: int, *, remembered: int = REMEMBERED) -> None:
        """Store the settings; blocks are admitted at the `min_reuse`-th offer, 1 admits all and counts nothing."""
        self._min_reuse = min_reuse
        self._remembered = remembered
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    @property
    def is_gated(self) -> bool:
        """Whether any block is held back."""
        return self._min_reuse > 1

    def is_known(self, key: bytes) -> bool:
        """Say whether the block was offered before, as far as that is remembered."""
        name = key[-_NAME_BYTES:]
        return name in self._recent or name in self._older

    def admit(self, key: bytes) -> bool:
        """Count one more offer; say whether the block is to be written now."""
        if not self.is_gated:
            return True
        name = key[-_NAME_BYTES:]
        count = 1 + self._recent.get(name, self._older.get(name, 0))
        self._recent[name] = count
        if len(self._recent) >= self._remembered:
            self._older, self._recent = self._recent, {}
        return count >= self._min_reuse


def admit(job: Job, offers: Offers, state: Callable[[BlockKey], Presence]) -> list[int]:
    """Settle the blocks of a store that need no write, and return the places of those that are to be written."""
    if not offers.is_gated:
        return list(range(len(job.blocks)))
    wanted = []
    for index, block in enumerate(job.blocks):
        is_admitted = offers.admit(block.key)
        if state(block.name) is Presence.PRESENT:
            # Every request offers its whole prefix: what the volume has is not even copied.
            job.settle(index, Present(), seconds=0.0)
        elif is_admitted:
            wanted.append(index)
        else:
            job.refuse(index, metrics.UNREUSED)
    return wanted


def is_new(job: Job, offers: Offers, state: Callable[[BlockKey], Presence]) -> bool:
    """Say whether the blocks of a store were computed just now, and not only offered again; call it before `admit`."""
    return not offers.is_gated or not any(
        offers.is_known(block.key) or state(block.name) is Presence.PRESENT for block in job.blocks
    )
