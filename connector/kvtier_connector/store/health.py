# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker stops asking a volume that fails, and tries it again later; loads and stores have a circuit each.

Pure: the clock is passed in, and the user of the volume reports every outcome. Owned by one thread.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvtier_connector.store.blockstore import Outcome, Present, StoreFault, StoreOutcome
from kvtier_connector.store.header import Fault


class Direction(enum.Enum):
    """Which way the bytes go. A full volume can still be read, so each way fails by itself."""

    LOAD = "load"
    STORE = "store"


class CircuitState(enum.Enum):
    """Operations that a circuit admits."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until the back-off is over."""
    HALF_OPEN = "half_open"
    """One operation, which decides."""


class _Sign(enum.Enum):
    """Evidence of one operation about the volume."""

    GOOD = "good"
    NEUTRAL = "neutral"
    """It says nothing: our own limit, or no write was needed."""
    BAD = "bad"
    """Once may be one file's bad luck; several in a row are the volume."""
    FATAL = "fatal"
    """The next one will end the same way."""


_SIGNS: dict[Fault | StoreFault, _Sign] = {
    # A volume that shows a missing or damaged file is a volume that answers.
    **dict.fromkeys(Fault, _Sign.GOOD),
    Fault.IO: _Sign.BAD,
    **dict.fromkeys(StoreFault, _Sign.NEUTRAL),
    **dict.fromkeys((StoreFault.NO_SPACE, StoreFault.READ_ONLY, StoreFault.DENIED), _Sign.FATAL),
    **dict.fromkeys((StoreFault.RESOURCES, StoreFault.IO), _Sign.BAD),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerLimits:
    """When a circuit opens, and for how long."""

    bad_in_a_row: int = 3
    first_backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 60.0
    """Each failed attempt to close doubles the back-off, up to this."""
    attempt_seconds: float = 60.0
    """The one admitted operation counts as failed if its end is not reported by then."""


class CircuitView(NamedTuple):
    """How a circuit stands, for metrics and messages."""

    state: CircuitState
    cause: str
    """The cause of its last opening: the value of a fault, or ``timeout``; empty if nothing ever did."""
    retry_in_seconds: float
    """Until the next attempt; 0 when one may be made now."""


class _Circuit:
    """One direction."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.bad = 0
        self._backoff_seconds = limits.first_backoff_seconds
        self._retry_at = 0.0
        self._attempt_ends: float | None = None
        self.is_closed = True
        self._cause = ""

    def view(self, now: float) -> CircuitView:
        self._give_up_attempt(now)
        if self.is_closed:
            return CircuitView(CircuitState.CLOSED, self._cause, 0.0)
        left = max(0.0, self._retry_at - now)
        return CircuitView(CircuitState.OPEN if left else CircuitState.HALF_OPEN, self._cause, left)

    def has_room(self, now: float) -> bool:
        state = self.view(now).state
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and self._attempt_ends is None)

    def admit(self, now: float) -> bool:
        if not self.has_room(now):
            return False
        if not self.is_closed:
            self._attempt_ends = now + self._limits.attempt_seconds
        return True

    def record(self, sign: _Sign, cause: str, now: float) -> None:
        self._give_up_attempt(now)
        is_attempt, is_due = self._attempt_ends is not None, now >= self._retry_at
        if self.is_closed or is_attempt:
            self._attempt_ends = None
            if sign is _Sign.GOOD:
                self.is_closed, self.bad = True, 0
            elif sign is _Sign.NEUTRAL:
                pass
            elif is_attempt:
                self._fail_attempt(cause, now)
            else:
                self.bad += 1
                if sign is _Sign.FATAL or self.bad >= self._limits.bad_in_a_row:
                    self._backoff_seconds = self._limits.first_backoff_seconds
                    self._open(cause, now)
        elif sign is _Sign.FATAL and is_due:
            # Half open, and an operation that was not admitted shows how the attempt would end.
            self._fail_attempt(cause, now)
        # Open: this one began before the circuit opened, and says nothing new.

    def _give_up_attempt(self, now: float) -> None:
        if self._attempt_ends is not None and now >= self._attempt_ends:
            self._fail_attempt("timeout", self._attempt_ends)

    def _fail_attempt(self, cause: str, now: float) -> None:
        self._backoff_seconds = min(self._backoff_seconds * 2, self._limits.longest_backoff_seconds)
        self._open(cause, now)

    def _open(self, cause: str, now: float) -> None:
        self.is_closed = False
        self._cause = cause
        self._retry_at = now + self._backoff_seconds
        self._attempt_ends = None


class Breaker:
    """Both circuits of one volume."""

    def __init__(self, *, limits: BreakerLimits = BreakerLimits(), now: Callable[[], float] = time.monotonic) -> None:
        """Start with both circuits closed; `now` are seconds that never go back."""
        self._now = now
        self._circuits = {direction: _Circuit(limits) for direction in Direction}

    def has_room(self, direction: Direction) -> bool:
        """Return whether `admit` would let something through now, without taking the attempt: for planning."""
        return self._circuits[direction].has_room(self._now())

    def admit(self, direction: Direction) -> bool:
        """Ask before each operation; True obliges to tell its end with one of the methods below."""
        circuit = self._circuits[direction]
        return circuit.is_closed or circuit.admit(self._now())

    def record_load(self, outcome: Outcome) -> None:
        """Tell the answer of a `get`."""
        fault = outcome if isinstance(outcome, Fault) else None
        self._record(Direction.LOAD, _SIGNS[fault] if fault else _Sign.GOOD, fault.value if fault else "")

    def record_store(self, outcome: StoreOutcome) -> None:
        """Tell the answer of a `put`."""
        fault = outcome if isinstance(outcome, StoreFault) else None
        sign = _SIGNS[fault] if fault else _Sign.NEUTRAL if isinstance(outcome, Present) else _Sign.GOOD
        self._record(Direction.STORE, sign, fault.value if fault else "")

    def record_timeout(self, direction: Direction) -> None:
        """Tell that an operation has not ended in time: the volume hangs, and so would the next one."""
        self._record(direction, _Sign.FATAL, "timeout")

    def skip(self, direction: Direction) -> None:
        """Tell that an admitted operation was not carried out, so that another may be the attempt."""
        self._record(direction, _Sign.NEUTRAL, "")

    def view(self, direction: Direction) -> CircuitView:
        """Return how the circuit stands."""
        return self._circuits[direction].view(self._now())

    def _record(self, direction: Direction, sign: _Sign, cause: str) -> None:
        circuit = self._circuits[direction]
        if sign in {_Sign.GOOD, _Sign.NEUTRAL} and circuit.is_closed and not circuit.bad:
            # The outcome of nearly every block, which changes nothing.
            return
        circuit.record(sign, cause, self._now())
