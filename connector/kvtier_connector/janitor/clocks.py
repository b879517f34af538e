# SPDX-License-Identifier: Apache-2.0
"""Tells the janitor what time it is on the volume, so that ages of files are never differences of two hosts' clocks.

The volume stamps a file that the janitor touches once a minute; between two answers a monotonic clock goes on from the
last. A volume whose clock jumps ahead would make everything look too old, so such an answer is believed after an hour.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

JUMP_SECONDS = 300.0
"""An answer that is ahead of the expected time by more is a jump."""
HOLD_SECONDS = 3600.0
"""How long a jump is not believed: time to set the clock right."""
HELD = (
    "ttl: nearly all blocks are too old at once, so they stay for an hour in case the clock is wrong: set it right, or "
    "remove them now with kvtier purge --older-than"
)
_ASK_SECONDS = 60.0


class Clocks:
    """The volume's clock as one janitor knows it. Owned by its thread; `time_ns` may be called by any."""

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
            is_starting: Whether to doubt the first answer for an hour: the clock may have jumped before.
            clock: This host's time, likewise; it serves until the first answer, and never for an age.
            now: Seconds that never go back or jump.
        """
        self._ask = ask
        self._now = now
        self._ask_at = now()
        self._offset_ns = clock() - int(now() * 1e9)
        self.is_known = False
        """Whether the volume has answered; nothing may be removed by its age before."""
        self._started_until = now() + HOLD_SECONDS if is_starting else -math.inf
        self._jumped_until: float | None = None
        self._jump_seconds = 0.0

    def time_ns(self) -> int:
        """Return the volume's time in nanoseconds since 1970; before the first answer, this host's."""
        return self._offset_ns + int(self._now() * 1e9)

    @property
    def is_doubtful(self) -> bool:
        """Whether the process began so lately that its first answer may be wrong."""
        return self._now() < self._started_until

    @property
    def problem(self) -> str:
        """Message about the volume's clock; empty without a problem."""
        if not self.is_known:
            return "clock: the volume does not say what time it is, so nothing is removed by its age"
        if self._jumped_until is None:
            return ""
        return (
            f"clock: the volume's jumped ahead by {_show(self._jump_seconds)}; ages are told without that for an hour"
        )

    def look(self) -> None:
        """Ask the volume, once a minute."""
        if self._now() < self._ask_at:
            return
        there_ns = self._ask()
        if there_ns is None:
            return
        now = self._now()
        self._ask_at = now + _ASK_SECONDS
        offset_ns = there_ns - int(now * 1e9)
        self._jump_seconds = (offset_ns - self._offset_ns) / 1e9
        if self.is_known and self._jump_seconds > JUMP_SECONDS:
            if self._jumped_until is None:
                self._jumped_until = now + HOLD_SECONDS
            if now < self._jumped_until:
                return
        self._offset_ns, self._jumped_until, self.is_known = offset_ns, None, True


def _show(seconds: float) -> str:
    """Return a time as people read it: clocks are off by minutes, or by days."""
    for unit, length in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"
