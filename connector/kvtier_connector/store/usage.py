# SPDX-License-Identifier: Apache-2.0
"""How many bytes a store takes on the volume, as far as this process knows, and whether one more block still fits.

What other processes write is learnt from their journals, if the caller reads them, and at each scan. In between the sum
is off by what they did, and together they could write past the limit. So among several, each writes at most half of its
even share of what is left until it has heard of the others again: the halves of all, and what each wrote since it told
last, fit. The nearer the limit the smaller the shares, so the last blocks of the room stay free.
"""

from __future__ import annotations

import threading


class Usage:
    """A sum with a limit. Any thread may call any method; one lock guards every field and is never held over I/O."""

    def __init__(self, max_bytes: int) -> None:
        """Store the limit; 0 means none."""
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known = 0
        self._reserved = 0
        self._written_since_scan_began = 0
        self._allowance: int | None = None
        """What may still be claimed in this period; None is no such limit."""

    def set_limit(self, max_bytes: int) -> None:
        """Take another limit from now on; what is there already stays."""
        with self._lock:
            self._max_bytes = max_bytes

    def total(self) -> int:
        """Return the bytes on the volume together with those of the writes in flight."""
        with self._lock:
            return self._known + self._reserved

    def reserve(self, count: int) -> bool:
        """Claim room for a write; a claim that was granted must be ended with `commit` or `cancel`."""
        with self._lock:
            is_granted = self._max_bytes == 0 or (
                self._known + self._reserved + count <= self._max_bytes
                and (self._allowance is None or count <= self._allowance)
            )
            if is_granted:
                self._reserved += count
                if self._allowance is not None:
                    self._allowance -= count
            return is_granted

    def commit(self, count: int, *, replaced: int) -> None:
        """Turn a claim into use; `replaced` bytes of an older file went away."""
        with self._lock:
            self._reserved -= count
            self._known = max(0, self._known + count - replaced)
            self._written_since_scan_began += count

    def cancel(self, count: int) -> None:
        """Give a claim back: nothing was written."""
        with self._lock:
            self._reserved -= count
            if self._allowance is not None:
                self._allowance += count

    def begin_period(self, writers: int) -> None:
        """Share the room that is left with the others; `writers` counts this process too. Alone, all of it may go."""
        with self._lock:
            left = max(0, self._max_bytes - self._known - self._reserved)
            self._allowance = None if writers <= 1 else left // (2 * writers)

    def learn(self, count: int) -> None:
        """Add a file that another process wrote."""
        with self._lock:
            self._known += count
            self._written_since_scan_began += count

    def forget(self, count: int) -> None:
        """Subtract a file that was removed."""
        with self._lock:
            self._known = max(0, self._known - count)

    def begin_scan(self) -> None:
        """Remember writes from now on: the scan may have passed their directories already."""
        with self._lock:
            self._written_since_scan_began = 0

    def end_scan(self, found: int) -> None:
        """Replace the sum by what the scan found.

        A block written during the scan may be counted twice until the next one: the error is on the side of the limit.
        """
        with self._lock:
            self._known = found + self._written_since_scan_began
