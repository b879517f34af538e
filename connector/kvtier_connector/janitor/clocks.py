# SPDX-License-Identifier: Apache-2.0
"""What time it is for whoever removes what is old: the earlier of this host's time and the volume's, and any doubt.

A clock that is ahead by the time to live makes everything look too old. So the time that the volume gives a file counts
as well, which on a network volume is another host's; and for an hour after a jump of the clock, or after the start of a
process, which may have missed one, it is doubtful whether that much time has gone by.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

DIFFERENCE_SECONDS = 300.0
"""Clocks that differ by less than this are right."""
HOLD_SECONDS = 3600.0
"""How long a jump is doubted: time for somebody, or for a time server, to set the clock right."""
HELD = (
    "ttl: nearly all blocks are too old at once, so they stay for an hour in case the clock is wrong: set it right, or "
    "remove them now with kvtier purge --older-than"
)
_ASK_SECONDS = 60.0


class Clocks:
    """The clocks of one janitor. Owned by its thread; `time_ns` may be called by any."""

    def __init__(
        self,
        *,
        ask: Callable[[], int | None],
        is_starting: bool,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; the volume is not asked yet.

        Args:
            ask: Asks the volume what time it is, in nanoseconds since 1970; None where it does not say.
            is_starting: Whether to doubt this host's time at first.
            clock: This host's time, likewise.
            now: Seconds that never go back or jump.
        """
        self._ask = ask
        self._clock = clock
        self._now = now
        self._ask_at = now()
        self._ahead_ns = 0
        self._difference_seconds = 0.0
        self._offset_ns = self._offset()
        self._started_until = now() + HOLD_SECONDS if is_starting else -math.inf
        self._jumped_until: float | None = None

    def time_ns(self) -> int:
        """Return nanoseconds since 1970."""
        return self._clock() - self._ahead_ns

    @property
    def is_jumped(self) -> bool:
        """Whether this host's clock jumped ahead within the last hour, and did not go back."""
        return self._jumped_until is not None

    @property
    def is_doubtful(self) -> bool:
        """Whether so much time may not have gone by as the clocks say."""
        return self.is_jumped or self._now() < self._started_until

    @property
    def problem(self) -> str:
        """What is wrong with this host's clock, for people; empty if nothing is known to be."""
        if self.is_jumped:
            return (
                "clock: it jumped ahead: for an hour no generation and no leftover goes, and hardly all blocks by ttl"
            )
        if abs(self._difference_seconds) <= DIFFERENCE_SECONDS:
            return ""
        side = "ahead of" if self._difference_seconds > 0 else "behind"
        return f"clock: this host is {_show(abs(self._difference_seconds))} {side} the volume; the earlier time counts"

    def look(self) -> None:
        """Compare the clocks; the volume is asked once a minute, and after a jump."""
        self._look_for_a_jump()
        if self._now() < self._ask_at:
            return
        self._ask_at = self._now() + _ASK_SECONDS
        before_ns = self._clock()
        there_ns = self._ask()
        if there_ns is None:
            return
        # The answer was made in between, and may have taken its time.
        difference_ns = max(0, before_ns - there_ns) - max(0, there_ns - self._clock())
        self._difference_seconds = difference_ns / 1e9
        self._ahead_ns = difference_ns if self._difference_seconds > DIFFERENCE_SECONDS else 0

    def _look_for_a_jump(self) -> None:
        offset_ns = self._offset()
        is_ahead = offset_ns - self._offset_ns > int(DIFFERENCE_SECONDS * 1e9)
        if is_ahead and self._jumped_until is None:
            self._jumped_until = self._now() + HOLD_SECONDS
            self._ask_at = self._now()
        elif not is_ahead or (self._jumped_until is not None and self._now() >= self._jumped_until):
            self._offset_ns, self._jumped_until = offset_ns, None

    def _offset(self) -> int:
        return self._clock() - int(self._now() * 1e9)


def _show(seconds: float) -> str:
    """Return a time as people read it: clocks are off by minutes, or by days."""
    for unit, length in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"
