# SPDX-License-Identifier: Apache-2.0
"""Marks say how long journals are: those with news are opened, also where a mark is late, lost or wrong."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from clocks import Clock
from planted import KINDS, plant
from shared_engine import Counting, engine
from store_contract import key, payload
from store_faults import CrashError, CrashingFs, FailingFs, WatchedFs

from kvtier_connector.store.bell import Bell
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.fsck import check
from kvtier_connector.store.index import Presence
from kvtier_connector.store.journal import RECORD_BYTES, JournalWriter, Op
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import JOURNAL, JournalName, Mark, journal_path, mark_path, parse_mark_path
from kvtier_connector.store.scan import remove_old_journals

STRANGER = "0123456789abcdef" * 2
OPENED = ["open", "preadv", "close"]


def tell(writer: JournalWriter, *numbers: int) -> None:
    for number in numbers:
        writer.append(Op.STORED, key(number), 4096)
    writer.flush()


def hear(reader: JournalReader) -> list[int]:
    known = {key(number): number for number in range(20)}
    return [known[record.key] for batch in reader.read() for record in batch]


def marks(root: Path) -> list[Path]:
    return sorted(path for path in (root / JOURNAL).iterdir() if parse_mark_path(f"{JOURNAL}/{path.name}"))


def following(root: Path, fs: FileSystem | None = None, now: Callable[[], float] | None = None) -> JournalReader:
    """Return a reader that has heard all there is, and has seen which marks there are."""
    reader = JournalReader(root, fs=fs or FileSystem(), now=now or Clock(0.0))
    assert hear(reader) == []
    return reader


def following_a_dead_one(root: Path, fs: FileSystem, now: Callable[[], float]) -> JournalReader:
    """Return a reader that has heard 1 of a writer that told of 2 and died before it moved its mark."""
    crashing = CrashingFs(10**9)
    writer = JournalWriter(root, fs=crashing)
    tell(writer, 1)
    reader = following(root, fs, now)
    crashing.crash_after(3)
    with pytest.raises(CrashError):
        tell(writer, 2)
    return reader


def test_a_mark_says_which_journal_ends_where() -> None:
    mark = Mark(STRANGER, 7, 1280)
    assert parse_mark_path(mark_path(mark)) == mark
    for other in (journal_path(JournalName(STRANGER, 7)), mark_path(mark) + "0" * 20, f"x/{mark_path(mark)}"):
        assert parse_mark_path(other) is None


def test_of_many_journals_the_one_that_has_something_new_is_read(tmp_path: Path) -> None:
    writers = [JournalWriter(tmp_path) for _ in range(10)]
    for number, writer in enumerate(writers):
        tell(writer, number)
    fs = Counting()
    reader = following(tmp_path, fs)
    fs.calls.clear()
    assert hear(reader) == []
    assert fs.calls == ["scandir"]
    tell(writers[4], 11)
    fs.calls.clear()
    assert hear(reader) == [11]
    assert fs.calls == ["scandir", *OPENED]


def test_who_starts_beside_many_others_costs_each_of_them_one_call_and_itself_one_listing(tmp_path: Path) -> None:
    fs, own = Counting(), Counting()
    for number in range(10):
        tell(JournalWriter(tmp_path), number)
    reader = following(tmp_path, fs)
    JournalReader(tmp_path, fs=own).start()
    assert own.calls == ["scandir"]
    JournalWriter(tmp_path).flush()
    fs.calls.clear()
    assert hear(reader) == []
    assert fs.calls == ["scandir"]
    assert reader.has_read_all


def test_what_is_told_while_somebody_starts_is_heard(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    tell(writer, 1)
    reader = JournalReader(tmp_path)
    reader.start()
    tell(writer, 2)
    assert hear(reader) == [2]


def test_news_cost_each_of_many_engines_as_much_as_each_of_few(root: Path) -> None:
    counts = []
    for engines in (2, 12):
        teller = engine(root)
        fs = Counting()
        hearing = [engine(root, fs) for _ in range(engines)]
        for each in hearing * 2:
            each.synchronize()
        teller.put(key(engines), payload(1))
        teller.synchronize()
        fs.calls.clear()
        for each in hearing:
            assert each.synchronize().read == 1
        # On a slow machine it is time for them to ring once more meanwhile.
        counts.append(sum(call != "touch" for call in fs.calls) / engines)
    assert counts == [4, 4]


@pytest.mark.parametrize("how", ["removed", "never made"])
def test_a_journal_without_a_mark_is_read_at_each_news(tmp_path: Path, how: str) -> None:
    refused = FailingFs(
        OSError(errno.EDQUOT, "no more files"), when=lambda call, path: call == "open" and f"/{JOURNAL}/." in str(path)
    )
    writer = JournalWriter(tmp_path, fs=refused if how == "never made" else FileSystem())
    tell(writer, 1)
    reader = following(tmp_path)
    if how == "removed":
        (mark,) = marks(tmp_path)
        mark.unlink()
    tell(writer, 2)
    for path in marks(tmp_path):
        path.unlink()
    assert hear(reader) == [2]
    tell(writer, 3)
    assert hear(reader) == [3]


def test_a_mark_that_was_removed_is_made_again_and_one_that_stays_is_moved(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    tell(writer, 1)
    (first,) = marks(tmp_path)
    tell(writer, 2)
    (second,) = marks(tmp_path)
    assert first.name != second.name
    second.unlink()
    tell(writer, 3)
    (third,) = marks(tmp_path)
    assert parse_mark_path(f"{JOURNAL}/{third.name}") == Mark(writer.writer, 0, 4 * RECORD_BYTES)
    assert third.stat().st_size == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_of_who_cannot_move_its_mark_others_hear_all_the_same(tmp_path: Path, number: int) -> None:
    broken: list[bool] = []
    fs = FailingFs(OSError(number, "broken"), when=lambda call, _: bool(broken) and call == "rename")
    writer = JournalWriter(tmp_path, fs=fs)
    tell(writer, 1)
    reader = following(tmp_path)
    broken.append(True)
    for told in range(2, 6):
        tell(writer, told)
        assert hear(reader) == [told]
    broken.clear()
    tell(writer, 6)
    assert hear(reader) == [6]
    assert len(marks(tmp_path)) == 1


def test_a_mark_that_can_be_neither_moved_nor_removed_is_moved_later_and_rings_once(tmp_path: Path) -> None:
    broken: list[bool] = []
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda call, _: bool(broken) and call in {"rename", "unlink"})
    now = Clock(0.0)
    writer = JournalWriter(tmp_path, fs=fs, now=now)
    tell(writer, 1)
    reader = following(tmp_path)
    broken.append(True)
    tell(writer, 2)
    rung_ns = (tmp_path / JOURNAL).stat().st_mtime_ns
    for _ in range(5):
        now.seconds += 2
        writer.flush()
    assert hear(reader) == []
    assert (tmp_path / JOURNAL).stat().st_mtime_ns == rung_ns
    broken.clear()
    assert writer.is_due
    now.seconds += 2
    writer.flush()
    assert hear(reader) == [2]
    assert not writer.is_due


def test_a_mark_that_could_not_be_made_is_made_when_life_is_shown(tmp_path: Path) -> None:
    broken = [True]
    fs = FailingFs(
        OSError(errno.EDQUOT, "no more files"),
        when=lambda call, path: bool(broken) and call == "open" and f"/{JOURNAL}/." in str(path),
    )
    now = Clock(0.0)
    writer = JournalWriter(tmp_path, fs=fs, now=now)
    tell(writer, 1)
    now.seconds += 2
    writer.flush()
    assert not writer.is_due
    broken.clear()
    assert marks(tmp_path) == []
    now.seconds += 3600
    writer.show_life()
    assert len(marks(tmp_path)) == 1


def test_what_a_process_told_that_died_before_its_mark_was_moved_is_heard_after_a_while(tmp_path: Path) -> None:
    counting, now = Counting(), Clock(0.0)
    reader = following_a_dead_one(tmp_path, counting, now)
    assert hear(reader) == []
    now.seconds += 300
    assert hear(reader) == [2]
    counting.calls.clear()
    for _ in range(3):
        now.seconds += 300
        assert hear(reader) == []
    assert counting.calls == ["scandir"] * 3


def test_journals_in_doubt_are_read_one_with_each_listing(tmp_path: Path) -> None:
    for number in range(5):
        tell(JournalWriter(tmp_path), number)
    fs, now = Counting(), Clock(0.0)
    reader = following(tmp_path, fs, now)
    now.seconds += 300
    fs.calls.clear()
    for _ in range(7):
        assert hear(reader) == []
        assert reader.has_read_all
    assert fs.calls == ["scandir", *OPENED] * 5 + ["scandir"] * 2


class Behind(WatchedFs):
    """A node that has in mind how long a file was."""

    def __init__(self) -> None:
        self.most: int | None = None
        self.opened = 0

    def before(self, call: str, path: str | None) -> None:
        self.opened += call == "open"

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.most is not None:
            buffers = [buffers[0][: max(0, self.most - offset)]]
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("records", [0, 1])
def test_a_node_that_has_old_bytes_in_mind_asks_until_it_has_what_the_mark_tells_of(
    tmp_path: Path, records: int
) -> None:
    writer, fs = JournalWriter(tmp_path), Behind()
    tell(writer, 1)
    reader = following(tmp_path, fs)
    tell(writer, 2, 3)
    fs.most = (2 + records) * RECORD_BYTES
    assert [hear(reader) for _ in range(3)] == [[2][:records], [], []]
    assert not reader.has_read_all
    fs.most = None
    assert hear(reader) == [2, 3][records:]
    assert reader.has_read_all


def test_what_a_mark_tells_of_and_never_comes_is_not_asked_for_for_ever(tmp_path: Path) -> None:
    writer, fs = JournalWriter(tmp_path), Behind()
    tell(writer, 1)
    reader = following(tmp_path, fs)
    tell(writer, 2)
    fs.most, fs.opened = 0, 0
    for _ in range(200):
        assert hear(reader) == []
    assert reader.has_read_all
    assert fs.opened < 100
    fs.most = None
    tell(writer, 3)
    assert hear(reader) == [2, 3]


class Listing(FileSystem):
    """A node that lists a directory anew only if its time is another, as NFS clients do."""

    def __init__(self) -> None:
        self._of: tuple[int, list[os.DirEntry[str]]] | None = None

    def scandir(self, path: str) -> list[os.DirEntry[str]]:
        at = self.stat(path).st_mtime_ns
        if self._of is None or self._of[0] != at:
            self._of = at, super().scandir(path)
        return self._of[1]


def test_news_within_the_tick_of_a_listing_are_heard_when_they_are_told_again(tmp_path: Path) -> None:
    now = Clock(0.0)
    writer = JournalWriter(tmp_path, now=now)
    tell(writer, 1)
    journals = tmp_path / JOURNAL
    # The clock of the volume stands still from here; some tell whole seconds, so what comes after it is seconds later.
    tick = journals.stat().st_mtime_ns - 5 * 10**9
    os.utime(journals, ns=(tick, tick))
    reader, bell = following(tmp_path, Listing()), Bell(tmp_path, fs=FileSystem())
    tell(writer, 2)
    os.utime(journals, ns=(tick, tick))
    while bell.is_ringing():
        assert hear(reader) == []
    now.seconds += 2
    assert writer.is_due
    writer.flush()
    assert bell.is_ringing()
    assert hear(reader) == [2]
    now.seconds += 2
    writer.flush()
    while bell.is_ringing():
        pass
    assert not writer.is_due


def test_a_segment_that_is_full_and_the_next_are_read_to_their_ends(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    tell(writer, 1)
    reader = following(tmp_path)
    tell(writer, 2)
    for path in (tmp_path / JOURNAL).glob("*.kvj"):
        path.unlink()
    # It begins another one, and nobody has read the end of the one before.
    tell(writer, 3)
    tell(writer, 4)
    assert hear(reader) == [3, 4]
    assert len(marks(tmp_path)) == 1


@pytest.mark.parametrize("mark", [Mark("", 0, 10**15), Mark("", 0, 0), Mark("", 99, 10**15), Mark("", 99, 0)])
def test_marks_that_somebody_adds_silence_nobody_and_keep_nobody_busy(tmp_path: Path, mark: Mark) -> None:
    writer, fs = JournalWriter(tmp_path), Counting()
    tell(writer, 1)
    reader = following(tmp_path, fs)
    (tmp_path / mark_path(mark._replace(writer=writer.writer))).touch()
    (tmp_path / mark_path(mark._replace(writer=STRANGER))).touch()
    for number in range(2, 5):
        tell(writer, number)
        assert hear(reader) == [number]
    for _ in range(100):
        assert hear(reader) == []
    assert reader.has_read_all
    fs.calls.clear()
    late = following(tmp_path, fs)
    tell(writer, 5)
    assert hear(late) == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_mark_silences_nobody(tmp_path: Path, kind: str) -> None:
    writer = JournalWriter(tmp_path)
    tell(writer, 1)
    reader = following(tmp_path)
    plant(kind, tmp_path / mark_path(Mark(writer.writer, 0, 3 * RECORD_BYTES)))
    plant(kind, tmp_path / mark_path(Mark(STRANGER, 0, 3 * RECORD_BYTES)))
    for number in (2, 3):
        tell(writer, number)
        assert hear(reader) == [number]


def test_marks_of_journals_that_are_gone_go_when_they_are_old(tmp_path: Path) -> None:
    there, gone, young = (JournalWriter(tmp_path) for _ in range(3))
    for number, writer in enumerate((there, gone, young)):
        tell(writer, number)
    for path in marks(tmp_path):
        if young.writer not in path.name:
            os.utime(path, ns=(10**9, 10**9))
    for writer in (gone, young):
        (tmp_path / journal_path(JournalName(writer.writer, 0))).unlink()
    assert remove_old_journals(tmp_path, 3600.0) == []
    assert {path.name[1:33] for path in marks(tmp_path)} == {there.writer, young.writer}


def test_a_mark_is_a_part_of_a_tier(root: Path) -> None:
    store = engine(root)
    store.put(key(1), payload(1))
    store.synchronize()
    assert len(marks(root)) == 1
    assert check(root) == []
    assert store.state(key(1)) is Presence.PRESENT
