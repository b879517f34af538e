# SPDX-License-Identifier: Apache-2.0
"""How long work takes, by how much of it is done at once: measured while serving, newer measurements count more.

Pure: amounts, seconds and the time come in as arguments.
"""

from __future__ import annotations

import math

SIZES = 20
"""Powers of two that are told apart; larger amounts count as the last."""
SMALLEST_WEIGHT = 0.3
"""Of a new measurement against the old ones, when they follow each other at once."""
MEMORY_SECONDS = 20.0
"""After so long without a measurement, the next one counts for two thirds; after much longer, it replaces the old."""


def size_of(amount: int) -> int:
    """Return the number of the power of two that an amount, 1 or more, belongs to."""
    return min(SIZES, amount.bit_length()) - 1


class Pace:
    """Seconds for one unit of work. Owned by one thread."""

    def __init__(self) -> None:
        """Start without a measurement."""
        self._rates: list[float | None] = [None] * SIZES
        self._times = [-math.inf] * SIZES

    def observe(self, amount: int, seconds: float, now: float) -> None:
        """Take in that `amount` units, done together, took so long."""
        size = size_of(amount)
        old, new = self._rates[size], seconds / amount
        weight = max(SMALLEST_WEIGHT, 1.0 - math.exp(-(now - self._times[size]) / MEMORY_SECONDS))
        self._rates[size] = new if old is None else old + weight * (new - old)
        self._times[size] = now

    def seconds(self, amount: int) -> float | None:
        """Say how long `amount` units would take together, by the nearest size measured; None before the first."""
        size = size_of(amount)
        measured = [number for number, rate in enumerate(self._rates) if rate is not None]
        if not measured:
            return None
        # Of two sizes equally near, the larger: overheads weigh less there.
        rate = self._rates[min(measured, key=lambda number: (abs(number - size), -number))]
        return None if rate is None else rate * amount

    def measured_at(self, amount: int, *, reach: int = 1) -> float:
        """Return when an amount of about this size was measured last; minus infinity if never.

        Args:
            amount: Units of work.
            reach: How many powers of two away still counts as about this size.
        """
        size = size_of(amount)
        return max(self._times[max(0, size - reach) : size + reach + 1])
