# SPDX-License-Identifier: Apache-2.0
"""When each circuit opens, what it lets through, and how it recovers."""

from __future__ import annotations

import pytest
from clocks import Clock

from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.health import Breaker, BreakerLimits, CircuitState, Direction

LOAD, STORE = Direction.LOAD, Direction.STORE
CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    limits = BreakerLimits(bad_in_a_row=3, first_backoff_seconds=2, longest_backoff_seconds=10, attempt_seconds=30)
    return Breaker(limits=limits, now=clock)


def states(breaker: Breaker) -> tuple[CircuitState, CircuitState]:
    return breaker.view(LOAD).state, breaker.view(STORE).state


STORE_TABLE = [
    ("a stored block is good", Stored(1), CLOSED, CLOSED),
    ("a block that was there says nothing", Present(), CLOSED, CLOSED),
    ("our own limit says nothing about the volume", StoreFault.NO_BUDGET, CLOSED, CLOSED),
    ("a full volume stops stores at once", StoreFault.NO_SPACE, OPEN, OPEN),
    ("a read-only volume stops stores at once", StoreFault.READ_ONLY, OPEN, OPEN),
    ("a volume that denies stops stores at once", StoreFault.DENIED, OPEN, OPEN),
    ("a host without descriptors stops stores if it stays so", StoreFault.RESOURCES, CLOSED, OPEN),
    ("a failing volume stops stores if it stays so", StoreFault.IO, CLOSED, OPEN),
]


@pytest.mark.parametrize(("sentence", "outcome", "after_one", "after_three"), STORE_TABLE, ids=str)
def test_what_a_store_does_to_its_circuit_and_never_to_loads(
    breaker: Breaker,
    sentence: str,
    outcome: Stored | Present | StoreFault,
    after_one: CircuitState,
    after_three: CircuitState,
) -> None:
    breaker.record_store(outcome)
    assert states(breaker) == (CLOSED, after_one), sentence
    breaker.record_store(outcome)
    breaker.record_store(outcome)
    assert states(breaker) == (CLOSED, after_three), sentence


@pytest.mark.parametrize("outcome", [Hit(1), Miss(), *Fault])
def test_what_a_load_does_to_its_circuit_and_never_to_stores(breaker: Breaker, outcome: Hit | Miss | Fault) -> None:
    breaker.record_load(outcome)
    breaker.record_load(outcome)
    assert states(breaker) == (CLOSED, CLOSED)
    breaker.record_load(outcome)
    assert states(breaker) == (OPEN if outcome is Fault.IO else CLOSED, CLOSED)


@pytest.mark.parametrize("direction", [LOAD, STORE])
def test_a_time_out_opens_its_own_direction_at_once(breaker: Breaker, direction: Direction) -> None:
    breaker.record_timeout(direction)
    assert breaker.view(direction).state is OPEN
    assert breaker.view(direction).cause == "timeout"
    assert [breaker.view(other).state for other in Direction if other is not direction] == [CLOSED]


def test_a_success_between_two_faults_starts_the_count_anew_and_what_says_nothing_does_not(breaker: Breaker) -> None:
    for outcome in (Fault.IO, Fault.IO, Miss(), Fault.IO, Fault.IO, Hit(1)):
        breaker.record_load(outcome)
    for outcome in (StoreFault.IO, StoreFault.IO, Present(), StoreFault.NO_BUDGET, StoreFault.IO):
        breaker.record_store(outcome)
    assert states(breaker) == (CLOSED, OPEN)


def test_an_open_circuit_lets_one_attempt_through_when_the_back_off_is_over(breaker: Breaker, clock: Clock) -> None:
    breaker.record_store(StoreFault.NO_SPACE)
    assert breaker.view(STORE).retry_in_seconds == 2
    clock.seconds += 1.9
    assert (breaker.has_room(STORE), breaker.admit(STORE)) == (False, False)
    clock.seconds += 0.2
    assert breaker.view(STORE) == (HALF_OPEN, "no_space", 0)
    assert breaker.has_room(STORE)
    assert [breaker.admit(STORE) for _ in range(3)] == [True, False, False]
    assert not breaker.has_room(STORE)
    breaker.record_store(Stored(1))
    assert breaker.view(STORE).state is CLOSED
    assert all(breaker.admit(STORE) for _ in range(5))


def test_each_attempt_that_fails_doubles_the_back_off_up_to_the_longest(breaker: Breaker, clock: Clock) -> None:
    breaker.record_store(StoreFault.NO_SPACE)
    backoffs = []
    for _ in range(5):
        backoffs.append(breaker.view(STORE).retry_in_seconds)
        clock.seconds += backoffs[-1]
        assert breaker.admit(STORE)
        breaker.record_store(StoreFault.NO_SPACE)
    assert backoffs == [2, 4, 8, 10, 10]
    clock.seconds += 10
    assert breaker.admit(STORE)
    # After a recovery it is short again.
    breaker.record_store(Stored(1))
    breaker.record_store(StoreFault.READ_ONLY)
    assert breaker.view(STORE) == (OPEN, "read_only", 2)


@pytest.mark.parametrize("says_nothing", [Present(), StoreFault.NO_BUDGET])
def test_attempts_that_say_nothing_are_none(breaker: Breaker, clock: Clock, says_nothing: Present | StoreFault) -> None:
    breaker.record_store(StoreFault.NO_SPACE)
    clock.seconds += 2
    breaker.admit(STORE)
    breaker.record_store(says_nothing)
    assert breaker.view(STORE).state is HALF_OPEN
    assert breaker.admit(STORE)
    breaker.skip(STORE)
    assert breaker.admit(STORE)


@pytest.mark.parametrize("is_told", [True, False])
def test_an_attempt_that_times_out_or_never_ends_has_failed(breaker: Breaker, clock: Clock, is_told: bool) -> None:
    breaker.record_timeout(LOAD)
    clock.seconds += 2
    if is_told:
        breaker.record_timeout(LOAD)
    else:
        assert breaker.admit(LOAD)
        clock.seconds += 29.9
        assert breaker.view(LOAD).state is HALF_OPEN
        clock.seconds += 0.1
    assert breaker.view(LOAD) == (OPEN, "timeout", 4)


def test_operations_that_began_before_the_circuit_opened_change_nothing(breaker: Breaker, clock: Clock) -> None:
    for _ in range(16):
        breaker.record_timeout(LOAD)
    view = breaker.view(LOAD)
    assert view.retry_in_seconds == 2
    breaker.record_load(Hit(1))
    assert breaker.view(LOAD).state is OPEN
    clock.seconds += 2
    breaker.record_load(Fault.IO)
    assert breaker.view(LOAD).state is HALF_OPEN
