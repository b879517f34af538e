# SPDX-License-Identifier: Apache-2.0
"""What workers move, and what becomes of a task when its worker hangs, dies or is too late."""

from __future__ import annotations

import fcntl
import os
import signal

import pytest
from pools import (
    PATIENCE_SECONDS,
    ROW_BYTES,
    ROWS,
    Pools,
    PoolUnderTest,
    children,
    count_waited,
    is_alive,
    is_waiting,
    payload,
    shut,
    wait_until,
)

from kvtier_connector.io_workers import pool as pool_module
from kvtier_connector.io_workers.task_table import ENTRIES
from kvtier_connector.io_workers.tasks import Ending, Lane
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.health import CircuitState, Direction

HIT = Hit(HEADER_BYTES + ROW_BYTES)


@pytest.mark.parametrize("on_threads", [False, True])
def test_blocks_are_loaded_into_their_rows_and_saved_from_them(pools: Pools, on_threads: bool) -> None:
    pool = pools.make(workers=2, on_threads=on_threads)
    pool.write(*range(8))
    pool.set_row(14, payload(20))

    pool.load(0, *range(8), 99, first_row=4)
    pool.save(20, 20, row=14)
    pool.wait_for(10)

    assert [pool.row(4 + number) for number in range(8)] == [payload(number) for number in range(8)]
    assert all(pool.outcome(index) == HIT for index in range(8))
    assert pool.outcome(8) == Miss()
    assert pool.outcome(20) == Stored(HEADER_BYTES + ROW_BYTES)
    pool.save(30, 20, row=14)
    pool.load(31, 20, first_row=15)
    pool.wait_for(12)
    assert pool.outcome(30) == Present()
    assert pool.row(15) == payload(20)


@pytest.mark.parametrize("on_threads", [False, True])
def test_workers_compress_what_they_save_and_put_it_back_into_the_row(pools: Pools, on_threads: bool) -> None:
    pool = pools.make(workers=2, on_threads=on_threads, compression="Always")
    pool.set_row(3, payload(1))
    pool.save(1, 1, row=3)
    pool.wait_for(1)
    pool.load(2, 1, first_row=9)
    pool.wait_for(2)

    stored = pool.outcome(1)
    assert isinstance(stored, Stored)
    assert stored.bytes_written < HEADER_BYTES + ROW_BYTES
    assert pool.outcome(2) == Hit(stored.bytes_written)
    assert pool.row(9) == payload(1)


def test_rows_of_a_second_file_are_reached_as_those_of_the_first(pools: Pools) -> None:
    pool = pools.make()
    pool.write(*range(ROWS))
    pool.load(0, *range(ROWS))
    pool.wait_for(ROWS)
    assert [pool.row(row) for row in range(ROWS)] == [payload(row) for row in range(ROWS)]


def test_a_damaged_block_is_a_fault_and_is_moved_out_of_the_way(pools: Pools) -> None:
    pool = pools.make(workers=1)
    pool.write(1)
    (path,) = (pools.directory / "volume" / "blocks").rglob("*.kvb")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    pool.load(1, 1)
    pool.wait_for(1)

    assert pool.outcome(1) is Fault.CHECKSUM
    assert not path.exists()


def test_more_tasks_than_the_table_takes_of_one_lane_all_end_once(pools: Pools) -> None:
    pool = pools.make(workers=2)
    pool.write(1)
    count = (ENTRIES // 4) // ROWS + 2
    for batch in range(count):
        pool.load(batch * ROWS, *[1] * ROWS, lane=Lane.PREFETCH)
    pool.wait_for(ROWS * count)

    assert all(done.outcome == HIT for done in pool.ended.values())


def test_pipes_that_may_not_grow_hold_up_no_task(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limited:
        limited.setattr(fcntl, "fcntl", lambda *_: os.close(-1))
        pool = pools.make(workers=2)
    pool.write(1)
    for batch in range(20):
        pool.load(batch * ROWS, *[1] * ROWS)
    pool.wait_for(20 * ROWS)

    assert all(done.outcome == HIT for done in pool.ended.values())


def test_loads_go_before_what_is_stored_and_prefetched_and_what_is_promoted_goes_with_them(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:GatedFs")
    pool.write(*range(20))
    order: list[int] = []
    pool.load(0, 0)
    wait_until(lambda: is_waiting(pools), "the only worker reads")
    pool.save(100, 100, row=10)
    pool.load(200, *range(1, 9), first_row=1, lane=Lane.PREFETCH)
    pool.load(300, *range(9, 11), first_row=11)
    pool.workers.promote([204, 205, 999])
    gate.unlink()

    def is_over() -> bool:
        order.extend(done.task for done in pool.workers.collect())
        return len(order) == 12

    wait_until(is_over, "all have ended")
    assert order == [0, 300, 301, 204, 205, 200, 201, 202, 203, 206, 207, 100]
    assert pool.row(5) == payload(5)


def test_a_load_does_not_wait_for_what_fills_the_table_with_stores(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:GatedFs")
    pool.write(1)
    pool.load(0, 1)
    wait_until(lambda: is_waiting(pools), "the only worker reads")
    stores = ENTRIES // 8 + 40
    for number in range(stores):
        pool.save(1000 + number, 1000 + number % 7, row=9)
    pool.load(1, 1, first_row=1)
    gate.unlink()
    pool.wait_for(stores + 2)
    # In the order in which they ended, whenever that was looked at.
    assert list(pool.ended).index(1) <= 8


@pytest.mark.parametrize("on_threads", [False, True])
def test_a_cancelled_task_that_nobody_began_ends_as_withdrawn(pools: Pools, on_threads: bool) -> None:
    pool = pools.make(workers=2, on_threads=on_threads)
    pool.write(1, 2)
    pool.set_row(0, payload(7))
    if pool.processes:
        os.kill(pool.processes[0], signal.SIGSTOP)
    pool.load(1, *[1] * 8, lane=Lane.PREFETCH)
    pool.cancel(*range(1, 9))
    endings = {done.outcome for done in pool.ended.values()}
    if pool.processes:
        assert endings == {Ending.CANCELLED}
        os.kill(pool.processes[0], signal.SIGCONT)
    else:
        assert endings <= {Ending.CANCELLED, HIT}
    pool.load(10, 2, first_row=9)
    pool.wait_for(9)
    assert pool.row(9) == payload(2)
    if pool.processes:
        assert pool.row(0) == payload(7)


def test_a_late_read_never_lands_in_a_row_that_was_given_to_another_block(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:GatedFs")
    pool.write(1, 2)
    pool.load(1, 1, first_row=5)
    wait_until(lambda: is_waiting(pools), "the read hangs")

    pool.cancel(1)
    assert pool.outcome(1) is Ending.CANCELLED
    pool.set_row(5, payload(7))
    gate.unlink()
    # The only worker has ended the late read before it begins this one.
    pool.load(2, 2, first_row=6)
    pool.wait_for(2)

    assert pool.row(6) == payload(2)
    assert pool.row(5) == payload(7)


def test_a_prefetch_that_is_promoted_while_it_is_recalled_is_loaded_once(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_LOCK_SECONDS", PATIENCE_SECONDS)
    pool = pools.make(workers=2, file_system="worker_fs:HoldingFs")
    pool.write(1, 2, 3)
    gate = shut(pools)
    pool.load(1, 1, 2)
    wait_until(lambda: count_waited(pools) == 2, "both workers hold their locks")
    pool.load(3, 3, first_row=3, lane=Lane.PREFETCH)
    holding, dying = pool.processes
    os.kill(dying, signal.SIGKILL)

    def next_worker() -> int | None:
        pool.collect()
        return next((each for each in children(os.getpid()) if each not in {holding, dying}), None)

    wait_until(lambda: next_worker() is not None, "the dead worker is replaced; the first one holds its lock")
    pool.workers.promote([3])
    gate.unlink()
    pool.wait_for(3)
    pool.set_row(3, payload(4))
    pool.load(4, 1, 2, 3)
    pool.wait_for(6)
    assert pool.row(3) == payload(4), "its row was given to another block"


def test_a_task_does_not_end_while_its_row_is_being_copied(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:HoldingFs")
    pool.write(1)
    pool.load(1, 1)
    wait_until(lambda: is_waiting(pools), "the worker holds its lock")

    pool.workers.cancel([1])
    pool.collect()
    assert not pool.ended
    gate.unlink()
    pool.wait_for(1)
    pool.set_row(0, payload(4))
    pool.load(2, 1, first_row=1)
    pool.wait_for(2)
    assert pool.row(0) == payload(4)


def test_a_worker_that_never_ends_its_copy_is_killed_and_then_the_row_is_free(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:HoldingFs")
    pool.write(1)
    pool.load(1, 1)
    wait_until(lambda: is_waiting(pools), "the worker holds its lock")

    pool.cancel(1)
    assert pool.outcome(1) is Ending.CANCELLED
    wait_until(lambda: not is_alive(pool.processes[0]), "the worker is dead")
    gate.unlink()
    pool.load(2, 1)
    pool.wait_for(2)
    assert pool.row(0) == payload(1)


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.PREFETCH])
def test_a_worker_that_hangs_is_killed_and_replaced_and_its_task_is_late(pools: Pools, lane: Lane) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, stuck_seconds=0.2, file_system="worker_fs:GatedFs")
    pool.write(1)
    pool.load(1, 1, lane=lane)
    seen: list[bool] = []

    def has_ended() -> bool:
        pool.collect()
        seen.append(pool.workers.is_stuck(lane))
        return bool(pool.ended) and any(seen)

    wait_until(has_ended, "the worker is given up")
    gate.unlink()
    assert pool.outcome(1) is Ending.LATE
    assert pool.breaker.view(Direction.LOAD).cause == "timeout"


def test_what_waits_in_line_behind_a_volume_that_answers_is_not_late(pools: Pools) -> None:
    # Each read takes 0.1 s, and now and then half a second on a busy host; all of them take longer than the bound.
    pool = pools.make(workers=1, stuck_seconds=1.5, file_system="worker_fs:SlowFs")
    pool.write(1)
    pool.load(0, *[1] * 20)
    pool.wait_for(20)
    assert {done.outcome for done in pool.ended.values()} == {HIT}
    assert pool.breaker.view(Direction.LOAD).state is CircuitState.CLOSED


def test_what_waits_in_line_is_late_when_no_worker_gets_on_and_they_are_replaced(pools: Pools) -> None:
    pool = pools.make(workers=2, stuck_seconds=1.0)
    pool.write(1)
    pool.load(0, 1)
    pool.wait_for(1)
    for process in pool.processes:
        os.kill(process, signal.SIGSTOP)
    pool.load(1, *[1] * 8, first_row=1)
    pool.wait_for(9)
    assert {pool.outcome(task) for task in range(1, 9)} == {Ending.LATE}
    wait_until(lambda: pool.collect() or not any(is_alive(process) for process in pool.processes), "they are dead")

    def is_loaded() -> bool:
        task = max(pool.ended) + 1
        pool.load(task, 1)
        pool.wait_for(task + 1)
        return pool.outcome(task) == HIT

    wait_until(is_loaded, "others load")


def test_a_breaker_that_opens_refuses_what_waits_in_line(pools: Pools) -> None:
    pool = pools.make()
    pool.breaker.record_timeout(Direction.LOAD)
    pool.load(0, *range(4))
    pool.wait_for(4)
    assert {done.outcome for done in pool.ended.values()} == {("breaker",)}


def test_closing_ends_idle_workers_and_those_that_hang_and_every_task(pools: Pools) -> None:
    shut(pools)
    idle: PoolUnderTest = pools.make(workers=2)
    hanging = pools.make(workers=1, file_system="worker_fs:GatedFs")
    hanging.write(1)
    hanging.load(1, 1)
    wait_until(lambda: is_waiting(pools), "the read hangs")

    assert idle.workers.close(20.0)
    assert hanging.workers.close(0.2)
    assert not any(is_alive(process) for process in (*idle.processes, *hanging.processes))
    hanging.collect()
    assert hanging.outcome(1) is Ending.CANCELLED
    hanging.workers.cancel([1])
    hanging.workers.promote([1])
    hanging.load(2, 1)
    hanging.collect()
    assert hanging.outcome(2) == ("closed",)
