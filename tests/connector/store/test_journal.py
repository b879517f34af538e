# SPDX-License-Identifier: Apache-2.0
"""Journals: what one process notes, another reads; torn, damaged and removed ones lose news and nothing else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from clocks import Clock
from store_contract import NOW_NS, key
from store_faults import CrashingFs, FailingFs, ShortFs

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import RECORD_BYTES, JournalLimits, JournalWriter, Op, Record, decode_record

WRITER = "0123456789abcdef" * 2


def make_writer(root: Path, fs: FileSystem | None = None, **limits: float) -> JournalWriter:
    return JournalWriter(
        root, fs=fs or FileSystem(), limits=JournalLimits(**limits), clock=lambda: NOW_NS, now=Clock(1000.0)
    )


def note(writer: JournalWriter, *numbers: int, op: Op = Op.STORED) -> None:
    for number in numbers:
        writer.append(op, key(number), 4096)


def records_of(root: Path) -> list[Record]:
    found = []
    for path in sorted((root / "journal").glob("*.kvj")):
        content = path.read_bytes()
        for at in range(RECORD_BYTES, len(content), RECORD_BYTES):
            record = decode_record(content[at : at + RECORD_BYTES])
            assert record is not None
            found.append(record)
    return found


def numbers_of(found: list[Record]) -> list[int]:
    return [int.from_bytes(record.key.hash[:4], "little") for record in found]


def only_file(root: Path) -> Path:
    (path,) = (root / "journal").glob("*.kvj")
    return path


def test_a_retention_is_noted_with_its_end(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    note(writer, 1, op=Op.USED)
    writer.append(Op.RETAINED, key(1), 4096, ahead_seconds=60)
    writer.flush()
    found = records_of(tmp_path)
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


def test_a_flush_costs_three_system_calls_and_a_hit_none(tmp_path: Path) -> None:
    fs = CrashingFs(10**9)
    writer = make_writer(tmp_path, fs)
    note(writer, 0)
    writer.flush()
    fs.calls.clear()
    note(writer, *range(1, 1000))
    assert fs.calls == []
    writer.flush()
    assert fs.calls == ["open", "pwritev", "close"]
    writer.flush()
    assert fs.calls == ["open", "pwritev", "close"]


def test_a_volume_that_takes_few_bytes_at_a_time_gets_all_of_them(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, ShortFs(50))
    note(writer, *range(20))
    writer.flush()
    assert numbers_of(records_of(tmp_path)) == list(range(20))


def test_what_the_volume_never_takes_is_dropped_at_a_limit(tmp_path: Path) -> None:
    fs = FailingFs(OSError(errno.EROFS, "read-only"), when=lambda call, path: call == "open")
    writer = make_writer(tmp_path, fs, buffered_records=10)
    for first in range(0, 30, 6):
        note(writer, *range(first, first + 6))
        with pytest.raises(StoreUnavailable, match="read-only"):
            writer.flush()
    assert writer.pending == 10


def test_a_full_segment_is_followed_by_the_next_and_the_oldest_go(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, segment_bytes=3 * RECORD_BYTES, segments=4)
    for number in range(20):
        note(writer, number)
        writer.flush()
    assert numbers_of(records_of(tmp_path)) == list(range(12, 20))
    assert len(list((tmp_path / "journal").iterdir())) == 4


SECOND_NS = 10**9


def make_living(root: Path, fs: FileSystem | None = None) -> tuple[JournalWriter, Clock]:
    now = Clock(1000.0)
    return JournalWriter(root, fs=fs or FileSystem(), clock=lambda: NOW_NS, now=now), now


def written_ns(root: Path) -> int:
    return only_file(root).stat().st_mtime_ns


def test_a_process_that_has_nothing_to_say_renews_the_time_of_its_journal_now_and_then(tmp_path: Path) -> None:
    writer, now = make_living(tmp_path)
    writer.append(Op.STORED, key(1), 4096)
    writer.flush()
    content = only_file(tmp_path).read_bytes()
    os.utime(only_file(tmp_path), ns=(SECOND_NS, SECOND_NS))
    now.seconds += 300
    writer.flush()
    assert written_ns(tmp_path) == SECOND_NS
    now.seconds += 400
    writer.flush()
    assert written_ns(tmp_path) > SECOND_NS
    assert only_file(tmp_path).read_bytes() == content


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_process_that_may_store_nothing_shows_that_it_is_there(tmp_path: Path, *, is_removed: bool) -> None:
    writer, now = make_living(tmp_path)
    writer.append(Op.STORED, key(1), 4096)
    writer.show_life()
    assert only_file(tmp_path).stat().st_size == RECORD_BYTES
    os.utime(only_file(tmp_path), ns=(SECOND_NS, SECOND_NS))
    if is_removed:
        only_file(tmp_path).unlink()
    now.seconds += 700
    writer.show_life()
    assert written_ns(tmp_path) > SECOND_NS
    assert writer.flush() == 1
    record = decode_record(only_file(tmp_path).read_bytes()[RECORD_BYTES:])
    assert record.key == key(1)


def test_a_volume_that_takes_no_sign_of_life_is_asked_now_and_then(tmp_path: Path) -> None:
    calls: list[str] = []
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    fs = FailingFs(refused, when=lambda call, _: not calls.append(call))
    writer, now = make_living(tmp_path, fs)
    for _ in range(10):
        writer.show_life()
        now.seconds += 100
    assert calls.count("open") == 2
