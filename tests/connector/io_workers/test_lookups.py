# SPDX-License-Identifier: Apache-2.0
"""What a lookup finds, with how many calls; and what becomes of it when the volume or the worker fails."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import children, key, payload, wait_until
from store_faults import GatedFs
from waiting import Clock

from kvtier_connector.io_workers import lookups as lookups_module
from kvtier_connector.io_workers.lookups import MOST_CALLS, Answer, BlockQuery, Found, LookupWorker, find
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import BlockKey


class Volume:
    """Has the blocks of a set of numbers; counts calls, and rounds of calls that are made at once."""

    def __init__(self, present: set[int], *, seconds: float = 0.0) -> None:
        self.present = present
        self.calls = self.rounds = 0
        self._seconds = seconds
        self.now = Clock()

    def look_at(self, keys: Sequence[BlockKey]) -> list[bool | Fault]:
        self.calls += len(keys)
        self.rounds += -(-len(keys) // MOST_CALLS)
        self.now.seconds += self._seconds
        return [int.from_bytes(each.hash, "big") in self.present for each in keys]


def names(count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(number.to_bytes(32, "big"), 0) for number in range(count))


def ask(volume: Volume, count: int, *, is_prefix: bool = True, is_exact: bool = False) -> Found:
    found = find(BlockQuery(names(count), is_prefix, is_exact), volume.look_at, now=volume.now)
    assert isinstance(found, Found)
    return found


@pytest.mark.parametrize("count", [1, 10, 2000])
def test_a_cold_prompt_costs_one_call(count: int) -> None:
    volume = Volume(set())
    assert ask(volume, count).present == 0
    assert volume.calls == 1


@pytest.mark.parametrize(("count", "present"), [(33, 20), (33, 33), (1000, 1000), (1000, 999), (1000, 1), (1000, 517)])
def test_behind_the_first_block_the_end_is_found_in_two_rounds_or_by_halving(count: int, present: int) -> None:
    quick = Volume(set(range(present)))
    assert ask(quick, count).present == present
    assert quick.calls <= 13
    volume = Volume(set(range(present)), seconds=0.005)
    assert ask(volume, count).present == present
    assert volume.rounds <= 3
    assert volume.calls <= 1 + 2 * MOST_CALLS


@given(present=st.integers(0, 200), count=st.integers(0, 200), is_exact=st.booleans(), is_slow=st.booleans())
def test_the_prefix_that_is_there_is_found(present: int, count: int, *, is_exact: bool, is_slow: bool) -> None:
    volume = Volume(set(range(present)), seconds=0.005 if is_slow else 0.0)
    found = ask(volume, count, is_exact=is_exact)
    assert found.present == min(present, count)
    assert set(found.seen) <= set(range(present))


@given(present=st.sets(st.integers(0, 60)), count=st.integers(0, 60))
def test_of_a_prefix_with_holes_an_exact_lookup_finds_the_part_before_the_first(present: set[int], count: int) -> None:
    found = ask(Volume(present), count, is_exact=True)
    first_hole = next((number for number in range(count) if number not in present), count)
    assert found.present <= first_hole
    assert set(range(found.present)) <= set(found.seen)


@given(present=st.sets(st.integers(0, 40)), count=st.integers(0, 32))
def test_blocks_that_are_no_prefix_are_all_looked_at(present: set[int], count: int) -> None:
    found = ask(Volume(present), count, is_prefix=False)
    assert set(found.seen) == {number for number in range(count) if number in present}


class Lookups:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.fs = GatedFs(lambda call, path: call == "stat" and path.endswith(".kvb"))
        self._made: list[LookupWorker] = []

    def make(self, *, hangs: bool = False, lookup_seconds: float = 60.0) -> LookupWorker:
        settings = PoolSettings(root=str(self.root), workers=1, deadline_seconds=60.0)
        options = {"fs": self.fs} if hangs else {}
        made = LookupWorker(settings, lookup_seconds=lookup_seconds, **options)
        made.start()
        self._made.append(made)
        return made

    def write(self, *numbers: int) -> None:
        for number in numbers:
            BlockStore(self.root).put(key(number), memoryview(payload(number)))

    def close(self) -> None:
        self.fs.open_gate()
        for made in self._made:
            made.close()


@pytest.fixture
def lookups(tmp_path: Path) -> Iterator[Lookups]:
    made = Lookups(tmp_path / "volume")
    yield made
    made.close()


def end_of(worker: LookupWorker, number: int) -> Answer:
    ended: list[Answer] = []
    wait_until(lambda: ended.extend(worker.collect()) or bool(ended), "the lookup has ended")
    (answer,) = ended
    assert answer.number == number
    return answer


def question(*numbers: int) -> BlockQuery:
    return BlockQuery(tuple(map(key, numbers)), is_prefix=True)


def test_a_worker_answers_about_what_is_on_the_volume_at_once(lookups: Lookups) -> None:
    lookups.write(0, 1)
    worker = lookups.make()
    worker.submit(7, question(0, 1, 2))
    found = end_of(worker, 7).found
    assert isinstance(found, Found)
    assert found.present == 2
    lookups.write(2)
    worker.submit(8, question(0, 1, 2))
    assert end_of(worker, 8).found == Found(3, (0, 1, 2), 3)
    worker.submit(9, question(*range(3), *range(100, 5000)))
    found = end_of(worker, 9).found
    assert isinstance(found, Found)
    assert found.present == 3


def test_a_hung_volume_ends_the_lookup_and_the_next_ones(lookups: Lookups, caplog: pytest.LogCaptureFixture) -> None:
    worker = lookups.make(hangs=True, lookup_seconds=0.05)
    worker.submit(1, question(0))
    assert end_of(worker, 1).found is None
    assert worker.is_stuck
    assert "Lookups are given up (the volume does not answer them)" in caplog.text
    worker.submit(2, question(0))
    assert worker.collect() == [Answer(2, None)]
    worker.close()
    assert worker.collect() == []


def test_a_worker_that_hangs_and_cannot_be_killed_is_replaced_when_the_volume_answers(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(lookups_module, "_BACKOFF_SECONDS", 0.0)
    lookups.write(0)
    worker = lookups.make(hangs=True, lookup_seconds=0.05)
    worker.submit(1, question(0))
    assert end_of(worker, 1).found is None
    for _ in range(3):
        assert worker.collect() == []
    assert "running again" not in caplog.text
    lookups.fs.open_gate()
    wait_until(lambda: worker.collect() is not None and not worker.is_stuck, "there is another worker")
    assert "running again" in caplog.text
    numbers = itertools.count(2)

    def is_answered() -> bool:
        # On a busy machine one may be late, too.
        number = next(numbers)
        worker.submit(number, question(0))
        return end_of(worker, number).found == Found(1, (0,), 1)

    wait_until(is_answered, "it answers")


def test_a_worker_that_dies_is_replaced_and_its_questions_end(lookups: Lookups) -> None:
    lookups.write(0)
    before = set(children(os.getpid()))
    worker = lookups.make()
    (process,) = set(children(os.getpid())) - before
    os.kill(process, signal.SIGSTOP)
    worker.submit(1, question(0))
    os.kill(process, signal.SIGKILL)
    assert end_of(worker, 1).found is None
    wait_until(lambda: worker.collect() is not None and not worker.is_stuck, "there is another worker")
    worker.submit(2, question(0))
    assert end_of(worker, 2).found == Found(1, (0,), 1)
