# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker stops asking a volume that fails, and tries it again later; loads and stores have a circuit each.

Pure: the clock is passed in, and the user of the volume reports every outcome. Owned by one thread.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

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


class _Circuit:
    """One direction."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.bad = 0
        self._backoff_seconds = limits.first_backoff_seconds
        self._retry_at = 0.0
        self._attempt_ends: float | None = None
        self.is_closed = True

    def state(self, now: float) -> CircuitState:
        self._give_up_attempt(now)
        if self.is_closed:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._retry_at else CircuitState.HALF_OPEN

    def has_room(self, now: float) -> bool:
        state = self.state(now)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and self._attempt_ends is None)

    def admit(self, now: float) -> bool:
        if not self.has_room(now):
            return False
        if not self.is_closed:
            self._attempt_ends = now + self._limits.attempt_seconds
        return True

    def record(self, sign: _Sign, now: float) -> None:
        self._give_up_attempt(now)
        is_attempt, is_due = self._attempt_ends is not None, now >= self._retry_at
        if self.is_closed or is_attempt:
            self._attempt_ends = None
            if sign is _Sign.GOOD:
                self.is_closed, self.bad = True, 0
            elif sign is _Sign.NEUTRAL:
                pass
            elif is_attempt:
                self._fail_attempt(now)
            else:
                self.bad += 1
                if sign is _Sign.FATAL or self.bad >= self._limits.bad_in_a_row:
                    self._backoff_seconds = self._limits.first_backoff_seconds
                    self._open(now)
        elif sign is _Sign.FATAL and is_due:
            # Half open, and an operation that was not admitted shows how the attempt would end.
            self._fail_attempt(now)
        # Open: this one began before the circuit opened, and says nothing new.

    def _give_up_attempt(self, now: float) -> None:
        if self._attempt_ends is not None and now >= self._attempt_ends:
            self._fail_attempt(self._attempt_ends)

    def _fail_attempt(self, now: float) -> None:
        self._backoff_seconds = min(self._backoff_seconds * 2, self._limits.longest_backoff_seconds)
        self._open(now)

    def _open(self, now: float) -> None:
        self.is_closed = False
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
        self._record(Direction.LOAD, _SIGNS[outcome] if isinstance(outcome, Fault) else _Sign.GOOD)

    def record_store(self, outcome: StoreOutcome) -> None:
        """Tell the answer of a `put`."""
        said = _Sign.NEUTRAL if isinstance(outcome, Present) else _Sign.GOOD
        self._record(Direction.STORE, _SIGNS[outcome] if isinstance(outcome, StoreFault) else said)

    def record_timeout(self, direction: Direction) -> None:
        """Tell that an operation has not ended in time: the volume hangs, and so would the next one."""
        self._record(direction, _Sign.FATAL)

    def skip(self, direction: Direction) -> None:
        """Tell that an admitted operation was not carried out, so that another may be the attempt."""
        self._record(direction, _Sign.NEUTRAL)

    def state(self, direction: Direction) -> CircuitState:
        """Return what the circuit admits now."""
        return self._circuits[direction].state(self._now())

    def _record(self, direction: Direction, sign: _Sign) -> None:
        circuit = self._circuits[direction]
        if sign in {_Sign.GOOD, _Sign.NEUTRAL} and circuit.is_closed and not circuit.bad:
            # The outcome of nearly every block, which changes nothing.
            return
        circuit.record(sign, self._now())
