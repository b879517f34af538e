# SPDX-License-Identifier: Apache-2.0
"""Journals that cannot be read, or are not listed, for a while: nothing in them is lost, and nothing is heard twice."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from clocks import Clock
from shared_engine import engine
from store_contract import BLOCK_BYTES, PAYLOAD_BYTES, key, payload
from store_faults import CrashError, CrashingFs, FailingFs
from test_marks import following, following_a_dead_one, hear, marks, tell

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.index import Presence
from kvtier_connector.store.journal import JournalLimits, JournalWriter
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import JOURNAL
from kvtier_connector.store.scan import remove_old_journals


class Unlisted(FileSystem):
    """A volume that leaves names out of its listings, as one does whose files lie on a server that is away."""

    def __init__(self) -> None:
        self.leaves_out: Callable[[str], bool] = lambda _: False

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        return [entry for entry in super().scandir(path) if not self.leaves_out(entry.name)]


@pytest.fixture
def broken() -> list[bool]:
    """Not empty while journals cannot be opened."""
    return []


@pytest.fixture
def failing(broken: list[bool]) -> FileSystem:
    return FailingFs(OSError(errno.EIO, "broken"), when=lambda call, _: bool(broken) and call == "open")


def test_what_could_not_be_read_for_long_is_heard_when_it_can_be(
    tmp_path: Path, failing: FileSystem, broken: list[bool]
) -> None:
    writer = JournalWriter(tmp_path)
    tell(writer, 1)
    reader = following(tmp_path, failing)
    tell(writer, 2)
    broken.append(True)
    for _ in range(100):
        with pytest.raises(StoreUnavailable, match="broken"):
            hear(reader)
    broken.clear()
    assert hear(reader) == [2]


def test_a_journal_that_is_doubted_and_cannot_be_read_is_read_later(
    tmp_path: Path, failing: FileSystem, broken: list[bool]
) -> None:
    now = Clock(0.0)
    reader = following_a_dead_one(tmp_path, failing, now)
    now.seconds += 300
    broken.append(True)
    # It tells of nothing new, so nobody has to doubt all that is known for it.
    assert hear(reader) == []
    assert reader.has_read_all
    broken.clear()
    now.seconds += 300
    assert hear(reader) == [2]


def test_a_doubted_journal_that_can_never_be_read_keeps_nobody_from_the_next(tmp_path: Path) -> None:
    crashing, now = CrashingFs(10**9), Clock(0.0)
    writers = sorted((JournalWriter(tmp_path, fs=crashing) for _ in range(2)), key=lambda writer: writer.writer)
    for number, writer in enumerate(writers):
        tell(writer, number)
    unreadable = writers[0].writer
    broken = FailingFs(OSError(errno.EIO, "broken"), when=lambda call, path: call == "open" and unreadable in str(path))
    reader = following(tmp_path, broken, now)
    crashing.crash_after(3)
    with pytest.raises(CrashError):
        tell(writers[1], 2)
    now.seconds += 300
    assert [hear(reader) for _ in range(2)] in ([[], [2]], [[2], []])


def test_who_starts_while_a_journal_is_removed_hears_nothing_old(tmp_path: Path) -> None:
    for number in range(3):
        tell(JournalWriter(tmp_path), number)
    for mark in marks(tmp_path):
        mark.unlink()
    leaving = sorted((tmp_path / JOURNAL).iterdir())[1]

    class Removing(FileSystem):
        def stat(self, path: str) -> os.stat_result:
            if path == str(leaving):
                leaving.unlink()
            return super().stat(path)

    now = Clock(0.0)
    reader = JournalReader(tmp_path, fs=Removing(), now=now)
    reader.start()
    assert reader.count_active(0.0) == 2
    assert hear(reader) == []


@pytest.mark.parametrize("hours", [0, 1, 20])
def test_a_journal_that_is_not_listed_for_a_while_is_read_on_where_it_was_left(tmp_path: Path, hours: int) -> None:
    writer, fs, now = JournalWriter(tmp_path), Unlisted(), Clock(0.0)
    tell(writer, 1)
    reader = following(tmp_path, fs, now)
    tell(writer, 2)
    assert hear(reader) == [2]
    fs.leaves_out = lambda name: writer.writer in name
    assert hear(reader) == []
    places = reader.places()
    tell(writer, 3)
    now.seconds += 3600 * hours
    assert hear(reader) == []
    assert reader.places() == places
    fs.leaves_out = lambda _: False
    assert hear(reader) == [3]


def test_blocks_that_are_gone_do_not_come_back_with_a_journal_that_was_not_listed(root: Path) -> None:
    fs = Unlisted()
    storing, removing, other = engine(root), engine(root), engine(root, fs, max_bytes=100 * BLOCK_BYTES)
    storing.put(key(1), payload(1))
    storing.synchronize()
    (journal,) = [path.name for path in (root / JOURNAL).glob("*.kvj") if path.stat().st_size > 128]
    removing.synchronize()
    other.synchronize()
    assert other.state(key(1)) is Presence.PRESENT
    removing.delete(key(1), payload_bytes=PAYLOAD_BYTES)
    removing.synchronize()
    other.synchronize()
    fs.leaves_out = lambda name: name == journal
    other.synchronize()
    fs.leaves_out = lambda _: False
    other.synchronize()
    assert other.state(key(1)) is Presence.ABSENT
    assert other.usage_bytes() == 0


class Spoiling(FileSystem):
    """A volume that leaves zeros where a write has failed."""

    is_spoiling = False
    zeros = 300

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_spoiling:
            os.pwrite(fd, bytes(self.zeros), offset)
            raise OSError(errno.ENOSPC, "full")
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("zeros", [300, 1 << 20])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_what_a_write_that_failed_has_left_keeps_nobody_from_what_comes_there(
    tmp_path: Path, before: int, zeros: int
) -> None:
    fs, now = Spoiling(), Clock(0.0)
    fs.zeros = zeros
    writer = JournalWriter(tmp_path, fs=fs, limits=JournalLimits(segment_bytes=600))
    for _ in range(before):
        tell(writer, 0)
    reader = following(tmp_path, now=now)
    fs.is_spoiling = True
    with pytest.raises(StoreUnavailable, match="full"):
        tell(writer, 1, 2)
    now.seconds += 300
    for _ in range(8):
        assert hear(reader) == []
    assert reader.has_read_all
    fs.is_spoiling = False
    tell(writer, 3)
    assert hear(reader) == [1, 2, 3]
    assert reader.damaged == 0


def test_of_journals_that_are_gone_for_good_nothing_is_kept(tmp_path: Path) -> None:
    writer, now = JournalWriter(tmp_path, limits=JournalLimits(segment_bytes=256, segments=16)), Clock(0.0)
    reader = following(tmp_path, now=now)
    for _ in range(100):
        tell(writer, 1, 2)
        assert hear(reader) == [1, 2]
    assert len(reader.places()) < 40
    for path in (tmp_path / JOURNAL).glob("*.kvj"):
        path.unlink()
    hear(reader)
    assert reader.count_active(0.0) == 1
    now.seconds += 2 * 86_400
    hear(reader)
    assert reader.places() == {}
    assert reader.count_active(0.0) == 0


def test_a_mark_that_somebody_else_removes_keeps_no_other_of_a_dead_process(tmp_path: Path) -> None:
    for number in range(3):
        tell(JournalWriter(tmp_path), number)
    for path in (tmp_path / JOURNAL).iterdir():
        os.utime(path, ns=(10**9, 10**9))

    class Overtaken(FileSystem):
        is_first = True

        def unlink(self, path: str) -> None:
            if self.is_first and f"{JOURNAL}/." in path:
                self.is_first = False
                super().unlink(path)
            super().unlink(path)

    assert len(remove_old_journals(tmp_path, 3600.0, fs=Overtaken())) == 3
    assert list((tmp_path / JOURNAL).iterdir()) == []


def test_to_remove_old_journals_takes_one_listing(tmp_path: Path) -> None:
    tell(JournalWriter(tmp_path), 1)
    fs = CrashingFs(10**9)
    assert remove_old_journals(tmp_path, 3600.0, fs=fs) == []
    assert fs.calls == ["scandir", "stat"]
