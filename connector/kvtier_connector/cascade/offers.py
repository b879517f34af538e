# SPDX-License-Identifier: Apache-2.0
"""Which chunks are written: those that vLLM has offered often enough."""

from __future__ import annotations

REMEMBERED_OFFERS = 1 << 17
"""Chunks offered last whose counts are kept, twice this many at most; about 30 MB."""
_OFFER_BYTES = 16
"""Of the end of vLLM's key: the group, and enough of the hash to tell a million chunks apart."""


class Offers:
    """Counts how often vLLM offered a chunk, so that one nobody asks for twice is not written.

    Worth it where writes or room are scarce: most chunks are never read again, but one that is not written at its first
    offer cannot be read at its second. Pure memory of this engine: after a restart the counts begin anew. Not
    thread-safe.
    """

    def __init__(self, min_reuse: int, *, remembered: int = REMEMBERED_OFFERS) -> None:
        """Store the settings; chunks are written at the `min_reuse`-th offer, 1 writes all and counts nothing."""
        self._min_reuse = min_reuse
        self._remembered = remembered
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    @property
    def is_gated(self) -> bool:
        """Whether any chunk is held back."""
        return self._min_reuse > 1

    def is_known(self, key: bytes) -> bool:
        """Say whether the chunk was offered before, as far as that is remembered."""
        name = key[-_OFFER_BYTES:]
        return name in self._recent or name in self._older

    def add(self, key: bytes) -> bool:
        """Count one more offer; say whether the chunk is to be written now."""
        if not self.is_gated:
            return True
        name = key[-_OFFER_BYTES:]
        count = 1 + self._recent.get(name, self._older.get(name, 0))
        self._recent[name] = count
        if len(self._recent) >= self._remembered:
            self._older, self._recent = self._recent, {}
        return count >= self._min_reuse
