# SPDX-License-Identifier: Apache-2.0
"""The pieces that workers are made of: the table, the encoding of tasks, and the rows as a worker reaches them."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from kvtier_connector.contract.engine import MOST_IO_PROCESSES, MOST_MAPPED_BYTES, worker_memory_bytes
from kvtier_connector.io_workers import buffers as rows_module
from kvtier_connector.io_workers.buffers import MappedRows, OwnRows, Region
from kvtier_connector.io_workers.task_table import ENTRIES, Current, TaskTable, create_table
from kvtier_connector.io_workers.tasks import (
    TASK_BYTES,
    Answer,
    Lane,
    Task,
    TaskMessage,
    decode_answer,
    decode_task,
    encode_answer,
    encode_task,
)
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import BlockKey, Lineage

_BUSY_WORKER = """
import sys, time
from kvtier_connector.io_workers.task_table import NO_TICKET, TaskTable, Current
table, number = TaskTable(int(sys.argv[1])), 0
while True:
    number += 1
    table.set_current(0, Current(number % 1000 + 1, time.monotonic()))
    table.set_current(0, Current(NO_TICKET, time.monotonic()))
"""
HASHES = st.binary(min_size=3, max_size=32)


KEYS = st.builds(BlockKey, HASHES, st.integers(0, 2**32 - 1), st.from_regex(r"[a-z0-9]{0,32}", fullmatch=True))


@given(
    lane=st.sampled_from(Lane),
    key=KEYS,
    row=st.integers(0, 2**40),
    lineage=st.builds(Lineage, HASHES, st.integers(0, 2**32 - 1)),
    active_key=st.text("abc-", max_size=64),
)
def test_a_task_is_read_back_as_it_was_written(
    lane: Lane, key: BlockKey, row: int, lineage: Lineage, active_key: str
) -> None:
    message = TaskMessage(ENTRIES - 1, 2**32 - 1, Task(lane, key, row, lineage), active_key)
    assert decode_task(encode_task(message)) == message


def test_the_longest_task_fits_a_message_and_no_longer_one_is_sent() -> None:
    longest = Task(Lane.STORE, BlockKey(bytes(32), 2**32 - 1, "x" * 32), 2**40, Lineage(bytes(32), 2**31 - 1, "a" * 32))
    assert len(encode_task(TaskMessage(ENTRIES - 1, 2**32 - 1, longest, "k" * 64))) == TASK_BYTES
    with pytest.raises(ValueError, match="does not fit"):
        encode_task(TaskMessage(0, 1, longest, "k" * TASK_BYTES))


@pytest.mark.parametrize("answer", [None, Hit(123), Miss(), Stored(2**40), Present(), *Fault, *StoreFault])
def test_an_answer_is_read_back_as_it_was_written(answer: Answer | None) -> None:
    assert decode_answer(*encode_answer(answer)) == answer


def test_both_sides_of_a_table_see_the_same() -> None:
    fd = create_table()
    engine, worker = TaskTable(fd), TaskTable(fd)
    last = ENTRIES - 1
    engine.set_ticket(last, 2**32 - 1)
    engine.storing = 2
    worker.set_current(MOST_IO_PROCESSES - 1, Current(7, 1.5))

    assert worker.ticket(last) == 2**32 - 1
    assert worker.ticket(last - 1) == 0
    assert worker.storing == 2
    assert engine.current(MOST_IO_PROCESSES - 1) == Current(7, 1.5)
    for table in (engine, worker):
        table.close()
    os.close(fd)


def test_a_lock_held_by_another_process_is_seen_and_ends_with_that_process() -> None:
    fd = create_table()
    table = TaskTable(fd)
    told, tells = os.pipe()
    ends, end = os.pipe()
    process = os.fork()
    if process == 0:
        # Never back into the test.
        try:
            table.lock(3)
            os.write(tells, b"x")
            os.close(end)
            os.read(ends, 1)
            os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    os.read(told, 1)
    assert not table.is_unlocked(3)
    assert table.is_unlocked(2)
    os.close(end)
    os.waitpid(process, 0)
    assert table.is_unlocked(3)
    table.close()
    for descriptor in (fd, told, tells, ends):
        os.close(descriptor)


def test_a_lock_held_by_a_thread_of_the_same_process_is_seen() -> None:
    fd = create_table()
    table = TaskTable(fd, threads=2)
    table.lock(1)
    assert not table.is_unlocked(1)
    assert table.is_unlocked(0)
    table.unlock(1)
    assert table.is_unlocked(1)
    table.close()
    os.close(fd)


ROW = 3 * 1024


def test_each_row_of_several_files_is_found_whatever_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of windows of two rows, two are mapped at a time.
    monkeypatch.setattr(rows_module, "_WINDOW_BYTES", 2 * ROW)
    fds = [os.memfd_create("rows") for _ in range(2)]
    for number, fd in enumerate(fds):
        os.ftruncate(fd, 5 * ROW)
        for row in range(5):
            os.pwrite(fd, bytes([10 * number + row]) * ROW, row * ROW)
    rows = MappedRows([Region(fd, 5 * number, 5) for number, fd in enumerate(fds)], ROW, most_bytes=1)
    for row in (*range(10), *reversed(range(10)), 0, 9, 4, 5):
        assert ctypes.string_at(rows.address(row), ROW) == bytes([10 * (row // 5) + row % 5]) * ROW
    ctypes.memset(rows.address(7), 77, ROW)
    assert os.pread(fds[1], ROW, 2 * ROW) == bytes([77]) * ROW
    for row in (-1, 10):
        with pytest.raises(ValueError, match="no row"):
            rows.address(row)
    for fd in fds:
        os.close(fd)


def test_rows_of_this_process_are_a_table_and_are_not_held() -> None:
    memory = mmap.mmap(-1, 4 * ROW)
    memory[2 * ROW] = 5
    view = memoryview(memory).cast("B", (4, ROW))
    rows = OwnRows(view)
    assert (rows.count, rows.row_bytes) == (4, ROW)
    assert ctypes.string_at(rows.address(2), 1) == bytes([5])
    for row in (-1, 4):
        with pytest.raises(ValueError, match="no row"):
            rows.address(row)
    with pytest.raises(ValueError, match="table"):
        OwnRows(memoryview(bytearray(8)))
    view.release()
    memory.close()


def test_the_memory_of_workers_counts_their_page_tables_up_to_what_they_keep_mapped() -> None:
    small = worker_memory_bytes(8 << 30, workers=1, chunk_bytes=0)
    assert worker_memory_bytes(8 << 30, workers=4, chunk_bytes=0) == 4 * small
    assert worker_memory_bytes(8 << 30, workers=1, chunk_bytes=8 << 20) - small == 8 << 20
    base = worker_memory_bytes(0, workers=1, chunk_bytes=0)
    assert small - base == 16 << 20
    assert worker_memory_bytes(1 << 40, workers=1, chunk_bytes=0) - base == MOST_MAPPED_BYTES // 512
    assert worker_memory_bytes(8 << 30, workers=1, chunk_bytes=0, has_huge_pages=True) - base == 32 << 10


def test_nobody_sees_a_task_that_began_before_the_worker_did() -> None:
    # Such a one would be taken for a worker that hangs, and killed.
    fd = create_table()
    table = TaskTable(fd)
    began = time.monotonic()
    worker = subprocess.Popen([sys.executable, "-c", _BUSY_WORKER, str(fd)], pass_fds=[fd])
    try:
        until(lambda: table.current(0).started > 0)
        seen = [table.current(0) for _ in range(400_000)]
    finally:
        worker.kill()
        worker.wait()
        table.close()
        os.close(fd)
    assert any(current.ticket for current in seen)
    assert min(current.started for current in seen) > began
