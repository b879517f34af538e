# SPDX-License-Identifier: Apache-2.0
"""What passes between an engine and its workers: the table of tasks, and how few calls find what is there."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import ROW_BYTES, children, key, payload, wait_until
from store_faults import GatedFs
from waiting import Clock, until

from kvtier_connector.contract.engine import MOST_IO_PROCESSES, MOST_MAPPED_BYTES, worker_memory_bytes
from kvtier_connector.io_workers import buffers as rows_module
from kvtier_connector.io_workers import lookups as lookups_module
from kvtier_connector.io_workers import short_calls
from kvtier_connector.io_workers.buffers import MappedRows, Region
from kvtier_connector.io_workers.lookups import MOST_CALLS, BlockQuery, Found, LookupWorker, find
from kvtier_connector.io_workers.task_table import ENTRIES, Current, MessagePipe, TaskTable, create_table
from kvtier_connector.io_workers.tasks import (
    REPLY,
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
from kvtier_connector.io_workers.worker import PoolSettings, WorkerFileSystem, WorkerSettings
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import BlockKey, Lineage, block_path

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
def test_a_task_reads_back_as_written(lane: Lane, key: BlockKey, row: int, lineage: Lineage, active_key: str) -> None:
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
    assert [rows.prepare() for _ in range(6)] == [True] * 4 + [False] * 2
    for row in (*range(10), *reversed(range(10)), 0, 9, 4, 5):
        assert ctypes.string_at(rows.address(row), ROW) == bytes([10 * (row // 5) + row % 5]) * ROW
    ctypes.memset(rows.address(7), 77, ROW)
    assert os.pread(fds[1], ROW, 2 * ROW) == bytes([77]) * ROW
    for row in (-1, 10):
        with pytest.raises(ValueError, match="no row"):
            rows.address(row)
    for fd in fds:
        os.close(fd)


def test_the_memory_of_workers_counts_their_page_tables_up_to_what_they_keep_mapped() -> None:
    small = worker_memory_bytes(8 << 30, workers=1, chunk_bytes=0)
    assert worker_memory_bytes(8 << 30, workers=4, chunk_bytes=0) == 4 * small
    assert worker_memory_bytes(8 << 30, workers=1, chunk_bytes=8 << 20) - small == 8 << 20
    base = worker_memory_bytes(0, workers=1, chunk_bytes=0)
    assert small - base == 16 << 20
    assert worker_memory_bytes(1 << 40, workers=1, chunk_bytes=0) - base == MOST_MAPPED_BYTES // 512


def test_nobody_sees_a_task_that_began_before_the_worker_did() -> None:
    # Such a one would be taken for a worker that hangs, and killed.
    fd = create_table()
    table = TaskTable(fd)
    began = time.monotonic()
    worker = subprocess.Popen([sys.executable, "-c", _BUSY_WORKER, str(fd)], pass_fds=[fd])
    try:
        until(lambda: table.current(0).started > 0)
        seen: list[Current] = []
        until(lambda: seen.extend(table.current(0) for _ in range(400_000)) or any(each.ticket for each in seen))
    finally:
        worker.kill()
        worker.wait()
        table.close()
        os.close(fd)
    assert min(current.started for current in seen) > began


FEWEST_BYTES = 4096


def unread(pipe: MessagePipe) -> int:
    return int.from_bytes(fcntl.ioctl(pipe.reader, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_short_calls_never_wait_and_fail_as_those_of_the_library() -> None:
    pipe, buffer = MessagePipe(TASK_BYTES), ctypes.create_string_buffer(4)
    with pytest.raises(BlockingIOError):
        short_calls.read(pipe.reader, buffer)
    assert short_calls.write(pipe.writer, b"six\0by") == 6
    assert [short_calls.read(pipe.reader, buffer) for _ in range(2)] == [b"six\0", b"by"]
    for _ in range(fcntl.fcntl(pipe.writer, fcntl.F_GETPIPE_SZ) // 4096):
        assert short_calls.write(pipe.writer, bytes(4096)) == 4096
    with pytest.raises(BlockingIOError):
        short_calls.write(pipe.writer, b"more")
    os.close(pipe.reader)
    with pytest.raises(BrokenPipeError):
        short_calls.write(pipe.writer, b"none")
    pipe.reader, writer = os.pipe()
    os.close(writer)
    assert short_calls.read(pipe.reader, buffer) == b""
    pipe.close()


def test_a_child_that_has_ended_is_noticed_and_still_to_be_waited_for() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    wait_until(short_calls.has_ended_child, "it has ended")
    assert short_calls.has_ended_child()
    assert ended.wait() == 3


def test_a_worker_waits_where_the_engine_has_not_read_what_it_said(tmp_path: Path) -> None:
    tasks, replies = [MessagePipe(TASK_BYTES) for _ in Lane], MessagePipe(REPLY.size)
    pipe_bytes = fcntl.fcntl(replies.writer, fcntl.F_SETPIPE_SZ, FEWEST_BYTES)
    table_fd, region = create_table(), os.memfd_create("cpu-tier")
    os.ftruncate(region, ROW_BYTES)
    table = TaskTable(table_fd)
    table.storing = 1
    settings = WorkerSettings(
        worker=0,
        parent=os.getpid(),
        table=table_fd,
        regions=(Region(region, 0, 1),),
        row_bytes=ROW_BYTES,
        pipes=tuple(pipe.reader for pipe in tasks),
        replies=replies.writer,
        pool=PoolSettings(root=str(tmp_path), workers=1, deadline_seconds=60.0),
    )
    assert WorkerSettings.decode(settings.encode()) == settings
    worker = subprocess.Popen(
        [sys.executable, "-m", "kvtier_connector.io_workers.worker", settings.encode()],
        pass_fds=[*settings.pipes, replies.writer, table_fd, region],
    )
    # Of tasks that were taken back, which it answers at once.
    tickets = range(1, 2 * pipe_bytes // REPLY.size)
    for ticket in tickets:
        lane = Lane(ticket % len(Lane))
        os.write(tasks[lane].writer, encode_task(TaskMessage(0, ticket, Task(lane, key(1)))))
    wait_until(lambda: worker.poll() is not None or unread(replies) > pipe_bytes - REPLY.size, "no more fits")
    arrived = b""

    def has_all() -> bool:
        nonlocal arrived
        assert worker.poll() is None, "the worker has ended"
        arrived += replies.receive()
        return len(arrived) == len(tickets) * REPLY.size

    wait_until(has_all, "all are answered")
    assert sorted(ticket for ticket, *_ in REPLY.iter_unpack(arrived)) == list(tickets)
    for pipe in tasks:
        pipe.close()
    assert worker.wait(60) == 0
    replies.close()
    table.close()
    os.close(table_fd)
    os.close(region)


KEY = BlockKey(b"k" * 32, 0)
SIZE, TURNS = 3 << 20, 20


def test_a_file_that_was_cut_short_is_a_fault_and_no_signal(directory: Path) -> None:
    store, read = BlockStore(directory, fs=WorkerFileSystem()), memoryview(bytearray(SIZE))
    store.put(KEY, read)
    os.truncate(directory / block_path(KEY), SIZE // 2)
    assert store.stream(KEY, read, lambda _offset, _piece: True) is Fault.TRUNCATED


def test_a_file_without_bytes_that_is_longer_than_memory_is_a_fault_and_not_an_error(directory: Path) -> None:
    store = BlockStore(directory, fs=WorkerFileSystem())
    path = directory / block_path(KEY)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(8 << 40)
    read = memoryview(bytearray(SIZE))
    assert store.stream(KEY, read, lambda _offset, _piece: True) is Fault.MAGIC
    assert store.stream(KEY, read, lambda _offset, _piece: True) == Miss()


def test_neither_descriptor_nor_mapping_is_left(directory: Path) -> None:
    store = BlockStore(directory, fs=WorkerFileSystem())
    store.put(KEY, memoryview(bytearray(SIZE)))
    read = memoryview(bytearray(SIZE))
    before, mappings = len(list(Path("/proc/self/fd").iterdir())), mapped(directory)
    for _ in range(TURNS):
        assert isinstance(store.stream(KEY, read, lambda _offset, _piece: True), Hit)
    # Other threads of this process may open some meanwhile; a leak would be one in each turn.
    assert len(list(Path("/proc/self/fd").iterdir())) - before < TURNS
    assert mapped(directory) == mappings


def mapped(directory: Path) -> int:
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


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
    found = ask(Volume(set(range(present)), seconds=0.005 if is_slow else 0.0), count, is_exact=is_exact)
    assert found.present == min(present, count)
    assert set(found.seen) <= set(range(present))


@given(present=st.sets(st.integers(0, 60)), count=st.integers(0, 60))
def test_of_a_prefix_with_holes_an_exact_lookup_finds_the_part_before_the_first(present: set[int], count: int) -> None:
    found = ask(Volume(present), count, is_exact=True)
    assert found.present <= next((number for number in range(count) if number not in present), count)
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
        made = LookupWorker(settings, lookup_seconds=lookup_seconds, **{"fs": self.fs} if hangs else {})
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


def end_of(worker: LookupWorker, number: int) -> lookups_module.Answer:
    ended: list[lookups_module.Answer] = []
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
    assert worker.collect() == [lookups_module.Answer(2, None)]
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
