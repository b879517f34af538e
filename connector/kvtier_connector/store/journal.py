# SPDX-License-Identifier: Apache-2.0
"""Journals and purge log: append-only files by which the processes of a root report what they did to its blocks.

Each writer has a journal: a head, then records of one length, each with its own checksum. A record is a hint. Its
reader looks at the block before it relies on the record, and a lost record costs a block computed again. FORMAT.md
beside the package documents every offset; the two change together.

The purge log is one file in each generation that tells writers of purges, so that no queued block lands afterwards. The
purger appends a line, then removes files until a pass over the directory finds none. A writer reads the log between
writing a block aside and renaming it; a block queued before the writer saw a purge of it gets no name. So a block
either is renamed before a pass begins, which finds it, or is refused. No clocks of two machines are compared. A writer
that looks late refuses one store more than needed, which costs a recompute.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store import layout
from kvtier_connector.store.fs import (
    CREATE_FLAGS,
    FIRST_WRITE_FLAGS,
    LOCAL,
    NEXT_WRITE_FLAGS,
    NO_FILE,
    READ_FLAGS,
    FileSystem,
    make_directories,
    new_token,
    opened,
    read_bytes,
    read_file,
    replacing,
    write_all,
)
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, JournalName, Lineage, is_valid, journal_path

RECORD_BYTES = 128
"""Length of a record and of the head. A tail that does not fill one is torn."""
JOURNAL_MAGIC = b"KVTJ"
JOURNAL_VERSION = 2
MAX_PAYLOAD_BYTES = 1 << 40
"""Largest length of a block in a record; a larger number is damage."""
MAX_TIME_NS = (1 << 63) - 1
"""Latest time in a record: the year 2262. Readers keep times in signed numbers of 64 bits."""

_LOST = frozenset({errno.ENOENT, errno.ESTALE, *NO_FILE})
"""Errors of a journal that was removed, or replaced by something else."""
_PATIENCE_SECONDS = 10.0
"""A segment that fails for longer is left, unless its volume is full or read-only."""
_CRC = struct.Struct("<I")
_CRC_OFFSET = RECORD_BYTES - _CRC.size
_HEAD = struct.Struct("<4sIII16sQ84x")
_RECORD = struct.Struct(f"<BBBxIQQI{layout.MAX_HASH_BYTES}s{layout.MAX_HASH_BYTES}s{layout.MAX_TENANT_CHARACTERS}s")


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalLimits:
    """How much a writer keeps in memory and on the volume."""

    used_window_seconds: float = 60.0
    """A prefix that is used again within half of this is not noted again; after all of it, it is."""
    buffered_records: int = 1 << 16
    """While the volume does not take them, older records than this many are dropped."""
    segment_bytes: int = 4 << 20
    """A segment that would grow beyond it is left, and the next one begun."""
    segments: int = 16
    """The writer removes its own segments before these last ones."""
    life_seconds: float = 600.0
    """A journal to which nothing was written for so long has its time renewed while its process is there."""


class Op(enum.IntEnum):
    """An operation of a process on a block."""

    STORED = 1
    """It wrote the block."""
    USED = 2
    """It used the prefix that ends with the block: one record for the whole chain, at most one in a while.

    Eviction treats the blocks before it, which its parents name, as used at the same time.
    """
    GONE = 3
    """It removed the block, or moved it to quarantine."""
    RETAINED = 4
    """A client wants the prefix that ends with the block kept until the record's time."""


class Record(NamedTuple):
    """One line of a journal."""

    op: int
    """An `Op`, or a number of a later release, to be ignored."""
    key: BlockKey
    payload_bytes: int
    """Length of the block, at most `MAX_PAYLOAD_BYTES`. With GONE, bytes freed: 0 if the file was only moved."""
    time_ns: int
    """Nanoseconds since 1970 by the writer's clock, at most `MAX_TIME_NS`; hosts may disagree, so it is for recency
    and nothing else. With RETAINED it lies ahead."""
    lineage: Lineage = NO_LINEAGE
    """Lineage of the block; with GONE there is none."""


def encode_record(record: Record) -> bytes:
    """Return the bytes that `decode_record` reads; raise ValueError for what does not fit."""
    key, lineage = record.key, record.lineage
    if not is_valid(key) or not layout.is_valid_lineage(lineage):
        raise ValueError(f"{record!r}: the key or its lineage does not fit the format")
    if record.payload_bytes > MAX_PAYLOAD_BYTES or record.time_ns > MAX_TIME_NS:
        raise ValueError(f"{record!r}: payload_bytes is above {MAX_PAYLOAD_BYTES}, or time_ns above {MAX_TIME_NS}")
    try:
        fields = _RECORD.pack(
            record.op,
            len(key.hash),
            len(lineage.parent),
            key.group,
            record.payload_bytes,
            record.time_ns,
            lineage.position,
            key.hash,
            lineage.parent,
            key.tenant.encode(),
        )
    except struct.error as error:
        raise ValueError(f"{record!r}: {error}") from error
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_record(data: bytes | memoryview) -> Record | None:
    """Return the record; None for bytes that are half-written, damaged, zeros, or out of the range of a field."""
    if len(data) != RECORD_BYTES or _CRC.unpack_from(data, _CRC_OFFSET)[0] != zlib.crc32(data[:_CRC_OFFSET]):
        return None
    op, hash_bytes, parent_bytes, group, payload_bytes, time_ns, position, padded, parent, tenant = _RECORD.unpack_from(
        data
    )
    if max(hash_bytes, parent_bytes) > layout.MAX_HASH_BYTES or not tenant.isascii():
        return None
    if payload_bytes > MAX_PAYLOAD_BYTES or time_ns > MAX_TIME_NS:
        return None
    key = BlockKey(padded[:hash_bytes], group, tenant.rstrip(b"\0").decode("ascii"))
    lineage = Lineage(parent[:parent_bytes], position)
    if not is_valid(key) or not layout.is_valid_lineage(lineage):
        return None
    return Record(op, key, payload_bytes, time_ns, lineage)


def encode_head(writer: str, created_ns: int) -> bytes:
    """Return the first bytes of a journal of this writer."""
    fields = _HEAD.pack(JOURNAL_MAGIC, JOURNAL_VERSION, RECORD_BYTES, 0, bytes.fromhex(writer), created_ns)
    return fields + _CRC.pack(zlib.crc32(fields))


def is_head(data: bytes | memoryview) -> bool:
    """Return whether a journal that begins so can be read by this release."""
    if len(data) < RECORD_BYTES or _CRC.unpack_from(data, _CRC_OFFSET)[0] != zlib.crc32(data[:_CRC_OFFSET]):
        return False
    magic, version, record_bytes, flags, _, _ = _HEAD.unpack_from(data)
    return bool((magic, version, record_bytes, flags) == (JOURNAL_MAGIC, JOURNAL_VERSION, RECORD_BYTES, 0))


class JournalWriter:
    """Appends to the journal of this process.

    Any thread may call `append`, which only touches memory. The system calls are in `flush`, for one thread at a time,
    which holds `_flushing` meanwhile. The lock `_lock` guards the fields of both and is never held over a system call.
    """

    def __init__(
        self,
        root: Path,
        *,
        fs: FileSystem = LOCAL,
        limits: JournalLimits = JournalLimits(),
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; nothing is written before the first flush."""
        self.writer = new_token()
        """Names this process's journal."""
        self._root = str(root)
        self._fs = fs.rooted(str(root))
        self._limits = limits
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._pending: deque[bytes] = deque(maxlen=limits.buffered_records)
        self._recent: set[BlockKey] = set()
        self._less_recent: set[BlockKey] = set()
        self._turned_at = now()
        self._flushing = threading.RLock()
        self._number = 0
        self._offset = 0
        self._shown_at = -math.inf
        self.written_at = -math.inf
        """When the volume last took a write to the journal, or a touch, on the clock passed in."""
        self.refused_at = math.inf
        """When the volume first refused records that still wait, likewise; infinite while none do."""

    def append(
        self, op: Op, key: BlockKey, payload_bytes: int, lineage: Lineage = NO_LINEAGE, *, ahead_seconds: float = 0.0
    ) -> None:
        """Note what was done, for the next flush; a RETAINED for `ahead_seconds`. A repeated USED is left out."""
        with self._lock:
            if op is not Op.GONE and self._was_seen(key) and op is Op.USED:
                return
            time_ns = self._clock() + int(ahead_seconds * 1e9)
            self._pending.append(encode_record(Record(op, key, payload_bytes, time_ns, lineage)))

    @property
    def pending(self) -> int:
        """How many records wait for the next flush."""
        return len(self._pending)

    def flush(self) -> int:
        """Write what was noted and return how many records that were; what cannot be written is tried again next time.

        The first call begins the journal even without a record: its time tells what time it is on the volume.

        Raises:
            StoreUnavailable: the volume does not take it.
        """
        with self._flushing:
            with self._lock:
                batch = list(self._pending)
                self._pending.clear()
            if not batch and self._offset:
                self.show_life()
                return 0
            try:
                self._write(b"".join(batch))
            except OSError as error:
                if not batch:
                    return 0
                self.refused_at = min(self.refused_at, self._now())
                with self._lock:
                    self._pending = deque([*batch, *self._pending], self._pending.maxlen)
                raise StoreUnavailable(f"{self._root}/{layout.JOURNAL}: cannot be written: {error}") from error
            self.refused_at = math.inf
        return len(batch)

    def ask_modified_ns(self) -> int | None:
        """Ask the volume when the journal was last modified; None where it does not say."""
        with self._flushing, contextlib.suppress(OSError):
            return self._fs.stat(self._path(self._number)).st_mtime_ns
        return None

    def show_life(self) -> None:
        """Have the volume note that this process is there, although it may store nothing; now and then, if it can.

        The janitor retires old generations by the last writes to their journals. So an empty journal is begun where
        there is none, and later only its time is renewed.
        """
        with self._flushing, contextlib.suppress(OSError):
            if self._now() - self._shown_at < self._limits.life_seconds:
                return
            self._shown_at = self._now()
            if self._offset:
                try:
                    self._fs.touch(self._path(self._number))
                    self.written_at = self._now()
                except FileNotFoundError:
                    # The journal was removed as a dead process's.
                    self._begin_segment()
            if not self._offset:
                self._write(b"")

    def _was_seen(self, key: BlockKey) -> bool:
        """Note the block as used now; return whether it had been already; the caller holds `_lock`."""
        now = self._now()
        is_over = now - self._turned_at >= self._limits.used_window_seconds / 2
        if is_over or len(self._recent) >= self._limits.buffered_records:
            self._less_recent, self._recent, self._turned_at = self._recent, set(), now
        if key in self._recent or key in self._less_recent:
            return True
        self._recent.add(key)
        return False

    def _write(self, data: bytes) -> None:
        if self._offset and self._offset + len(data) > self._limits.segment_bytes:
            self._begin_segment()
        try:
            self._append(data)
        except OSError as error:
            # A segment begun at each short failure would push out those that the janitor has not read.
            is_short = self._now() - self.refused_at <= _PATIENCE_SECONDS
            if error.errno not in _LOST and (is_short or error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}):
                raise
            # The segment was removed as a dead process's, or replaced or damaged, or the tree was removed.
            if self._offset:
                self._begin_segment()
            make_directories(self._fs, f"{self._root}/{layout.JOURNAL}")
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
        flags = FIRST_WRITE_FLAGS if self._offset == 0 else NEXT_WRITE_FLAGS
        with opened(self._fs, self._path(self._number), flags) as fd:
            write_all(self._fs, fd, memoryview(data), self._offset)
        self._offset += len(data)
        self._shown_at = self.written_at = self._now()

    def _path(self, number: int) -> str:
        return f"{self._root}/{journal_path(JournalName(self.writer, number))}"


_MOST_READ_BYTES = 1 << 16
"""News longer than this is taken for a purge of everything."""
_MOST_KEPT = 256
"""Purges that a writer remembers one by one; when there are more, they count as a purge of everything."""
_TRIES = 8
_MOST_LOG_BYTES = 1 << 24
_APPEND_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK


class Purge(NamedTuple):
    """Selection of a purge; None stands for all."""

    tenant: str | None = None
    adapter: str | None = None
    """As `layout.adapter_name_label`."""

    def matches(self, key: BlockKey, lineage: Lineage) -> bool:
        """Return whether a block is among it."""
        is_tenant = self.tenant is None or key.tenant == self.tenant
        return is_tenant and (self.adapter is None or lineage.adapter.startswith(self.adapter))


_EVERYTHING = Purge()


def record_purge(fs: FileSystem, root: str, purge: Purge) -> None:
    """Tell writers of a purge; raise OSError if the volume does not take it."""
    path = f"{root}/{layout.PURGES_FILE}"
    line = (json.dumps(purge._asdict()) + "\n").encode()
    _make(fs, path)
    for _ in range(_TRIES):
        try:
            with opened(fs, path, _APPEND_FLAGS) as fd:
                end = fs.fstat(fd).st_size
                write_all(fs, fd, memoryview(line), end)
                fs.fsync(fd)
        except PermissionError:
            _replace(fs, path, line)
            return
        # Another purger may have written at the same place, from another node of NFS.
        with opened(fs, path) as fd:
            if line in read_bytes(fs, fd, _MOST_READ_BYTES, end):
                return
    raise OSError(errno.EIO, "another purge overwrites the purge log again and again; try again", path)


def _make(fs: FileSystem, path: str) -> None:
    """Make an empty file. It has to be there before a purge: a node may remember for a while that a name is absent."""
    with contextlib.suppress(FileExistsError), opened(fs, path, CREATE_FLAGS) as fd:
        # Engines and the janitor may run as different users of one group.
        fs.share(fd)


def _replace(fs: FileSystem, path: str, line: bytes) -> None:
    """Add a line to a file of another user, on a volume that keeps the mode of files as it likes."""
    content = read_file(fs, path, most_bytes=_MOST_LOG_BYTES)
    with replacing(fs, path) as new:
        fs.share(new)
        write_all(fs, new, memoryview(content + line))
        fs.fsync(new)


class PurgeLog:
    """The purges of one root as far as a writer knows them. Any thread may call; `look` waits for the volume."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        """Store the settings; nothing is read yet."""
        self._fs = fs
        self._path = f"{root}/{layout.PURGES_FILE}"
        self._lock = threading.Lock()
        self._known = (-1, 0)
        """Bytes of the file and when it was modified, in ns; -1 before there is one."""
        self._seen: list[tuple[float, Purge]] = []

    def look(self, *, may_write: bool = True) -> None:
        """Learn of new purges, by one open, one fstat and one close; raise OSError if the volume does not answer.

        With `may_write` the file is made where there is none.
        """
        known = self._known
        try:
            fd = self._fs.open(self._path, READ_FLAGS)
        except FileNotFoundError:
            if not may_write:
                return
            _make(self._fs, self._path)
            fd = self._fs.open(self._path, READ_FLAGS)
        try:
            status = self._fs.fstat(fd)
            if status.st_size == known[0] and status.st_mtime_ns != known[1]:
                # The time of a file changes a moment before its length.
                status = self._fs.fstat(fd)
            if (state := (status.st_size, status.st_mtime_ns)) == known:
                return
            found = self._read(fd, known[0], state[0])
        finally:
            self._fs.close(fd)
        with self._lock:
            # Another thread may have read the same: twice costs nothing. All processes of the machine share this clock.
            now = time.monotonic()
            self._seen += [(now, purge) for purge in found]
            if len(self._seen) > _MOST_KEPT:
                self._seen = [(now, _EVERYTHING)]
            self._known = state if state[0] <= known[0] or self._known == known else max(self._known, state)

    def is_purged(self, key: BlockKey, lineage: Lineage, queued: float) -> bool:
        """Return whether a block that was `queued`, on `time.monotonic`, was purged since, as far as is known."""
        with self._lock:
            return any(queued <= seen and purge.matches(key, lineage) for seen, purge in self._seen)

    def _read(self, fd: int, known: int, size: int) -> list[Purge]:
        start = max(0, known)
        if size <= known or size - start > _MOST_READ_BYTES:
            # The directory was made anew, or this process has not looked for long.
            return [_EVERYTHING]
        return [_parse(line) for line in read_bytes(self._fs, fd, size - start, start).splitlines()]


def _parse(line: bytes) -> Purge:
    """Read a line; one that is damaged counts as a purge of everything."""
    try:
        document = json.loads(line)
        tenant, adapter = document["tenant"], document["adapter"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return _EVERYTHING
    is_sound = all(each is None or isinstance(each, str) for each in (tenant, adapter))
    return Purge(tenant, adapter) if is_sound else _EVERYTHING
