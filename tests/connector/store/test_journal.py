# SPDX-License-Identifier: Apache-2.0
"""Journals: what one process notes, another reads; torn, damaged and removed ones lose news and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from clocks import Clock
from store_contract import NOW_NS, key
from store_faults import CrashError, CrashingFs, FailingFs, ShortFs

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import RECORD_BYTES, JournalLimits, JournalWriter, Op, Record
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import (
    JournalName,
    journal_path,
)
from kvtier_connector.store.scan import list_journals, remove_old_journals

WRITER = "0123456789abcdef" * 2


def make_writer(root: Path, fs: FileSystem | None = None, **limits: float) -> JournalWriter:
    return JournalWriter(
        root,
        fs=fs or FileSystem(),
        limits=JournalLimits(**limits),
        clock=lambda: NOW_NS,
        now=Clock(1000.0),
    )


def note(writer: JournalWriter, *numbers: int, op: Op = Op.STORED) -> None:
    for number in numbers:
        writer.append(op, key(number), 4096)


def read_all(reader: JournalReader) -> list[Record]:
    return [record for batch in reader.read() for record in batch]


def numbers_of(found: list[Record]) -> list[int]:
    return [int.from_bytes(record.key.hash[:4], "little") for record in found]


def only_file(root: Path) -> Path:
    (path,) = (root / "journal").glob("*.kvj")
    return path


def test_what_one_process_notes_another_reads_once(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path), JournalReader(tmp_path)
    reader.start()
    note(writer, 1, 2)
    assert read_all(reader) == []
    assert writer.flush() == 2
    assert read_all(reader) == [Record(Op.STORED, key(number), 4096, NOW_NS) for number in (1, 2)]
    assert read_all(reader) == []
    note(writer, 3, op=Op.GONE)
    writer.flush()
    assert read_all(reader) == [Record(Op.GONE, key(3), 4096, NOW_NS)]


def test_what_was_noted_before_the_start_is_left_to_the_walk(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path), JournalReader(tmp_path)
    note(writer, 1)
    writer.flush()
    reader.start()
    note(writer, 2)
    writer.flush()
    assert numbers_of(read_all(reader)) == [2]


def test_a_process_does_not_read_its_own_journal(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    reader = JournalReader(tmp_path, but=writer.writer)
    reader.start()
    note(writer, 1)
    writer.flush()
    assert read_all(reader) == []


def test_a_retention_is_noted_with_its_end(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path), JournalReader(tmp_path)
    reader.start()
    note(writer, 1, op=Op.USED)
    writer.append(Op.RETAINED, key(1), 4096, ahead_seconds=60)
    writer.flush()
    found = read_all(reader)
    assert [record.op for record in found] == [Op.USED, Op.RETAINED]
    assert [record.time_ns - NOW_NS for record in found] == [0, 60_000_000_000]


def test_a_use_is_noted_once_in_a_window(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    writer = JournalWriter(tmp_path, limits=JournalLimits(used_window_seconds=60), now=clock)
    note(writer, 1, 1, 1, op=Op.USED)
    assert writer.pending == 1
    clock.seconds += 30
    note(writer, 1, op=Op.USED)
    assert writer.pending == 1
    clock.seconds += 60
    note(writer, 2, op=Op.USED)
    clock.seconds += 60
    note(writer, 1, op=Op.USED)
    assert writer.pending == 3


def test_a_block_that_was_stored_need_not_be_noted_as_used(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    note(writer, 1)
    note(writer, 1, op=Op.USED)
    assert writer.pending == 1
    note(writer, 1)
    note(writer, 1, op=Op.GONE)
    assert writer.pending == 3


def test_a_flush_costs_five_system_calls_and_a_hit_none(tmp_path: Path) -> None:
    fs = CrashingFs(10**9)
    writer = make_writer(tmp_path, fs)
    note(writer, 0)
    writer.flush()
    fs.calls.clear()
    note(writer, *range(1, 1000))
    assert fs.calls == []
    writer.flush()
    assert fs.calls == ["open", "pwritev", "close", "rename", "touch"]
    writer.flush()
    assert fs.calls == ["open", "pwritev", "close", "rename", "touch"]


def test_a_refresh_costs_one_listing_and_one_read_for_each_journal_with_something_new(tmp_path: Path) -> None:
    fs = CrashingFs(10**9)
    reader = JournalReader(tmp_path, fs=fs)
    reader.start()
    writers = [make_writer(tmp_path) for _ in range(3)]
    for number, writer in enumerate(writers * 2):
        note(writer, number)
        writer.flush()
        if number == 2:
            read_all(reader)
            fs.calls.clear()
    read_all(reader)
    assert fs.calls == ["scandir", *["open", "preadv", "close"] * 3]


def test_a_crash_at_any_step_of_a_flush_loses_that_flush_and_no_earlier_one(tmp_path: Path) -> None:
    for torn_bytes, step in itertools.product((0, 100, 200), range(12)):
        root = tmp_path / f"{torn_bytes}-{step}"
        reader = JournalReader(root)
        reader.start()
        fs = CrashingFs(10**9)
        writer = make_writer(root, fs)
        note(writer, 1, 2)
        writer.flush()
        fs.crash_after(step, torn_bytes=torn_bytes)
        note(writer, 3, 4)
        try:
            writer.flush()
        except CrashError:
            assert fs.has_crashed
        for _ in range(6):
            found = numbers_of(read_all(reader))
            assert found in ([1, 2], [1, 2, 3], [1, 2, 3, 4], [3], [3, 4], [])
        other = make_writer(root)
        note(other, 5)
        other.flush()
        assert numbers_of(read_all(reader)) == [5]


def test_a_torn_write_of_a_living_process_is_overwritten_by_its_next_one(tmp_path: Path) -> None:
    class FullAfterSomeBytes(FileSystem):
        is_full = True

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.is_full:
                os.pwrite(fd, bytes(buffers[0])[:150], offset)
                raise OSError(errno.ENOSPC, "full")
            return super().pwritev(fd, buffers, offset)

    fs = FullAfterSomeBytes()
    writer, reader = make_writer(tmp_path, fs), JournalReader(tmp_path)
    reader.start()
    note(writer, 1, 2)
    with pytest.raises(StoreUnavailable, match="full"):
        writer.flush()
    assert writer.pending == 2
    assert read_all(reader) == []
    fs.is_full = False
    note(writer, 3)
    assert writer.flush() == 3
    assert numbers_of(read_all(reader)) == [1, 2, 3]


def test_a_volume_that_takes_few_bytes_at_a_time_gets_all_of_them(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path, ShortFs(50)), JournalReader(tmp_path)
    reader.start()
    note(writer, *range(20))
    writer.flush()
    assert numbers_of(read_all(reader)) == list(range(20))


def test_what_the_volume_never_takes_is_dropped_at_a_limit_and_counted(tmp_path: Path) -> None:
    fs = FailingFs(OSError(errno.EROFS, "read-only"), when=lambda call, path: call == "open")
    writer = make_writer(tmp_path, fs, buffered_records=10)
    for first in range(0, 30, 6):
        note(writer, *range(first, first + 6))
        with pytest.raises(StoreUnavailable, match="read-only"):
            writer.flush()
    assert (writer.pending, writer.dropped) == (10, 20)


def test_a_record_on_its_way_is_read_when_it_has_arrived(tmp_path: Path) -> None:
    """As an NFS client may show it: the file is as long as it will be, and its last bytes are zeros for a while."""
    writer, reader = make_writer(tmp_path), JournalReader(tmp_path)
    reader.start()
    note(writer, 1, 2)
    writer.flush()
    path = only_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: 2 * RECORD_BYTES] + bytes(RECORD_BYTES))
    assert numbers_of(read_all(reader)) == [1]
    assert read_all(reader) == []
    path.write_bytes(whole)
    assert numbers_of(read_all(reader)) == [2]
    assert reader.damaged == 0


def test_damaged_records_are_passed_over_after_a_while_and_counted(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path), JournalReader(tmp_path)
    reader.start()
    note(writer, 1, 2, 3, 4)
    writer.flush()
    content = bytearray(only_file(tmp_path).read_bytes())
    content[2 * RECORD_BYTES : 4 * RECORD_BYTES] = os.urandom(2 * RECORD_BYTES)
    only_file(tmp_path).write_bytes(content)
    found = [numbers_of(read_all(reader)) for _ in range(5)]
    assert found == [[1], [], [], [4], []]
    assert reader.damaged == 2


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "notes.txt").write_text("hello")
    (tmp_path / journal_path(JournalName(WRITER, 0))).write_bytes(b"x" * 10 * RECORD_BYTES)
    reader = JournalReader(tmp_path)
    for _ in range(8):
        assert read_all(reader) == []


def test_a_full_segment_is_followed_by_the_next_and_the_oldest_go(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path, segment_bytes=3 * RECORD_BYTES, segments=4), JournalReader(tmp_path)
    reader.start()
    found = []
    for number in range(20):
        note(writer, number)
        writer.flush()
        found += numbers_of(read_all(reader))
    assert found == list(range(20))
    assert len(list_journals(tmp_path)) == 4


def test_a_reader_that_is_late_reads_every_segment_that_is_left(tmp_path: Path) -> None:
    writer, reader = make_writer(tmp_path, segment_bytes=3 * RECORD_BYTES), JournalReader(tmp_path)
    reader.start()
    for number in range(10):
        note(writer, number)
        writer.flush()
    assert numbers_of(read_all(reader)) == list(range(10))
    fs = CrashingFs(10**9)
    follower = JournalReader(tmp_path, fs=fs)
    follower.start()
    read_all(follower)
    fs.calls.clear()
    read_all(follower)
    assert fs.calls == ["scandir"]


@pytest.mark.parametrize("what", ["file", "directory", "root"])
def test_a_journal_that_is_removed_under_its_writer_is_begun_anew(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    writer, reader = make_writer(root), JournalReader(root)
    reader.start()
    note(writer, 1)
    writer.flush()
    assert numbers_of(read_all(reader)) == [1]
    only_file(root).unlink()
    if what != "file":
        shutil.rmtree(root / "journal")
    if what == "root":
        root.rmdir()
    assert read_all(reader) == []
    note(writer, 2)
    writer.flush()
    assert numbers_of(read_all(reader)) == [2]


def test_old_journals_are_removed_and_young_ones_stay(tmp_path: Path) -> None:
    for number in range(2):
        writer = make_writer(tmp_path)
        note(writer, number)
        writer.flush()
    paths = [path for path, _, _ in list_journals(tmp_path)]
    os.utime(tmp_path / paths[0], ns=(NOW_NS, NOW_NS))
    os.utime(tmp_path / paths[1], ns=(NOW_NS + 10**9, NOW_NS + 10**9))
    assert remove_old_journals(tmp_path, 60, clock=lambda: NOW_NS + 60 * 10**9) == [paths[0]]
    assert remove_old_journals(tmp_path, 60, clock=lambda: NOW_NS + 60 * 10**9) == []
    assert [path for path, _, _ in list_journals(tmp_path)] == [paths[1]]


def test_writers_count_from_their_empty_journal_on_and_those_that_only_remove_do_not(tmp_path: Path) -> None:
    reader = JournalReader(tmp_path, now=lambda: 5.0)
    reader.start()
    silent, storing, removing = (make_writer(tmp_path) for _ in range(3))
    note(storing, 1)
    removing.append(Op.GONE, key(1), 0)
    for writer in (silent, storing, removing):
        writer.flush()
    assert sum(len(batch) for batch in reader.read()) == 2
    assert reader.count_active(0.0) == 2
    note(removing, 2)
    removing.flush()
    assert sum(len(batch) for batch in reader.read()) == 1
    assert reader.count_active(0.0) == 3


@pytest.mark.parametrize("call", ["scandir", "open", "preadv"])
def test_a_journal_that_cannot_be_read_is_reported_and_the_others_are_read(tmp_path: Path, call: str) -> None:
    reader = JournalReader(tmp_path)
    reader.start()
    writers = [make_writer(tmp_path) for _ in range(2)]
    for number, writer in enumerate(sorted(writers, key=lambda writer: writer.writer)):
        note(writer, number)
        writer.flush()
    broken = [True]

    def when(name: str, path: str | None) -> bool:
        if name == call and broken:
            broken.clear()
            return True
        return False

    fs = FailingFs(OSError(errno.EIO, "broken"), when=when)
    reader = JournalReader(tmp_path, fs=fs)
    broken.clear()
    reader.start()
    for writer in writers:
        note(writer, 7)
        writer.flush()
    broken.append(True)
    found: list[Record] = []
    with pytest.raises(StoreUnavailable, match="broken"):
        found.extend(record for batch in reader.read() for record in batch)
    assert len(found) == (0 if call == "scandir" else 1)
    found += read_all(reader)
    assert numbers_of(found) == [7, 7]


def test_a_journal_that_is_stale_on_the_server_leaves_the_others_heard(tmp_path: Path) -> None:
    stale, other = make_writer(tmp_path), make_writer(tmp_path)
    is_failing = True
    fs = FailingFs(
        OSError(errno.ESTALE, "stale"), when=lambda name, path: is_failing and name == "open" and stale.writer in path
    )
    reader = JournalReader(tmp_path, fs=fs)
    reader.start()
    for number, writer in enumerate((stale, other)):
        note(writer, number)
        writer.flush()
    assert numbers_of(read_all(reader)) == [1]
    is_failing = False
    assert numbers_of(read_all(reader)) == [0]
