# SPDX-License-Identifier: Apache-2.0
"""Hears what other processes of a root tell in their journals, by reading on where they were left.

A mark beside a journal says how long it is. So one listing says which journals have something to be read.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.fs import LOCAL, NO_FILE, READ_FLAGS, FileSystem
from kvtier_connector.store.journal import DEFAULT_LIMITS, LOST, RECORD_BYTES, Op, Record, decode_record, is_head
from kvtier_connector.store.layout import JOURNAL, JournalName, Mark, journal_path, parse_journal_path, parse_mark_path

_READ_BYTES = 4096 * RECORD_BYTES
_FEW_RECORDS = 64  # nothing else of the process runs while they are decoded
_MOST_STALLS = 3
"""Reads after which a record that stays unreadable is damaged, and not on its way."""
_MOST_WAITS = 64
"""Reads after which nobody waits any more for what a mark tells of: some nodes have old bytes in mind for a minute."""
_DOUBT_SECONDS = 240.0
"""A journal whose mark has been the same for so long is read once more: its writer may have died before the next. Walks
find that too, so one is read with each listing: each of a hundred readers would open a hundred at once."""
_MISSING_SECONDS = 24 * 3600.0
"""For so long it is known up to where a journal was read that is not listed any more."""


@dataclass(slots=True)
class _Tail:
    """Where the reader is in one segment."""

    offset: int
    stalls: int = 0
    is_met: bool = False
    """Whether it was read once."""
    is_over: bool = False
    """Nothing will be added: its writer has begun the next segment."""
    is_strange: bool = False
    """Its head cannot be read: a later release wrote it, or nobody has written it as a whole yet."""
    marks: frozenset[Mark] = frozenset()
    """Of its writer, as they were last seen; more than one where a listing caught a change, or somebody meddles."""
    doubted_at: float = math.inf
    """When it is read although they tell of nothing new; infinite once it was."""
    told: int = 0
    """Bytes that they say it has; 0 where they do not, or nobody waits for them any more."""
    whole: float = math.inf
    """Bytes before which whatever cannot be read is damaged: behind them a write may be under way, or have failed."""
    waits: int = 0
    """Reads since then that have found less."""

    @property
    def is_behind(self) -> bool:
        """Whether less was read than is told of; a head alone nobody needs to read."""
        return self.told > max(self.offset, RECORD_BYTES)


class JournalReader:
    """Follows the journals of all processes but one, from the moment of `start` on.

    Owned by one thread at a time; the caller sees to that.
    """

    def __init__(
        self,
        root: Path,
        *,
        fs: FileSystem = LOCAL,
        but: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; `but` is the writer whose journal is left out, the caller's own."""
        self._now, self._root, self._fs, self._but = now, str(root), fs, but
        self._last_records: dict[str, float] = {}
        """When each writer was last heard of."""
        self._tails: dict[JournalName, _Tail] = {}
        """Of the journals that were listed last."""
        self._missing: dict[JournalName, tuple[float, _Tail]] = {}
        """Those of others, and since when they are missing: a server that is away takes its files out of listings."""
        self._is_started = False
        self.has_read_all = False
        """Whether the last read left nothing that was there: nothing half-written or stale on the server."""
        self.damaged = 0
        """How many records could not be read, because their bytes are wrong."""

    def start(self, places: Mapping[str, int] | None = None) -> None:
        """Remember where the journals end now; a second call does nothing.

        Walk the root after this and not before: then each block is found by the walk, or is in a journal, or both.

        Args:
            places: What `places` returned to an earlier process: begin there, and at the start of all other journals.

        Raises:
            StoreUnavailable: the journals cannot be looked at.
        """
        if self._is_started:
            return
        try:
            names, marks = self._list()
            for name in names:
                if places is not None:
                    self._tails[name] = _Tail(places.get(journal_path(name), 0))
                    continue
                # One that is gone since it was listed has no end.
                with contextlib.suppress(FileNotFoundError):
                    self._tails[name] = self._end(name, marks.get(name.writer, frozenset()))
                    # It may be a dead process's; that is found out after a while, and meanwhile costs room only.
                    self._last_records[name.writer] = self._now()
        except OSError as error:
            self._tails.clear()
            raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be looked at: {error}") from error
        self._is_started = True

    def places(self) -> dict[str, int]:
        """Return up to where each journal was read, by its path relative to the root."""
        missing = {name: tail for name, (_, tail) in self._missing.items()}
        return {journal_path(name): tail.offset for name, tail in {**missing, **self._tails}.items()}

    def read(self) -> Iterator[list[Record]]:
        """Yield what was added since the last read, in the order of each journal.

        That takes one listing, and one read for each journal whose mark tells of more, or that has none.

        Raises:
            StoreUnavailable: at the end, if a journal could not be read; the others were.
        """
        self.start()
        self.has_read_all = False
        failed: OSError | None = None
        try:
            names, marks = self._list()
        except OSError as error:
            raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be listed: {error}") from error
        last = {name.writer: name.number for name in names}
        self._keep(names, last)
        is_all = True
        doubted = self._doubt()
        for name, tail in self._tails.items():
            if tail.is_over:
                continue
            is_due = self._is_due(name, tail, marks.get(name.writer, frozenset()))
            if not (is_due or tail is doubted):
                self._meet(name, tail)
                continue
            try:
                for records in self._follow(name, tail):
                    # Who only removes, as the janitor does, takes no room.
                    if any(record.op != Op.GONE for record in records):
                        self._last_records[name.writer] = self._now()
                    yield records
                self._meet(name, tail)
                self._end_read(tail)
            except OSError as error:
                # One that was removed on the server, or is no file, says nothing of the volume, which has listed them;
                # nor does one in which nothing is told of.
                is_refused = error.errno not in LOST
                self._end_read(tail, is_refused=is_refused)
                if is_refused and is_due:
                    failed = error
                is_all &= error.errno in NO_FILE or not is_due
                continue
            is_all &= tail.stalls == 0 and not tail.is_behind
            # Listed before it was read: the writer had begun the next one by then, so what was read was all.
            tail.is_over = tail.is_over or (name.number < last[name.writer] and tail.stalls == 0)
        if failed is not None:
            raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be read: {failed}") from failed
        self.has_read_all = is_all

    def count_active(self, since: float) -> int:
        """Return how many that may write were heard of since then, on the clock passed in; forget the others."""
        self._last_records = {writer: at for writer, at in self._last_records.items() if at >= since}
        return len(self._last_records)

    def _meet(self, name: JournalName, tail: _Tail) -> None:
        if not tail.is_met and tail.offset <= RECORD_BYTES:
            # It has said nothing yet, but that it is there.
            self._last_records[name.writer] = self._now()
        tail.is_met = True

    def _keep(self, names: list[JournalName], last: Mapping[str, int]) -> None:
        """Take the listed journals for those there are, and keep in mind how far the others were read."""
        now, before = self._now(), self._tails
        missing = {name: (now, tail) for name, tail in before.items()} | self._missing
        self._tails = {name: before.get(name) or (missing[name][1] if name in missing else _Tail(0)) for name in names}
        self._missing = {
            name: (since, tail)
            for name, (since, tail) in missing.items()
            # What its writer has removed itself never comes back.
            if name not in self._tails
            and now - since < _MISSING_SECONDS
            and name.number > last.get(name.writer, 0) - DEFAULT_LIMITS.segments
        }
        if gone := missing.keys() - self._tails.keys() - self._missing.keys():
            there = {name.writer for name in (*self._tails, *self._missing)}
            for writer in {name.writer for name in gone} - there:
                self._last_records.pop(writer, None)

    def _is_due(self, name: JournalName, tail: _Tail, marks: frozenset[Mark]) -> bool:
        """Say whether there may be something in a segment that was not read, by what its writer shows."""
        last = max(marks, default=None)
        is_last = last is not None and last.number == name.number
        if marks != tail.marks:
            tail.marks, tail.waits, tail.doubted_at = marks, 0, self._now() + _DOUBT_SECONDS
            tail.told = last.size if last is not None and is_last else 0
            tail.whole = math.inf if last is None or last.number > name.number else tail.told
            if tail.is_strange:
                tail.is_strange, tail.stalls = False, 0
        # Of an earlier segment it is not said how long it is, and a later one was begun just now.
        is_due = not is_last or tail.stalls > 0 or tail.is_behind
        return is_due and not tail.is_strange

    def _doubt(self) -> _Tail | None:
        """Return the journal whose turn it is to be read although nothing is told of, if there is one."""
        now = self._now()
        readable = (tail for tail in self._tails.values() if not (tail.is_over or tail.is_strange))
        return min(
            (tail for tail in readable if tail.doubted_at <= now), key=lambda tail: tail.doubted_at, default=None
        )

    def _end_read(self, tail: _Tail, *, is_refused: bool = False) -> None:
        """Note that a journal was read, as far as it is there; one that could not be is asked for again."""
        if tail.is_behind and not is_refused:
            tail.waits += 1
            if tail.waits >= _MOST_WAITS:
                tail.told = 0
        if tail.doubted_at <= (now := self._now()):
            tail.doubted_at = now + _DOUBT_SECONDS if is_refused else math.inf

    def _end(self, name: JournalName, marks: frozenset[Mark]) -> _Tail:
        if len(marks) == 1 and (mark := max(marks)).number >= name.number:
            if mark.number > name.number:
                return _Tail(0, is_over=True)
            size = mark.size
        else:
            size = self._fs.stat(self._path(name)).st_size
        return _Tail(size - size % RECORD_BYTES)

    def _list(self) -> tuple[list[JournalName], dict[str, frozenset[Mark]]]:
        """Return the journals of others in order, and the marks beside them by writer."""
        names: list[JournalName] = []
        marks: dict[str, frozenset[Mark]] = {}
        try:
            entries = self._fs.scandir(f"{self._root}/{JOURNAL}")
        except FileNotFoundError:
            return names, marks
        for entry in entries:
            path = f"{JOURNAL}/{entry.name}"
            if (name := parse_journal_path(path)) is not None and name.writer != self._but:
                names.append(name)
            elif (mark := parse_mark_path(path)) is not None:
                marks[mark.writer] = marks.get(mark.writer, frozenset()) | {mark}
        return sorted(names), marks

    def _path(self, name: JournalName) -> str:
        return f"{self._root}/{journal_path(name)}"

    def _follow(self, name: JournalName, tail: _Tail) -> Iterator[list[Record]]:
        buffer = memoryview(bytearray(_READ_BYTES))
        fd = self._fs.open(self._path(name), READ_FLAGS)
        try:
            while True:
                before = tail.offset
                count = self._fs.preadv(fd, [buffer], before)
                data = buffer[: count - count % RECORD_BYTES]
                if tail.offset == 0 and data:
                    if not is_head(data):
                        # A head is written with its first records: half a one is on its way, or is a later release's.
                        tail.stalls += tail.whole > 0
                        tail.is_strange = tail.stalls > _MOST_STALLS
                        return
                    tail.offset = RECORD_BYTES
                    data = data[RECORD_BYTES:]
                yield from self._take(tail, data)
                if count < _READ_BYTES or tail.stalls or tail.offset == before:
                    return
        finally:
            with contextlib.suppress(OSError):
                self._fs.close(fd)

    def _take(self, tail: _Tail, data: memoryview) -> Iterator[list[Record]]:
        """Yield the records up to the first that cannot be read, a few at a time; go past it if it stays so."""
        records: list[Record] = []
        is_skipping = tail.stalls >= _MOST_STALLS
        for start in range(0, data.nbytes, RECORD_BYTES):
            if (record := decode_record(data[start : start + RECORD_BYTES])) is None:
                if tail.offset >= tail.whole:
                    # Its writer will write there again, and then say so.
                    tail.stalls = 0
                    break
                if not is_skipping:
                    tail.stalls += 1
                    break
                self.damaged += 1
            else:
                tail.stalls = 0
                records.append(record)
            tail.offset += RECORD_BYTES
            if len(records) == _FEW_RECORDS:
                yield records
                records = []
        else:
            tail.stalls = 0 if data else tail.stalls
        if records:
            yield records
