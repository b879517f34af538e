# SPDX-License-Identifier: Apache-2.0
"""Counts what the store did: how often, how many bytes, how long, by outcome.

Who exports the sums decides their names.
"""

from __future__ import annotations

import bisect
import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass

SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of durations; the last bucket has none."""


class Operation(enum.Enum):
    """What was asked of the store."""

    GET = "get"
    PUT = "put"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Tally:
    """The sums of one operation with one outcome, since the process started."""

    count: int
    bytes: int
    """Moved to or from the volume."""
    seconds: float
    buckets: tuple[int, ...]
    """How many took up to each of `SECONDS_BOUNDS`, each operation in one bucket only; the last is for longer ones."""


class _Sums:
    __slots__ = ("buckets", "bytes", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(SECONDS_BOUNDS) + 1)


Totals = Mapping[tuple[Operation, str], Tally]
"""By operation and outcome: ``hit``, ``miss``, ``stored``, ``present``, or the value of a fault."""


class Counters:
    """Any thread may call any method; one lock guards the sums."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = threading.Lock()
        self._sums: dict[tuple[Operation, str], _Sums] = {}

    def add(self, operation: Operation, outcome: str, *, moved_bytes: int, seconds: float) -> None:
        """Count one operation."""
        with self._lock:
            sums = self._sums.get((operation, outcome))
            if sums is None:
                sums = self._sums[operation, outcome] = _Sums()
            sums.count += 1
            sums.bytes += moved_bytes
            sums.seconds += seconds
            sums.buckets[bisect.bisect_left(SECONDS_BOUNDS, seconds)] += 1

    def totals(self) -> Totals:
        """Return all sums as they are now; subtract an earlier answer for what happened in between."""
        with self._lock:
            return {
                name: Tally(sums.count, sums.bytes, sums.seconds, tuple(sums.buckets))
                for name, sums in self._sums.items()
            }
