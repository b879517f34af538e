# SPDX-License-Identifier: Apache-2.0
"""What workers move, and what becomes of a task when its worker hangs, dies or is too late."""

from __future__ import annotations

import fcntl
import math
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pools import (
    HIT,
    PATIENCE_SECONDS,
    ROW_BYTES,
    ROWS,
    Pools,
    PoolUnderTest,
    children,
    count_waited,
    is_waiting,
    key,
    payload,
    shut,
    wait_until,
)
from waiting import Clock, is_alive

from kvtier_connector.io_workers import pool as pool_module
from kvtier_connector.io_workers import supervisor as supervisor_module
from kvtier_connector.io_workers import worker as worker_module
from kvtier_connector.io_workers.pool import workers_for
from kvtier_connector.io_workers.reading_limit import FEWEST_READING
from kvtier_connector.io_workers.task_table import ENTRIES
from kvtier_connector.io_workers.tasks import Ending, Lane
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.health import CircuitState, Direction


def reading(
    pools: Pools, *blocks: int, task: int = 1, row: int = 0, file_system: str = "GatedFs"
) -> tuple[PoolUnderTest, Path]:
    """Return a pool whose only worker reads the first of some blocks until a file is removed, and this file."""
    gate = shut(pools)
    pool = pools.make(workers=1, file_system=f"worker_fs:{file_system}")
    pool.write(*blocks)
    pool.load(task, blocks[0], first_row=row)
    wait_until(lambda: is_waiting(pools), "the only worker reads")
    return pool, gate


def reading_with_few(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> tuple[PoolUnderTest, Path]:
    """Return a pool of six workers, where only as many read as at first; and a file. They wait until it is removed."""
    monkeypatch.setattr(pool_module, "_SLOW_SECONDS", math.inf)
    gate = shut(pools)
    pool = pools.make(workers=6, file_system="worker_fs:GatedFs")
    pool.write(*range(8))
    pool.load(0, *range(8))
    wait_until(lambda: pool.collect() or count_waited(pools) == FEWEST_READING, "workers read")
    return pool, gate


@pytest.mark.parametrize("compression", ["Off", "Always"])
@pytest.mark.parametrize("on_threads", [False, True])
def test_blocks_are_loaded_into_rows_and_saved_from_them(pools: Pools, on_threads: bool, compression: str) -> None:
    pool = pools.make(workers=2, on_threads=on_threads, compression=compression)
    # Threads see one of the two files of rows.
    count = 8 if on_threads else ROWS - 2
    pool.write(*range(count))
    pool.set_row(count + 1, payload(200))
    pool.load(0, *range(count), 99)
    pool.save(200, 200, row=count + 1)
    pool.wait_for(count + 2)
    assert [pool.row(number) for number in range(count)] == [payload(number) for number in range(count)]
    assert all(pool.outcome(index) == HIT for index in range(count))
    assert pool.outcome(count) == Miss()
    stored = pool.outcome(200)
    assert isinstance(stored, Stored)
    assert (stored.bytes_written < HIT.bytes_read) is (compression == "Always")
    pool.save(300, 200, row=count + 1)
    pool.load(301, 200, first_row=3)
    pool.wait_for(count + 4)
    assert pool.outcome(300) == Present()
    assert pool.outcome(301) == Hit(stored.bytes_written)
    assert pool.row(3) == payload(200)


def test_a_worker_without_a_task_enters_all_rows_into_its_page_table(pools: Pools) -> None:
    pages = re.compile(r"memfd:cpu-tier.*\n(?:.*\n)*?Rss: +(\d+) kB")
    maps = [Path(f"/proc/{process}/smaps") for process in pools.make(workers=2).processes]
    expected = 2 * ROWS * ROW_BYTES // 1024
    wait_until(lambda: sum(int(kib) for of in maps for kib in pages.findall(of.read_text())) == expected)


def test_more_tasks_than_a_lane_of_the_table_takes_all_end_once(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as limited:
        # Pipes that may not grow hold up no task either.
        limited.setattr(fcntl, "fcntl", lambda *_: os.close(-1))
        pool = pools.make(workers=2)
    pool.write(1)
    count = (ENTRIES // 4) // ROWS + 2
    for batch in range(count):
        pool.load(batch * ROWS, *[1] * ROWS, lane=Lane.PREFETCH)
    pool.wait_for(ROWS * count)
    assert all(done.outcome == HIT for done in pool.ended.values())


def test_loads_go_before_what_is_stored_and_prefetched_and_what_is_promoted_goes_with_them(pools: Pools) -> None:
    pool, gate = reading(pools, *range(20), task=0)
    order: list[int] = []
    pool.save(100, 100, row=10)
    pool.load(200, *range(1, 9), first_row=1, lane=Lane.PREFETCH)
    pool.load(300, *range(9, 11), first_row=11)
    pool.workers.promote([204, 205, 999])
    gate.unlink()
    wait_until(lambda: order.extend(done.task for done in pool.workers.collect()) or len(order) == 12, "all end")
    assert order == [0, 300, 301, 204, 205, 200, 201, 202, 203, 206, 207, 100]
    assert pool.row(5) == payload(5)


def test_a_load_does_not_wait_for_what_fills_the_table_with_stores(pools: Pools) -> None:
    pool, gate = reading(pools, 1, task=0)
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
    for process in pool.processes:
        os.kill(process, signal.SIGSTOP)
    pool.load(1, *[1] * 8, lane=Lane.PREFETCH)
    pool.cancel(*range(1, 9))
    endings = {done.outcome for done in pool.ended.values()}
    for process in pool.processes:
        os.kill(process, signal.SIGCONT)
    if pool.processes:
        assert endings == {Ending.CANCELLED}
    else:
        assert endings <= {Ending.CANCELLED, HIT}
    pool.load(10, 2, first_row=9)
    pool.wait_for(9)
    assert pool.row(9) == payload(2)
    if pool.processes:
        assert pool.row(0) == payload(7)


def test_a_late_read_never_lands_in_a_row_that_was_given_to_another_block(pools: Pools) -> None:
    pool, gate = reading(pools, 1, 2, row=5)
    pool.cancel(1)
    assert pool.outcome(1) is Ending.CANCELLED
    pool.set_row(5, payload(7))
    gate.unlink()
    # The only worker has ended the late read before it begins this one.
    pool.load(2, 2, first_row=6)
    pool.wait_for(2)
    assert pool.row(6) == payload(2)
    assert pool.row(5) == payload(7)


def test_a_prefetch_promoted_while_it_is_recalled_is_loaded_once(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # It holds its lock.
    pool, gate = reading(pools, 1, file_system="HoldingFs")
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
    # It holds its lock.
    pool, gate = reading(pools, 1, file_system="HoldingFs")
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
    assert pool.load_until_a_worker_hangs(lane) is Ending.LATE
    gate.unlink()
    assert pool.breaker.state(Direction.LOAD) is not CircuitState.CLOSED
    # A fault of the volume would open the circuit, too.
    assert {done.outcome for done in pool.ended.values()} <= {HIT, Ending.LATE}


class TurnstileFs(FileSystem):
    """Lets one read through each time that it is told to."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.turns.acquire()
        return super().preadv(fd, buffers, offset)


def test_what_waits_behind_a_volume_that_answers_is_not_late(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fs = Clock(100.0), TurnstileFs()
    for module in (pool_module, worker_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    pool = pools.make(workers=1, stuck_seconds=1.5, fs=fs)
    pool.write(1)
    pool.load(0, *[1] * 8)
    # Each read takes a second, and all of them longer than the bound.
    for count in range(1, 9):
        clock.seconds += 1.0
        pool.collect()
        fs.turns.release()
        pool.wait_for(count)
    assert {done.outcome for done in pool.ended.values()} == {HIT}
    assert pool.breaker.state(Direction.LOAD) is CircuitState.CLOSED


def test_what_waits_in_line_is_late_when_no_worker_gets_on_and_they_are_replaced(pools: Pools) -> None:
    pool = pools.make(workers=2)
    pool.write(1)
    # It closes again at once: a busy machine may let a worker hang in a later read.
    pool.breaker.admit = lambda _: True  # type: ignore[method-assign]  # of this breaker
    pool.load(0, 1)
    pool.wait_for(1)
    for process in pool.processes:
        os.kill(process, signal.SIGSTOP)
    pool.workers._settings = replace(pool.workers._settings, deadline_seconds=1.0)
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
    pool.breaker._now = Clock()
    pool.breaker.record_timeout(Direction.LOAD)
    pool.load(0, *range(4))
    pool.wait_for(4)
    assert {done.outcome for done in pool.ended.values()} == {("breaker",)}


def test_closing_ends_idle_and_hanging_workers_and_every_task(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "_KILLED_SECONDS", PATIENCE_SECONDS)
    idle, (hanging, _) = pools.make(workers=2), reading(pools, 1)
    assert idle.workers.close(PATIENCE_SECONDS)
    assert hanging.workers.close(0.2)
    assert not any(is_alive(process) for process in (*idle.processes, *hanging.processes))
    hanging.collect()
    assert hanging.outcome(1) is Ending.CANCELLED
    hanging.workers.cancel([1])
    hanging.workers.promote([1])
    hanging.load(2, 1)
    hanging.collect()
    assert hanging.outcome(2) == ("closed",)


@pytest.mark.parametrize(
    ("round_trip_seconds", "size"), [(0.0, 2), (20e-6, 2), (0.0005, 3), (0.001, 4), (0.005, 11), (0.020, 38)]
)
def test_slow_answers_ask_for_workers(monkeypatch: pytest.MonkeyPatch, round_trip_seconds: float, size: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert workers_for(round_trip_seconds=round_trip_seconds, chunk_bytes=8 << 20) == size


def test_a_volume_that_was_found_to_answer_slowly_gets_workers_before_the_first_load(pools: Pools) -> None:
    pool = pools.make(workers=4, first=1)
    assert len(pool.processes) == 1
    pool.workers.round_trip_seconds = 1.0
    wait_until(lambda: pool.step() or pool.workers.counts().processes == 4, "there are more")


def test_workers_get_company_while_more_is_to_be_read_than_they_do_and_all_of_them_are_needed(pools: Pools) -> None:
    pool = pools.make(workers=3, first=1, file_system="worker_fs:SlowFs")
    pool.write(*range(16))
    # A worker that starts late leaves the first ones to the others.
    for batch in range(100):
        if pool.workers.counts().processes < 3:
            pool.load(16 * batch, *range(16))
            pool.wait_for(16 * batch + 16)
    assert pool.workers.counts().processes == 3
    assert all(type(done.outcome).__name__ == "Hit" for done in pool.ended.values())


def test_a_row_that_is_given_to_another_block_while_it_is_written_is_stored_under_neither_name(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, max_bytes=2 * (ROW_BYTES + HEADER_BYTES), file_system="worker_fs:GatedWritesFs")
    pool.set_row(9, payload(9))
    pool.save(1, 9, row=9)
    wait_until(lambda: is_waiting(pools), "the header is written")
    pool.cancel(1)
    pool.set_row(9, payload(3))
    gate.unlink()
    pool.save(2, 8, row=9)
    pool.wait_for(2)
    assert pool.outcome(1) is Ending.CANCELLED
    assert pool.blocks.look_up(key(9)) is False
    assert pool.blocks.get(key(8), memoryview(bytearray(ROW_BYTES))) == HIT
    assert not list((pools.directory / "volume").rglob("*partial*"))


def test_a_load_finds_a_worker_that_is_free_while_the_volume_holds_up_all_that_store(pools: Pools) -> None:
    pool = pools.make(workers=4, file_system="worker_fs:GatedWritesFs")
    pool.write(1)
    gate = shut(pools)
    for number in range(10, 20):
        pool.save(number, number, row=number)
    wait_until(lambda: pool.collect() or count_waited(pools) == 3, "three of four workers store")
    pool.load(1, 1)
    pool.wait_for(1)
    assert pool.outcome(1) == HIT
    assert count_waited(pools) == 3
    gate.unlink()
    pool.wait_for(11)


def test_no_more_workers_read_than_the_volume_needs_unless_some_of_them_take_long(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, gate = reading_with_few(pools, monkeypatch)
    pool.save(8, 100, row=8)
    wait_until(lambda: pool.collect() or 8 in pool.ended, "another stores meanwhile")
    assert count_waited(pools) == FEWEST_READING
    monkeypatch.setattr(pool_module, "_SLOW_SECONDS", 0.0)
    wait_until(lambda: pool.collect() or count_waited(pools) == 6, "all workers read")
    gate.unlink()
    pool.wait_for(9)


def test_a_worker_that_may_do_nothing_ends_with_the_others(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, gate = reading_with_few(pools, monkeypatch)
    pool.set_row(8, payload(100))
    pool.save(8, 100, row=8)
    wait_until(lambda: bool(pool.blocks.look_up(key(100))), "the only worker that may store has stored")
    gate.unlink()
    assert pool.workers.close(PATIENCE_SECONDS)


def test_the_limit_of_the_tier_holds_for_what_workers_write(pools: Pools) -> None:
    pool = pools.make(max_bytes=5 * (ROW_BYTES + HEADER_BYTES))
    for task in range(9):
        pool.save(task, task, row=task)
    pool.wait_for(9)
    outcomes = [done.outcome for done in pool.ended.values()]
    assert outcomes.count(StoreFault.NO_BUDGET) == 4
    assert outcomes.count(Stored(ROW_BYTES + HEADER_BYTES)) == 5
    # A store that is cancelled gives its room back.
    cancelled = pools.make(workers=1, max_bytes=2 * (ROW_BYTES + HEADER_BYTES))
    os.kill(cancelled.processes[0], signal.SIGSTOP)
    cancelled.save(0, 100, row=0)
    cancelled.save(1, 101, row=1)
    assert cancelled.permit.reserve(ROW_BYTES) is StoreFault.NO_BUDGET
    cancelled.cancel(0, 1)
    assert cancelled.permit.reserve(2 * (ROW_BYTES + HEADER_BYTES)) is None
    os.kill(cancelled.processes[0], signal.SIGCONT)
