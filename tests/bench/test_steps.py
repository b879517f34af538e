# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
from e2e.bench.steps import Clock, Clocked


class Transfer(NamedTuple):
    transfer_time: float
    transfer_size: int


class Base:
    def work(self, depth: int) -> int:
        return depth

    @staticmethod
    def constant() -> int:
        return 7


class Derived(Base):
    def work(self, depth: int) -> int:
        return self.work(depth - 1) if depth else super().work(depth)

    def fail(self) -> None:
        raise RuntimeError("as before")

    def poll(self) -> list[Transfer]:
        return [Transfer(0.25, 4096)]

    def settle(self, *, seconds: float) -> float:
        return seconds


def test_a_call_within_a_call_of_the_same_name_counts_once() -> None:
    clock = Clock(is_tracing=False)
    Clocked(clock).add(Derived, ("work",))
    Derived().work(3)
    assert {name: total["calls"] for name, total in clock.totals().items()} == {"Derived.work": 1}


def test_a_call_that_fails_fails_as_before_and_is_counted() -> None:
    clock = Clock(is_tracing=False)
    clocked = Clocked(clock)
    clocked.add(Derived)
    try:
        with pytest.raises(RuntimeError, match="as before"):
            Derived().fail()
    finally:
        clocked.undo()
    assert clock.totals()["Derived.fail"]["calls"] == 1


def test_afterwards_the_classes_are_as_they_were() -> None:
    before = dict(vars(Derived)), dict(vars(Base))
    clocked = Clocked(Clock(is_tracing=False))
    clocked.add(Derived)
    clocked.add(Derived, ("constant", "absent"))
    clocked.add(Base)
    assert Base.constant() == 7
    clocked.undo()
    assert (dict(vars(Derived)), dict(vars(Base))) == before


def test_calls_of_all_threads_are_summed() -> None:
    clock = Clock(is_tracing=False)
    work = clock.around("work", lambda: None)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.totals()["work"]["calls"] == 4


def test_a_trace_has_what_a_call_reports_as_done() -> None:
    clock = Clock(is_tracing=True)
    clocked = Clocked(clock)
    clocked.add(Derived)
    try:
        Derived().poll()
        Derived().settle(seconds=0.5)
    finally:
        clocked.undo()
    assert [(name, parts) for name, _, _, parts in clock.trace] == [
        ("Derived.poll", [(0.25, 4096.0)]),
        ("Derived.settle", [(0.5, 1.0)]),
    ]
    assert all(began <= ended for _, began, ended, _ in clock.trace)
