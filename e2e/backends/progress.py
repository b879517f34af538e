# SPDX-License-Identifier: Apache-2.0
"""Tells an engine that is slow from one that hangs, on a machine with whatever else to do."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

STILL_SECONDS: Final = 120.0
"""For which an engine that starts may do nothing at all."""
LOOK_SECONDS: Final = 5.0
"""Between two looks: each reads of every process of the machine."""
TICKS: Final = os.sysconf("SC_CLK_TCK")
SESSION, FIRST_TIME, LAST_TIME = 3, 11, 14
"""Fields of /proc/PID/stat behind the name: user and system time of a process, and of its children that have ended."""


def processor_seconds(session: int, proc: Path = Path("/proc")) -> float:
    """Return the processor time that the processes of a session have had."""
    ticks = 0
    for stat in proc.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[SESSION]) == session:
            ticks += sum(map(int, fields[FIRST_TIME : LAST_TIME + 1]))
    return ticks / TICKS


class Progress:
    """What something that starts has done so far. Use it from one thread."""

    def __init__(
        self,
        spent: Callable[[], float],
        written: Callable[[], int],
        *,
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store how to ask for its processor time and for the length of its log, and the limit of the first."""
        self._spent = spent
        self._written = written
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._seen = (0, 0)
        self._moved = clock()
        self._looked = -math.inf

    def verdict(self) -> str | None:
        """Return why there is no more to wait for, or None."""
        if self._clock() - self._looked < LOOK_SECONDS:
            return None
        self._looked = self._clock()
        spent = self._spent()
        if spent > self._limit_seconds:
            return f"has had {spent:.0f} s of processor time and does not serve"
        seen = (int(spent), self._written())
        if seen != self._seen:
            self._seen, self._moved = seen, self._clock()
        if (still := self._clock() - self._moved) > STILL_SECONDS:
            return f"has done nothing for {still:.0f} s"
        return None
