# SPDX-License-Identifier: Apache-2.0
"""Decides which chunks are written: those that enough requests have asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

REMEMBERED_CHUNKS = 1 << 17
"""Chunks asked for last whose counts are kept, twice this many at most; about 30 MB."""
_NAME_BYTES = 16
"""Of the end of vLLM's key: the group, and enough of the hash to tell a million chunks apart."""

_Key = TypeVar("_Key", bound=bytes)


class ReuseFilter:
    """Counts the requests that ask for a chunk, so that one that only a single request has is not written.

    A count is worth it where writes or room are scarce, since most chunks are never read again. But a chunk that is not
    written for its first request cannot be read for its second. Pure memory of this engine: after a restart the
    counts begin anew. Not thread-safe.
    """

    def __init__(self, min_reuse: int, *, remembered: int = REMEMBERED_CHUNKS) -> None:
        """Store the settings; chunks are written for their `min_reuse`-th request, 1 writes all and counts nothing."""
        self._min_reuse = min_reuse
        self._remembered = remembered
        self._recent: dict[bytes, int] = {}
        self._older: dict[bytes, int] = {}

    @property
    def is_gated(self) -> bool:
        """Whether any chunk is held back."""
        return self._min_reuse > 1

    def is_due(self, key: bytes) -> bool:
        """Say whether enough requests have asked for the chunk, as far as that is remembered."""
        return not self.is_gated or self._count(key[-_NAME_BYTES:]) >= self._min_reuse

    def note_request(self, keys: Iterable[_Key]) -> Sequence[_Key]:
        """Count a request that asks for these chunks; return those that become due with it."""
        if not self.is_gated:
            return ()
        due = []
        for key in keys:
            name = key[-_NAME_BYTES:]
            count = 1 + self._count(name)
            self._recent[name] = count
            if count == self._min_reuse:
                due.append(key)
            if len(self._recent) >= self._remembered:
                self._older, self._recent = self._recent, {}
        return due

    def _count(self, name: bytes) -> int:
        return self._recent.get(name, self._older.get(name, 0))
