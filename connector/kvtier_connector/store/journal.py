# SPDX-License-Identifier: Apache-2.0
"""Processes that share a root tell each other what they stored, used and removed, in one append-only file each.

What a journal says is news, not truth: the files are. A record that is lost costs a block computed again, or a miss,
until the next walk of the root. Nothing here runs by itself: a background thread of the caller flushes and reads.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.store.bell import Bell
from kvtier_connector.store.fs import (
    FIRST_WRITE_FLAGS,
    LOCAL,
    NEXT_WRITE_FLAGS,
    NO_FILE,
    READ_FLAGS,
    FileSystem,
    make_directories,
    new_token,
)
from kvtier_connector.store.layout import (
    JOURNAL,
    NO_LINEAGE,
    BlockKey,
    JournalName,
    Lineage,
    journal_path,
    parse_journal_path,
)
from kvtier_connector.store.publishing import write_all
from kvtier_connector.store.records import (
    DEFAULT_LIMITS,
    RECORD_BYTES,
    JournalLimits,
    Op,
    Record,
    decode_record,
    encode_head,
    encode_record,
    is_head,
)

_READ_BYTES = 4096 * RECORD_BYTES
_FEW_RECORDS = 64  # nothing else of the process runs while they are decoded
_LOST = {errno.ENOENT, errno.ESTALE, *NO_FILE}
_MOST_STALLS = 3
"""Reads after which a record that stays unreadable is damaged, and not on its way."""


class JournalWriter:
    """Appends to the journal of this process.

    `append` may be called from any thread and only touches memory. `flush` makes the system calls: one thread at a time
    gets in, and `_flushing` is held meanwhile; `_lock` guards what both touch and is never held over a system call.
    """

    def __init__(
        self,
        root: Path,
        *,
        fs: FileSystem = LOCAL,
        limits: JournalLimits = DEFAULT_LIMITS,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; nothing is written before the first flush."""
        self.writer = new_token()
        """Names this process's journal; a reader of the same process leaves it out."""
        self._root = str(root)
        self._fs = fs
        self._bell = Bell(root, fs=fs)
        self._limits = limits
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._recent: set[BlockKey] = set()
        self._less_recent: set[BlockKey] = set()
        self._turned_at = now()
        self._flushing = threading.Lock()
        self._number = 0
        self._offset = 0
        self._shown_at = -math.inf

    def append(
        self, op: Op, key: BlockKey, payload_bytes: int, lineage: Lineage = NO_LINEAGE, *, ahead_seconds: float = 0.0
    ) -> None:
        """Note what was done, for the next flush; a RETAINED for `ahead_seconds`. A repeated USED is left out."""
        with self._lock:
            if op is Op.DEMOTED:
                # Whoever uses it next is to be heard.
                self._recent.discard(key)
                self._less_recent.discard(key)
            elif op is not Op.GONE and self._was_seen(key) and op is Op.USED:
                return
            time_ns = self._clock() + int(ahead_seconds * 1e9)
            self._pending.append(encode_record(Record(op, key, payload_bytes, time_ns, lineage)))
            self._trim()

    @property
    def dropped(self) -> int:
        """How many records were given up because the volume did not take them."""
        return self._dropped

    @property
    def pending(self) -> int:
        """How many records wait for the next flush."""
        return len(self._pending)

    def flush(self) -> int:
        """Write what was noted and return how many records that were; what cannot be written is tried again next time.

        The first call begins the journal even without a record: others count who may write by the journals.

        Raises:
            StoreUnavailable: the volume does not take it.
        """
        with self._flushing:
            with self._lock:
                batch = list(self._pending)
                self._pending.clear()
            if not batch and self._offset:
                self._show_life()
                return 0
            try:
                self._write(b"".join(batch))
            except OSError as error:
                if not batch:
                    return 0
                with self._lock:
                    self._pending.extendleft(reversed(batch))
                    self._trim()
                raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be written: {error}") from error
        return len(batch)

    def show_life(self) -> None:
        """Have the volume note that this process is there, although it may store nothing; now and then, if it can.

        Whoever gives up generations that nobody uses goes by when their journals were last written to. So an empty one
        is begun where there is none, and later only its time is renewed.
        """
        with self._flushing:
            self._show_life()

    def _show_life(self) -> None:
        """Renew the time of the journal if it is time to; the caller holds `_flushing`."""
        if self._now() - self._shown_at < self._limits.life_seconds:
            return
        self._shown_at = self._now()
        with contextlib.suppress(OSError):
            if self._offset:
                try:
                    self._fs.touch(self._path(self._number))
                except FileNotFoundError:
                    # Somebody took it for a dead process's.
                    self._begin_segment()
            if not self._offset:
                self._write(b"")

    def _was_seen(self, key: BlockKey) -> bool:
        """Note the block as used now, and say whether it had been already; the caller holds `_lock`."""
        now = self._now()
        is_over = now - self._turned_at >= self._limits.used_window_seconds / 2
        if is_over or len(self._recent) >= self._limits.buffered_records:
            self._less_recent, self._recent, self._turned_at = self._recent, set(), now
        if key in self._recent or key in self._less_recent:
            return True
        self._recent.add(key)
        return False

    def _trim(self) -> None:
        while len(self._pending) > self._limits.buffered_records:
            self._pending.popleft()
            self._dropped += 1

    def _write(self, data: bytes) -> None:
        if self._offset and self._offset + len(data) > self._limits.segment_bytes:
            self._begin_segment()
        try:
            self._append(data)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            # Somebody took this segment for a dead process's, put something in its place, or removed the tree under us.
            if self._offset:
                self._begin_segment()
            make_directories(self._fs, f"{self._root}/{JOURNAL}")
            self._append(data)

    def _begin_segment(self) -> None:
        self._number += 1
        self._offset = 0
        if (oldest := self._number - self._limits.segments) >= 0:
            with contextlib.suppress(OSError):
                self._fs.unlink(self._path(oldest))

    def _append(self, data: bytes) -> None:
        """Write at the place where the last whole write ended, over what a failed one may have left there."""
        if self._offset == 0:
            data = encode_head(self.writer, self._clock()) + data
        # Opened anew each time: an NFS client sends what was written when the file is closed, and others see it then.
        fd = self._fs.open(self._path(self._number), FIRST_WRITE_FLAGS if self._offset == 0 else NEXT_WRITE_FLAGS)
        try:
            write_all(self._fs, fd, memoryview(data), self._offset)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.close(fd)
            raise
        self._fs.close(fd)
        self._bell.ring()
        self._offset += len(data)
        self._shown_at = self._now()

    def _path(self, number: int) -> str:
        return f"{self._root}/{journal_path(JournalName(self.writer, number))}"


@dataclass(slots=True)
class _Tail:
    """Where the reader is in one segment."""

    offset: int
    stalls: int = 0
    is_met: bool = False
    """Whether it was read once."""
    is_over: bool = False
    """Nothing will be added: its writer has begun the next segment, or a later release wrote it."""


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
            for name in self._list():
                if places is not None:
                    self._tails[name] = _Tail(places.get(journal_path(name), 0))
                    continue
                size = self._fs.stat(self._path(name)).st_size
                # It may be a dead process's; that is found out after a while, and meanwhile costs room only.
                self._last_records[name.writer] = self._now()
                self._tails[name] = _Tail(size - size % RECORD_BYTES)
        except FileNotFoundError:
            self._tails.clear()
        except OSError as error:
            self._tails.clear()
            raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be looked at: {error}") from error
        self._is_started = True

    def places(self) -> dict[str, int]:
        """Return up to where each journal was read, by its path relative to the root."""
        return {journal_path(name): tail.offset for name, tail in self._tails.items()}

    def read(self) -> Iterator[list[Record]]:
        """Yield what was added since the last read, in the order of each journal: one listing, and one read a journal.

        Raises:
            StoreUnavailable: at the end, if a journal could not be read; the others were.
        """
        self.start()
        self.has_read_all = False
        failed: OSError | None = None
        try:
            names = self._list()
        except OSError as error:
            raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be listed: {error}") from error
        last = {name.writer: name.number for name in names}
        self._tails = {name: self._tails.get(name, _Tail(0)) for name in names}
        is_all = True
        for name, tail in self._tails.items():
            if tail.is_over:
                continue
            try:
                for records in self._follow(name, tail):
                    # Who only removes, as the janitor does, takes no room.
                    if any(record.op != Op.GONE for record in records):
                        self._last_records[name.writer] = self._now()
                    yield records
                if not tail.is_met and tail.offset <= RECORD_BYTES:
                    # It has said nothing yet, but that it is there.
                    self._last_records[name.writer] = self._now()
                tail.is_met = True
            except OSError as error:
                # One that was removed on the server, or is no file, says nothing of the volume, which has listed them.
                if error.errno not in _LOST:
                    failed = error
                is_all &= error.errno in NO_FILE
                continue
            is_all &= tail.stalls == 0
            # Listed before it was read: the writer had begun the next one by then, so what was read was all.
            tail.is_over = tail.is_over or (name.number < last[name.writer] and tail.stalls == 0)
        if failed is not None:
            raise StoreUnavailable(f"{self._root}/{JOURNAL}: cannot be read: {failed}") from failed
        self.has_read_all = is_all

    def count_active(self, since: float) -> int:
        """Return how many that may write were heard of since then, on the clock passed in; forget the others."""
        self._last_records = {writer: at for writer, at in self._last_records.items() if at >= since}
        return len(self._last_records)

    def _list(self) -> list[JournalName]:
        try:
            entries = self._fs.scandir(f"{self._root}/{JOURNAL}")
        except FileNotFoundError:
            return []
        names = (parse_journal_path(f"{JOURNAL}/{entry.name}") for entry in entries)
        return sorted(name for name in names if name is not None and name.writer != self._but)

    def _path(self, name: JournalName) -> str:
        return f"{self._root}/{journal_path(name)}"

    def _follow(self, name: JournalName, tail: _Tail) -> Iterator[list[Record]]:
        buffer = memoryview(bytearray(_READ_BYTES))
        fd = self._fs.open(self._path(name), READ_FLAGS)
        try:
            while True:
                count = self._fs.preadv(fd, [buffer], tail.offset)
                data = buffer[: count - count % RECORD_BYTES]
                if tail.offset == 0 and data:
                    if not is_head(data):
                        # A head is written with its first records: half a one is on its way, or is a later release's.
                        tail.stalls += 1
                        tail.is_over = tail.stalls > _MOST_STALLS
                        return
                    tail.offset = RECORD_BYTES
                    data = data[RECORD_BYTES:]
                yield from self._take(tail, data)
                if count < _READ_BYTES or tail.stalls:
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
