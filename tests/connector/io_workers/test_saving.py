# SPDX-License-Identifier: Apache-2.0
"""What workers store: the bytes of its own block or none, within the limit, and never with all of their number."""

from __future__ import annotations

import os
import signal

import pytest
from pools import PATIENCE_SECONDS, ROW_BYTES, Pools, count_waited, is_waiting, key, payload, shut, wait_until

from kvtier_connector.io_workers import pool as pool_module
from kvtier_connector.io_workers.buffers import OwnRows
from kvtier_connector.io_workers.supervisor import WorkerThread
from kvtier_connector.io_workers.task_table import NO_TICKET, MessagePipe, TaskTable, create_table
from kvtier_connector.io_workers.tasks import (
    REPLY,
    TASK_BYTES,
    Ending,
    Lane,
    Task,
    TaskMessage,
    decode_answer,
    encode_task,
)
from kvtier_connector.io_workers.worker import PoolSettings, Worker, WorkerSettings
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored, StoreFault
from kvtier_connector.store.header import HEADER_BYTES

HIT = Hit(HEADER_BYTES + ROW_BYTES)


def test_a_late_save_never_stores_the_bytes_of_another_block(pools: Pools) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:GatedFs")
    pool.write(1)
    pool.set_row(9, payload(9))
    pool.load(1, 1)
    wait_until(lambda: is_waiting(pools), "the read hangs")
    pool.save(2, 9, row=9)

    pool.cancel(2)
    pool.set_row(9, payload(3))
    gate.unlink()
    pool.wait_for(2)
    pool.save(3, 8, row=9)
    pool.wait_for(3)

    assert pool.blocks.look_up(key(9)) is False
    assert pool.blocks.look_up(key(8)) is True


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


def test_a_row_that_is_given_to_another_block_before_it_is_copied_is_not_stored(pools: Pools) -> None:
    table_fd = create_table()
    table = TaskTable(table_fd, threads=1)
    table.storing = 1
    pipes, replies = [MessagePipe(TASK_BYTES) for _ in Lane], MessagePipe(REPLY.size)

    class GivenAway(OwnRows):
        def address(self, row: int) -> int:
            table.set_ticket(5, NO_TICKET)
            return super().address(row)

    store = BlockStore(pools.directory / "volume")
    memory = bytearray(payload(3))
    rows = GivenAway(memoryview(memory).cast("B", (1, ROW_BYTES)))
    settings = WorkerSettings(
        worker=0,
        parent=os.getpid(),
        table=table_fd,
        regions=(),
        row_bytes=ROW_BYTES,
        pipes=tuple(pipe.reader for pipe in pipes),
        replies=replies.writer,
        pool=PoolSettings(root=str(pools.directory / "volume"), workers=1, deadline_seconds=60.0),
    )
    worker = WorkerThread(Worker(settings, table=table, rows=rows, store=store).run)
    table.set_ticket(5, 77)
    pipes[Lane.STORE].send([encode_task(TaskMessage(5, 77, Task(Lane.STORE, key(9), 0)))])
    answers: list[tuple[int, ...]] = []
    wait_until(lambda: answers.extend(REPLY.iter_unpack(replies.receive())) or answers, "the worker answers")
    for pipe in pipes:
        os.close(pipe.writer)
    worker.wait(PATIENCE_SECONDS)
    for pipe in pipes:
        os.close(pipe.reader)
    replies.close()
    table.close()
    os.close(table_fd)

    ((ticket, code, _, number),) = answers
    assert (ticket, decode_answer(code, number)) == (77, None)
    assert store.look_up(key(9)) is False


def test_a_load_finds_a_worker_that_is_free_while_the_volume_holds_up_all_that_store(pools: Pools) -> None:
    pool = pools.make(workers=4, file_system="worker_fs:GatedWritesFs")
    pool.write(1)
    gate = shut(pools)
    for number in range(10, 20):
        pool.save(number, number, row=number)

    def is_held_up() -> bool:
        pool.collect()
        return count_waited(pools) == 3

    wait_until(is_held_up, "three of four workers store")
    pool.load(1, 1)
    pool.wait_for(1)
    assert pool.outcome(1) == HIT
    assert count_waited(pools) == 3
    gate.unlink()
    pool.wait_for(11)


def test_all_workers_may_store_again_once_the_only_store_is_cancelled(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[TaskTable] = []

    class Noted(TaskTable):
        def __init__(self, fd: int, *, threads: int = 0) -> None:
            super().__init__(fd, threads=threads)
            tables.append(self)

    monkeypatch.setattr(pool_module, "TaskTable", Noted)
    pool = pools.make(workers=4)
    for process in pool.processes:
        os.kill(process, signal.SIGSTOP)
    pool.save(1, 1, row=1)
    assert tables[0].storing == 3
    pool.cancel(1)
    # A worker that may not store asks again and again whether it may.
    assert tables[0].storing == 4
    for process in pool.processes:
        os.kill(process, signal.SIGCONT)


def test_the_limit_of_the_tier_holds_for_what_workers_write(pools: Pools) -> None:
    pool = pools.make(max_bytes=5 * (ROW_BYTES + HEADER_BYTES))
    for task in range(9):
        pool.save(task, task, row=task)
    pool.wait_for(9)

    outcomes = [done.outcome for done in pool.ended.values()]
    assert outcomes.count(StoreFault.NO_BUDGET) == 4
    assert outcomes.count(Stored(ROW_BYTES + HEADER_BYTES)) == 5


def test_a_store_that_is_cancelled_gives_its_room_back(pools: Pools) -> None:
    pool = pools.make(workers=1, max_bytes=2 * (ROW_BYTES + HEADER_BYTES))
    os.kill(pool.processes[0], signal.SIGSTOP)
    pool.save(0, 0, row=0)
    pool.save(1, 1, row=1)
    assert pool.permit.reserve(ROW_BYTES) is StoreFault.NO_BUDGET
    pool.cancel(0, 1)
    assert pool.permit.reserve(2 * (ROW_BYTES + HEADER_BYTES)) is None
    os.kill(pool.processes[0], signal.SIGCONT)
