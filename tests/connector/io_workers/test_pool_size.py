# SPDX-License-Identifier: Apache-2.0
"""How many workers there are follows what they get done."""

from __future__ import annotations

import pytest
from pools import Pools, is_alive, wait_until

from kvtier_connector.io_workers.supervisor import PoolSize, workers_for


class Volume:
    """A volume that ends so many tasks a second with so many workers."""

    def __init__(self, *, per_worker: float, at_most: float, least: int = 2, most: int = 16) -> None:
        self.sizing = PoolSize(least, most)
        self.size = least
        self.now = 100.0
        self.ended = 0.0
        self.wait_share = 0.0
        self._per_worker, self._at_most = per_worker, at_most

    def pass_seconds(self, seconds: float, *, reads: int = 1000) -> int:
        for _ in range(int(seconds / 0.05)):
            self.now += 0.05
            if reads:
                self.ended += 0.05 * min(self._at_most, self.size * self._per_worker)
            self.size = self.sizing.decide(
                self.now, reads=reads, ended=int(self.ended), wait_share=lambda: self.wait_share
            )
        return self.size


def test_a_volume_that_answers_slowly_gets_all_workers() -> None:
    assert Volume(per_worker=100, at_most=1e9).pass_seconds(20) == 16


@pytest.mark.parametrize(("at_most", "size"), [(200, 2), (600, 6)])
def test_no_more_workers_stay_than_move_more(at_most: float, size: int) -> None:
    volume = Volume(per_worker=100, at_most=at_most)
    assert size <= volume.pass_seconds(20) < 2 * size


def test_workers_that_wait_for_a_core_get_no_company() -> None:
    volume = Volume(per_worker=100, at_most=1e9)
    volume.wait_share = 0.5
    assert volume.pass_seconds(20) == 2
    volume.wait_share = 0.1
    assert volume.pass_seconds(20) == 16


def test_few_tasks_need_few_workers() -> None:
    assert Volume(per_worker=100, at_most=1e9).pass_seconds(20, reads=2) == 2


def test_workers_without_work_go_after_a_while() -> None:
    volume = Volume(per_worker=100, at_most=1e9)
    assert volume.pass_seconds(20) == 16
    assert volume.pass_seconds(50, reads=0) == 16
    assert volume.pass_seconds(20, reads=0) == 2


@pytest.mark.parametrize(
    ("round_trip_seconds", "size"), [(0.0, 2), (20e-6, 2), (0.0005, 3), (0.001, 4), (0.005, 11), (0.020, 38)]
)
def test_a_slow_answer_of_the_volume_asks_for_more_workers_than_processors(
    round_trip_seconds: float, size: int
) -> None:
    assert workers_for(2, round_trip_seconds=round_trip_seconds, chunk_bytes=8 << 20) == size


def test_what_is_expected_of_a_slow_volume_is_there_from_the_beginning_and_stays() -> None:
    volume = Volume(per_worker=100, at_most=1e9)
    volume.sizing.expect(10)
    assert volume.pass_seconds(0.1) >= 10
    assert volume.pass_seconds(120, reads=0) == 10
    volume.sizing.expect(100)
    assert volume.pass_seconds(1) == 16


def test_a_volume_that_was_found_to_answer_slowly_gets_workers_before_the_first_load(pools: Pools) -> None:
    pool = pools.make(workers=4, first=1)
    assert len(pool.processes) == 1
    pool.workers.round_trip_seconds = 1.0

    def is_larger() -> bool:
        pool.keep_busy()
        pool.collect()
        return pool.workers.counts().processes == 4

    wait_until(is_larger, "there are more")


def test_workers_that_are_added_and_not_wanted_any_more_come_and_go_without_losing_a_task(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [1]
    monkeypatch.setattr(PoolSize, "decide", lambda *_, **__: wanted[0])
    pool = pools.make(workers=3, first=1)
    pool.write(*range(16))
    assert len(pool.processes) == 1
    for round_, size in enumerate((3, 1, 2, 3)):
        wanted[0] = size
        for batch in range(4):
            pool.load(100 * round_ + 16 * batch, *range(16))

        def is_over(size: int = size, count: int = 64 * (round_ + 1)) -> bool:
            pool.keep_busy()
            pool.collect()
            return sum(task < 1000 for task in pool.ended) == count and pool.workers.counts().processes == size

        wait_until(is_over, f"there are {size} and all is loaded")
    assert all(type(done.outcome).__name__ in {"Hit", "Miss"} for done in pool.ended.values())
    assert is_alive(pool.processes[0])
