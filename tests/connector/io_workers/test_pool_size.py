# SPDX-License-Identifier: Apache-2.0
"""The number of workers follows the volume: few at first, more where it answers slowly."""

from __future__ import annotations

import os

import pytest
from pools import Pools, wait_until

from kvtier_connector.io_workers.pool import workers_for
from kvtier_connector.io_workers.supervisor import Supervisor


@pytest.mark.parametrize(
    ("round_trip_seconds", "size"), [(0.0, 2), (20e-6, 2), (0.0005, 3), (0.001, 4), (0.005, 11), (0.020, 38)]
)
def test_a_slow_answer_of_the_volume_asks_for_more_workers_than_processors(
    monkeypatch: pytest.MonkeyPatch, round_trip_seconds: float, size: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert workers_for(round_trip_seconds=round_trip_seconds, chunk_bytes=8 << 20) == size


def test_a_volume_that_was_found_to_answer_slowly_gets_workers_before_the_first_load(pools: Pools) -> None:
    pool = pools.make(workers=4, first=1)
    assert len(pool.processes) == 1
    pool.workers.round_trip_seconds = 1.0

    def is_larger() -> bool:
        pool.keep_busy()
        pool.collect()
        return pool.workers.counts().processes == 4

    wait_until(is_larger, "there are more")


@pytest.mark.parametrize(("wait_share", "is_growing"), [(0.1, True), (0.5, False)])
def test_workers_get_company_while_more_is_to_be_read_than_they_do_and_no_core_is_short(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, wait_share: float, is_growing: bool
) -> None:
    monkeypatch.setattr(Supervisor, "wait_share", lambda _: wait_share)
    pool = pools.make(workers=3, first=1, file_system="worker_fs:SlowFs")
    pool.write(*range(16))
    for batch in range(2):
        pool.load(16 * batch, *range(16))
    pool.wait_for(32)
    assert pool.workers.counts().processes == (3 if is_growing else 1)
    assert all(type(done.outcome).__name__ == "Hit" for done in pool.ended.values())
