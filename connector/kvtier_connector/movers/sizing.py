# SPDX-License-Identifier: Apache-2.0
"""Decides how many processes move blocks: few at first, more while that helps, few again when nothing is to be done.

A volume that answers slowly leaves cores idle, and more movers ask it more at once. Where movers wait for a core, or
more of them moved no more, there are enough. Pure: whoever asks passes the clock and what was measured.
"""

from __future__ import annotations

from collections.abc import Callable

FEWEST = 3
"""However few processors there are: so two can store, and one is free for a load, also where writes hang."""

_LOOK_SECONDS = 0.25
_TRIAL_SECONDS = 1.0
"""After so long, processes that were added have begun to work, and it shows whether they help."""
_HOLD_SECONDS = 30.0
"""For so long after they did not help, none is added."""
_IDLE_SECONDS = 60.0
_GAIN = 1.1
_MOST_WAIT_SHARE = 0.2
_TRIPS = 3
"""To the volume for one chunk: open, read, close."""
_CORE_BYTES_PER_SECOND = 2.5e9
"""What a core verifies and copies."""


def enough(processors: int, *, round_trip_seconds: float, chunk_bytes: int) -> int:
    """Return with how many movers every processor has something to do while the others wait for the volume."""
    moving_seconds = max(1, chunk_bytes) / _CORE_BYTES_PER_SECOND
    return round(processors * (1 + _TRIPS * round_trip_seconds / moving_seconds))


class Sizing:
    """Remembers what the last change brought. Scheduler's thread only."""

    def __init__(self, least: int, most: int) -> None:
        """Store the limits."""
        self._least = least
        self._most = most
        self._size = least
        self._looked = self._busy_at = self._hold_until = 0.0
        self._ended = 0
        self._trial: tuple[int, float] | None = None
        """How many there were before the last ones were added, and how many tasks they ended in a second."""

    def expect(self, size: int) -> None:
        """Begin with so many from now on, if that is more: the volume was found to answer slowly."""
        self._least = max(self._least, min(size, self._most))
        self._size = max(self._size, self._least)

    def decide(self, now: float, *, reads: int, ended: int, wait_share: Callable[[], float]) -> int:
        """Return how many movers there are to be.

        Args:
            now: Seconds that never go back.
            reads: How many tasks are open for which a request waits, or may soon.
            ended: How many tasks have ended so far.
            wait_share: Measures, when called, which part of the time the movers could have run they waited for a core.
        """
        if reads:
            self._busy_at = now
        elif now - self._busy_at > _IDLE_SECONDS:
            self._size, self._trial = self._least, None
        seconds = now - self._looked
        if seconds < (_TRIAL_SECONDS if self._trial else _LOOK_SECONDS):
            return self._size
        rate = (ended - self._ended) / seconds
        self._looked, self._ended = now, ended
        trial, self._trial = self._trial, None
        if reads <= self._size:
            # There was not always enough to do, so the rate says nothing.
            return self._size
        if trial is not None and rate < _GAIN * trial[1]:
            self._size, self._hold_until = trial[0], now + _HOLD_SECONDS
        elif self._size < self._most and now >= self._hold_until and wait_share() <= _MOST_WAIT_SHARE:
            self._trial = self._size, rate
            self._size = min(self._most, self._size + max(1, self._size // 2))
        return self._size
