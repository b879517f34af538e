# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker stops asking a volume that fails, and tries it again later; loads and stores have a circuit each.

Pure but for its lock: the clock is passed in, and the user of the volume reports every outcome.
"""

from __future__ import annotations

import enum
import threading
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


class Sign(enum.Enum):
    """Evidence of one operation about the volume."""

    GOOD = "good"
    NEUTRAL = "neutral"
    """It says nothing: our own limit, or no write was needed."""
    BAD = "bad"
    """Once may be one file's bad luck; several in a row are the volume."""
    FATAL = "fatal"
    """The next one will end the same way."""


_HARMLESS = frozenset({Sign.GOOD, Sign.NEUTRAL})

_STORE_SIGNS = {
    StoreFault.NO_BUDGET: Sign.NEUTRAL,
    StoreFault.NO_QUOTA: Sign.NEUTRAL,
    StoreFault.NO_PERMIT: Sign.NEUTRAL,
    StoreFault.NO_KEY: Sign.NEUTRAL,
    StoreFault.PURGED: Sign.NEUTRAL,
    StoreFault.NO_SPACE: Sign.FATAL,
    StoreFault.READ_ONLY: Sign.FATAL,
    StoreFault.DENIED: Sign.FATAL,
    StoreFault.RESOURCES: Sign.BAD,
    StoreFault.IO: Sign.BAD,
}


def load_sign(outcome: Outcome) -> Sign:
    """Return the evidence of a `get`: a volume that shows a missing or damaged file is a volume that answers."""
    return Sign.BAD if outcome is Fault.IO else Sign.GOOD


def store_sign(outcome: StoreOutcome) -> Sign:
    """Return the evidence of a `put`."""
    if isinstance(outcome, StoreFault):
        return _STORE_SIGNS[outcome]
    return Sign.NEUTRAL if isinstance(outcome, Present) else Sign.GOOD


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerLimits:
    """When a circuit opens, and for how long."""

    bad_in_a_row: int = 3
    first_backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 60.0
    """Each failed attempt to close doubles the back-off, up to this."""
    attempt_seconds: float = 60.0
    """The one admitted operation counts as failed if its end is not reported by then."""


@dataclass(frozen=True, slots=True)
class CircuitView:
    """How a circuit stands, for metrics and messages."""

    state: CircuitState
    cause: str
    """The cause of its last opening: the value of a fault, or ``timeout``; empty if nothing ever did."""
    opened: int
    """How often it went from closed to open."""
    retry_in_seconds: float
    """Until the next attempt; 0 when one may be made now."""


class _Circuit:
    """One direction. Not thread-safe: the breaker's lock guards it."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.bad = 0
        self._backoff_seconds = limits.first_backoff_seconds
        self._retry_at = 0.0
        self._attempt_ends: float | None = None
        self.is_closed = True
        self.cause = ""
        self.opened = 0

    def state(self, now: float) -> CircuitState:
        self._give_up_attempt(now)
        if self.is_closed:
            return CircuitState.CLOSED
        is_waiting = now < self._retry_at
        return CircuitState.OPEN if is_waiting else CircuitState.HALF_OPEN

    def has_room(self, now: float) -> bool:
        state = self.state(now)
        return state is CircuitState.CLOSED or (state is CircuitState.HALF_OPEN and self._attempt_ends is None)

    def admit(self, now: float) -> bool:
        if not self.has_room(now):
            return False
        if not self.is_closed:
            self._attempt_ends = now + self._limits.attempt_seconds
        return True

    def retry_in(self, now: float) -> float:
        return 0.0 if self.is_closed else max(0.0, self._retry_at - now)

    def record(self, sign: Sign, cause: str, now: float) -> None:
        self._give_up_attempt(now)
        if self.is_closed:
            self._record_closed(sign, cause, now)
        elif self._attempt_ends is not None:
            self._record_attempt(sign, cause, now)
        elif sign is Sign.FATAL and now >= self._retry_at:
            # Half open, and an operation that was not admitted shows how the attempt would end.
            self._fail_attempt(cause, now)
        # Open: this one began before the circuit opened, and says nothing new.

    def _record_closed(self, sign: Sign, cause: str, now: float) -> None:
        if sign is Sign.GOOD:
            self.bad = 0
        elif sign is not Sign.NEUTRAL:
            self.bad += 1
            if sign is Sign.FATAL or self.bad >= self._limits.bad_in_a_row:
                self.opened += 1
                self._backoff_seconds = self._limits.first_backoff_seconds
                self._open(cause, now)

    def _record_attempt(self, sign: Sign, cause: str, now: float) -> None:
        self._attempt_ends = None
        if sign is Sign.GOOD:
            self.is_closed = True
            self.bad = 0
        elif sign is not Sign.NEUTRAL:
            self._fail_attempt(cause, now)

    def _give_up_attempt(self, now: float) -> None:
        if self._attempt_ends is not None and now >= self._attempt_ends:
            self._fail_attempt("timeout", self._attempt_ends)

    def _fail_attempt(self, cause: str, now: float) -> None:
        self._backoff_seconds = min(self._backoff_seconds * 2, self._limits.longest_backoff_seconds)
        self._open(cause, now)

    def _open(self, cause: str, now: float) -> None:
        self.is_closed = False
        self.cause = cause
        self._retry_at = now + self._backoff_seconds
        self._attempt_ends = None


class Breaker:
    """Any thread may call any method; one lock guards both circuits and nothing waits while it is held."""

    def __init__(
        self,
        *,
        limits: BreakerLimits = BreakerLimits(),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with both circuits closed; `now` are seconds that never go back."""
        self._now = now
        self._lock = threading.Lock()
        self._circuits = {direction: _Circuit(limits) for direction in Direction}

    def has_room(self, direction: Direction) -> bool:
        """Return whether `admit` would let something through now, without taking the attempt: for planning."""
        with self._lock:
            return self._circuits[direction].has_room(self._now())

    def admit(self, direction: Direction) -> bool:
        """Ask before each operation; True obliges to tell its end with one of the methods below."""
        circuit = self._circuits[direction]
        # Without the lock, for it is asked for each block: a circuit that opens meanwhile lets one more through.
        if circuit.is_closed:
            return True
        with self._lock:
            return circuit.admit(self._now())

    def record_load(self, outcome: Outcome) -> None:
        """Tell what a `get` answered."""
        self._record(Direction.LOAD, load_sign(outcome), _cause(outcome))

    def record_store(self, outcome: StoreOutcome) -> None:
        """Tell what a `put` answered."""
        self._record(Direction.STORE, store_sign(outcome), _cause(outcome))

    def record_timeout(self, direction: Direction) -> None:
        """Tell that an operation has not ended in time: the volume hangs, and so would the next one."""
        self._record(direction, Sign.FATAL, "timeout")

    def skip(self, direction: Direction) -> None:
        """Tell that an admitted operation was not carried out, so that another may be the attempt."""
        self._record(direction, Sign.NEUTRAL, "")

    def view(self, direction: Direction) -> CircuitView:
        """Return how the circuit stands."""
        with self._lock:
            now = self._now()
            circuit = self._circuits[direction]
            return CircuitView(circuit.state(now), circuit.cause, circuit.opened, circuit.retry_in(now))

    def _record(self, direction: Direction, sign: Sign, cause: str) -> None:
        circuit = self._circuits[direction]
        if sign in _HARMLESS and circuit.is_closed and not circuit.bad:
            # The outcome of nearly every block, which changes nothing.
            return
        with self._lock:
            circuit.record(sign, cause, self._now())


def _cause(outcome: Outcome | StoreOutcome) -> str:
    return outcome.value if isinstance(outcome, Fault | StoreFault) else ""
