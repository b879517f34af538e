# SPDX-License-Identifier: Apache-2.0
"""Reads the journals that engines append to: which blocks they stored, used and removed.

Only the janitor reads journals. Their records are hints: the caller looks at a block's file before it counts the block
or forgets it. Each read continues at the place where the last one ended.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvtier_connector.store.fs import NO_FILE, FileSystem, list_directory, opened
from kvtier_connector.store.journal import RECORD_BYTES, Op, Record, decode_record, is_head
from kvtier_connector.store.layout import JOURNAL, JournalName, journal_path, parse_journal_path

ACTIVE_SECONDS = 600.0
"""A process that told of a block within this time counts as a writer."""
_READ_BYTES = 4096 * RECORD_BYTES
_PAUSE_SECONDS = 5.0
"""A journal without new records is opened again after this."""
_IDLE_PAUSE_SECONDS = 60.0
"""The same for a journal without new records for `ACTIVE_SECONDS`: its process is idle or dead."""
_MOST_STALLS = 3
"""Reads after which a record that stays unreadable is skipped; before, it may be in the middle of being written."""
_MISSING_SECONDS = 24 * 3600.0
"""Places in journals that are not listed any more are kept so long: a server that is away hides its files."""
_FLUSH_SECONDS = 60.0
"""Longest time between an event and its record, unless the volume refuses writes."""
_LONGEST_RETENTION_SECONDS = 30 * 86_400.0


@dataclass(slots=True)
class _Segment:
    """Progress in one file."""

    offset: int
    listed_at: float
    active_at: float
    """When it had new records; in the beginning, when it was first listed."""
    next_at: float = 0.0
    read_at: float = -math.inf
    stalls: int = 0
    is_over: bool = False
    """Whether nothing will be added, since its writer has begun the next segment."""


class _Unread(NamedTuple):
    """A journal, or a directory of journals, that cannot be read."""

    message: str
    size: int
    """Length of the file; -1 where it is not known."""
    grew_at: float
    """When its length was first seen; now where the length is not known."""


class JournalFollower:
    """The journals of all generations of one tier. Owned by one thread."""

    def __init__(
        self,
        tier_dir: str,
        *,
        fs: FileSystem,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; `clock` is the volume's time, in nanoseconds since 1970."""
        self._tier_dir, self._fs, self._clock, self._now = tier_dir, fs, clock, now
        self._places: Mapping[str, Mapping[str, int]] = {}
        self._taken_ns = 0
        self._segments: dict[str, dict[JournalName, _Segment]] = {}
        self._read_ns: dict[str, int] = {}
        """When all journals of a generation had been read, by the volume's clock."""
        self._reported_at: dict[str, float] = {}
        """When each writer last told of a block."""
        self.has_read_all = True
        """Whether a pass over all journals is complete; otherwise the next call continues it."""
        self._pass_at = now()
        """When the current pass began."""
        self.damaged = 0
        """Records that could not be read."""
        self._unread: dict[str, _Unread] = {}
        """By path relative to the tier's directory."""

    def resume(self, places: Mapping[str, Mapping[str, int]], *, taken_ns: int) -> None:
        """Read on from the `places` of an earlier process, taken at that time; else journals are read as a whole."""
        self._places, self._taken_ns = places, taken_ns

    @property
    def writers(self) -> int:
        """How many processes told of a block lately, or wrote a journal that an earlier janitor had read."""
        since = self._now() - ACTIVE_SECONDS
        self._reported_at = {writer: at for writer, at in self._reported_at.items() if at >= since}
        return len(self._reported_at)

    @property
    def problem(self) -> str:
        """Message about unreadable journals; empty without any."""
        if not self._unread:
            return ""
        more = f", and {len(self._unread) - 1} others" if len(self._unread) > 1 else ""
        found = next(iter(self._unread.values())).message
        return f"journals: {found}{more}; their blocks are counted by walking, so engines may store less often"

    @property
    def unread_since(self) -> float:
        """When an unreadable journal last grew, as far as is known: later stores are found only by walking."""
        return max((each.grew_at for each in self._unread.values()), default=-math.inf)

    def has_opened_all(self, since: float) -> bool:
        """Return whether every journal was opened after that time; if not, the next calls of `read` open the rest."""
        behind = [
            each
            for segments in self._segments.values()
            for each in segments.values()
            if each.read_at < since and each.listed_at >= self._pass_at and not each.is_over
        ]
        for each in behind:
            each.next_at = 0.0
        return not behind

    def read(
        self, digests: Iterable[str], has_time: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[str, list[Record]]]:
        """Yield new records with their generation, in the order of each journal, while there is time."""
        if self.has_read_all:
            self._pass_at = self._now()
        self.has_read_all = True
        digests = list(digests)
        self._unread = {path: each for path, each in self._unread.items() if path.partition("/")[0] in digests}
        self._segments = {digest: each for digest, each in self._segments.items() if digest in digests}
        for digest in digests:
            directory = f"{digest}/{JOURNAL}"
            try:
                due = self._list_due(digest)
            except OSError as error:
                self._fail(directory, str(error), -1)
                continue
            self._unread.pop(directory, None)
            began_ns = self._clock()
            for name, segment, is_last in due:
                if not has_time():
                    self.has_read_all = False
                    return
                is_more = True
                while is_more:
                    try:
                        records, is_more = self._read(digest, name, segment, is_last=is_last)
                    except OSError as error:
                        path = f"{digest}/{journal_path(name)}"
                        if error.errno in {errno.ENOENT, *NO_FILE}:
                            self._unread.pop(path, None)
                        else:
                            self._fail(path, str(error))
                            self._put_off(segment)
                        break
                    if records:
                        yield digest, self._timed(digest, records)
            self._read_ns[digest] = began_ns

    def places(self) -> dict[str, dict[str, int]]:
        """Return the position up to which each journal was read, by generation."""
        return {
            digest: {journal_path(name): segment.offset for name, segment in segments.items()}
            for digest, segments in self._segments.items()
        }

    def _list_due(self, digest: str) -> list[tuple[JournalName, _Segment, bool]]:
        """Return the segments to open now, the longest waiting first, and whether each is its writer's last."""
        entries = list_directory(self._fs, f"{self._tier_dir}/{digest}/{JOURNAL}")
        names = [name for entry in entries if (name := parse_journal_path(f"{JOURNAL}/{entry.name}")) is not None]
        for path in [path for path in self._unread if path.startswith(f"{digest}/{JOURNAL}/")]:
            if parse_journal_path(path.removeprefix(f"{digest}/")) not in names:
                del self._unread[path]
        last = {name.writer: name.number for name in sorted(names)}
        now, known, places = self._now(), self._segments.setdefault(digest, {}), self._places.get(digest, {})
        for name in names:
            if name not in known:
                known[name] = _Segment(places.get(journal_path(name), 0), now, now)
            known[name].listed_at = now
        for name in [name for name, segment in known.items() if now - segment.listed_at > _MISSING_SECONDS]:
            del known[name]
        due = [
            (name, known[name], name.number == last[name.writer])
            for name in sorted(names)
            if not known[name].is_over and known[name].next_at <= self._pass_at
        ]
        return sorted(due, key=lambda item: item[1].next_at)

    def _read(self, digest: str, name: JournalName, segment: _Segment, *, is_last: bool) -> tuple[list[Record], bool]:
        """Return the next records of a journal, and whether there are more of them."""
        damaged, path = self.damaged, f"{digest}/{journal_path(name)}"
        is_first, segment.read_at = segment.read_at < 0, self._now()
        buffer = memoryview(bytearray(_READ_BYTES))
        # Opened anew each time: a client of NFS asks the server for the length of a file whenever it opens it.
        with opened(self._fs, f"{self._tier_dir}/{path}") as fd:
            count = self._fs.preadv(fd, [buffer], segment.offset)
            if is_first and segment.offset > RECORD_BYTES:
                # An earlier janitor read its records.
                age_seconds = (self._clock() - self._fs.fstat(fd).st_mtime_ns) / 1e9
                self._reported_at[name.writer] = self._now() - age_seconds
        records = self._decode(segment, buffer[: count - count % RECORD_BYTES])
        if not segment.offset and segment.stalls >= _MOST_STALLS:
            self._fail(path, f"{self._tier_dir}/{path}: no journal of this release")
        else:
            self._unread.pop(path, None)
        if any(record.op != Op.GONE for record in records):
            # A process that only removes needs no share of the room.
            self._reported_at[name.writer] = self._now()
        # Of a file of any length without a record, one piece is read at a time.
        is_more = count == _READ_BYTES and not segment.stalls and self.damaged == damaged
        segment.is_over = not is_last and not segment.stalls and count < _READ_BYTES
        if records:
            segment.active_at = segment.next_at = self._now()
        else:
            self._put_off(segment)
        return records, is_more

    def _put_off(self, segment: _Segment) -> None:
        """Pause before a journal without new records is opened again."""
        is_idle = self._now() - segment.active_at > ACTIVE_SECONDS
        segment.next_at = self._now() + (_IDLE_PAUSE_SECONDS if is_idle else _PAUSE_SECONDS)

    def _fail(self, path: str, message: str, size: int | None = None) -> None:
        """Record that a journal cannot be read, and whether it has grown."""
        if size is None:
            size = -1
            with contextlib.suppress(OSError):
                size = self._fs.stat(f"{self._tier_dir}/{path}").st_size
        before = self._unread.get(path)
        is_same = before is not None and before.size == size >= 0
        self._unread[path] = _Unread(message, size, before.grew_at if before and is_same else self._now())

    def _decode(self, segment: _Segment, data: memoryview) -> list[Record]:
        """Return the records before the first unreadable one; skip that if it stays unreadable."""
        if segment.offset == 0 and data:
            if not is_head(data):
                # It is half written, or of a later release.
                segment.stalls = min(segment.stalls + 1, _MOST_STALLS)
                return []
            segment.offset, segment.stalls = RECORD_BYTES, 0
            data = data[RECORD_BYTES:]
        records: list[Record] = []
        is_skipping = segment.stalls >= _MOST_STALLS
        for start in range(0, data.nbytes, RECORD_BYTES):
            record = decode_record(data[start : start + RECORD_BYTES])
            if record is None and not is_skipping:
                segment.stalls += 1
                return records
            segment.offset += RECORD_BYTES
            if record is None:
                self.damaged += 1
            else:
                records.append(record)
        segment.stalls = 0
        return records

    def _timed(self, digest: str, records: list[Record]) -> list[Record]:
        """Return the records with times between the last reading and now, whatever the clocks of writers say."""
        now_ns = self._clock()
        since_ns = self._read_ns.get(digest, self._taken_ns) - int(_FLUSH_SECONDS * 1e9)
        return [record._replace(time_ns=_bounded(record, since_ns, now_ns)) for record in records]


def _bounded(record: Record, since_ns: int, now_ns: int) -> int:
    if record.op == Op.RETAINED:
        return min(record.time_ns, now_ns + int(_LONGEST_RETENTION_SECONDS * 1e9))
    return min(max(record.time_ns, since_ns), now_ns)
