# SPDX-License-Identifier: Apache-2.0
"""What becomes of tasks when workers die, and when they cannot be started."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from pools import ROW_BYTES, ROWS, Pools, PoolUnderTest, payload, shut, wait_until

from kvtier_connector.io_workers.pool import NO_WORKERS
from kvtier_connector.io_workers.tasks import Ending, Lane
from kvtier_connector.store.blockstore import Hit, StoreFault
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.health import CircuitState, Direction

HIT = Hit(HEADER_BYTES + ROW_BYTES)


def test_a_worker_killed_in_the_middle_of_a_read_costs_that_block_and_no_other(pools: Pools) -> None:
    pool = pools.make(workers=2, file_system="worker_fs:DyingFs")
    pool.write(*range(20))
    shut(pools)

    pool.load(0, *range(20))
    pool.wait_for(20)

    failed = [index for index in range(20) if pool.outcome(index) is Fault.IO]
    assert len(failed) == 1
    assert all(pool.row(index) == payload(index) for index in range(20) if index not in failed)


def test_a_worker_killed_before_it_says_what_it_took_costs_no_block(pools: Pools) -> None:
    pool = pools.make(workers=1, file_system="worker_fs:DyingWithATaskFs")
    pool.write(*range(8))
    gate = shut(pools)
    pool.load(0, *range(8))
    pool.wait_for(8)

    assert not gate.exists()
    assert [pool.outcome(task) for task in range(8)] == [HIT] * 8


def test_workers_killed_from_outside_lose_no_queued_task(pools: Pools) -> None:
    pool = pools.make(workers=2)
    pool.write(*range(ROWS))
    for process in pool.processes:
        os.kill(process, signal.SIGSTOP)
    pool.load(0, *range(ROWS))
    pool.save(77, 77, row=0)
    for process in pool.processes:
        os.kill(process, signal.SIGKILL)

    pool.wait_for(ROWS + 1)
    lost = [done for done in pool.ended.values() if isinstance(done.outcome, Fault | StoreFault)]
    assert len(lost) <= len(pool.processes)
    assert pool.has_processes


def test_workers_that_die_again_and_again_are_given_up_and_every_task_is_refused(pools: Pools) -> None:
    pool = pools.make(workers=1, file_system="worker_fs:AlwaysDyingFs")
    pool.write(1)
    pool.load(0, *[1] * 16)
    pool.wait_for(16)

    assert not pool.has_processes
    # Each death costs the block in hand, and says nothing against the volume.
    assert {pool.ended[task].outcome for task in range(16)} == {Fault.IO, NO_WORKERS}
    assert pool.breaker.view(Direction.LOAD).state is CircuitState.CLOSED
    assert all(pool.workers.is_stuck(lane) for lane in Lane)
    pool.load(20, 1)
    pool.collect()
    assert pool.outcome(20) == NO_WORKERS


def step_until(pool: PoolUnderTest, has_processes: bool) -> None:
    def is_reached() -> bool:
        # Only a pool with something to do is looked after at once.
        pool.keep_busy()
        pool.collect()
        return pool.has_processes == has_processes

    wait_until(is_reached, f"there are {'' if has_processes else 'no '}processes")


def test_workers_that_were_given_up_are_tried_again_until_they_work_and_it_is_said_once(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:DyingWhileShutFs", retry_seconds=0.02)
    pool.write(1)
    assert pool.has_processes
    for attempt in range(3):
        pool.load(100 * attempt, *[1] * 16)
        step_until(pool, has_processes=False)
        step_until(pool, has_processes=True)
    gate.unlink()

    wait_until(lambda: pool.collect() or sum(task < 1000 for task in pool.ended) == 48, "all have ended")
    pool.load(900, 1, first_row=3)
    wait_until(lambda: pool.collect() or 900 in pool.ended, "the block is loaded")

    assert pool.row(3) == payload(1)
    assert pool.has_processes
    # After a new start, a single death is enough to give up.
    for attempt in (1, 2):
        faults = [task for task in range(100 * attempt, 100 * attempt + 16) if pool.outcome(task) is Fault.IO]
        assert len(faults) <= 1
    assert [record.levelname for record in caplog.records if "given up" in record.message] == ["ERROR"]


def test_workers_that_die_before_they_are_ready_cost_no_block_when_they_are_tried_again(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    started: list[object] = []

    def start_nothing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(command)
        return popen([sys.executable, "-S", "-c", "pass"], **options)

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", start_nothing)
        pool = pools.make(workers=2, retry_seconds=0.01)
        step_until(pool, has_processes=False)
        before = len(started)
        seen: set[bool] = set()

        def are_tried() -> bool:
            step_until(pool, has_processes=False)
            seen.add(pool.has_processes)
            return len(started) >= before + 6

        wait_until(are_tried, "they are tried again and again")
        assert seen == {False}
    step_until(pool, has_processes=True)
    pool.write(1)
    pool.load(1, 1)
    wait_until(lambda: pool.collect() or 1 in pool.ended, "the block is loaded")
    assert pool.row(0) == payload(1)


def test_only_a_worker_that_hung_says_something_of_the_volume(pools: Pools) -> None:
    gate = shut(pools)
    dying = pools.make(workers=1, file_system="worker_fs:DyingFs")
    dying.write(1)
    for task in range(5):
        gate.touch()
        dying.load(task, 1)
        dying.wait_for(task + 1)
    assert {done.outcome for done in dying.ended.values()} == {Fault.IO}
    assert dying.breaker.view(Direction.LOAD).state is CircuitState.CLOSED

    gate.touch()
    hanging = pools.make(workers=1, stuck_seconds=0.2, file_system="worker_fs:GatedFs")
    hanging.load(1, 1)
    hanging.wait_for(1)
    gate.unlink()
    assert hanging.outcome(1) is Ending.LATE
    assert hanging.breaker.view(Direction.LOAD).state is not CircuitState.CLOSED


def test_workers_that_hang_and_are_killed_are_never_given_up(pools: Pools) -> None:
    shut(pools)
    pool = pools.make(workers=1, stuck_seconds=0.01, file_system="worker_fs:GatedFs")
    pool.write(1)
    for task in range(12):
        wait_until(lambda: pool.collect() or not pool.workers.is_stuck(Lane.LOAD), "a worker lives")
        pool.load(task, 1)
        pool.wait_for(task + 1)
    assert pool.has_processes


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_an_engine_that_can_start_no_process_refuses_all_tasks_until_it_can(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        pool = pools.make(workers=2, retry_seconds=0.01)
        assert not pool.has_processes
        pool.write(1)
        pool.load(0, 1)
        pool.save(1, 2, row=0)
        pool.collect()
        assert {pool.outcome(0), pool.outcome(1)} == {NO_WORKERS}
        assert "serves without its disk tier" in caplog.text
    step_until(pool, has_processes=True)
    pool.load(2, 1)
    wait_until(lambda: pool.collect() or 2 in pool.ended, "the block is loaded")
    assert pool.row(0) == payload(1)
    assert pool.workers.counts().processes == 2


def test_a_host_without_room_for_another_process_leaves_the_work_to_those_that_run(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pools.make(workers=2, retry_seconds=0.01)
    pool.write(1)
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        os.kill(pool.processes[0], signal.SIGKILL)
        wait_until(lambda: pool.collect() or pool.workers.counts().processes == 1, "the dead one is gone")
        pool.load(1, 1)
        wait_until(lambda: pool.collect() or 1 in pool.ended, "the block is loaded")
        assert pool.row(0) == payload(1)
    wait_until(lambda: pool.collect() or pool.workers.counts().processes == 2, "both run again")
