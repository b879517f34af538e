# SPDX-License-Identifier: Apache-2.0
"""Purge marks: a file in each generation that tells writers what was purged, so that no queued block lands afterwards.

The purger appends a line, then removes files until a pass over the directory finds none. A writer looks at the file
between writing a block aside and renaming it: a block queued before the writer saw a purge of it gets no name. So a
block either is renamed before a pass begins, which finds it, or is refused. No clocks are compared: times are those of
the writer's own machine. One more store is refused than needed where a writer looks late, which costs a recompute.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvtier_connector.store.fs import CREATE_FLAGS, READ_FLAGS, FileSystem, replacing, write_all
from kvtier_connector.store.layout import PURGES_FILE, BlockKey, Lineage

_MOST_READ_BYTES = 1 << 16
"""News longer than this is taken for a purge of everything."""
_MOST_KEPT = 256
"""Purges that a writer remembers one by one; when there are more, they count as a purge of everything."""
_TRIES = 8
_APPEND_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK


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
    path = f"{root}/{PURGES_FILE}"
    line = (json.dumps(purge._asdict()) + "\n").encode()
    _make(fs, path)
    for _ in range(_TRIES):
        try:
            fd = fs.open(path, _APPEND_FLAGS)
        except PermissionError:
            _replace(fs, path, line)
            return
        try:
            end = fs.fstat(fd).st_size
            write_all(fs, fd, memoryview(line), end)
            fs.fsync(fd)
        finally:
            fs.close(fd)
        # Another purger may have written at the same place.
        fd = fs.open(path, READ_FLAGS)
        try:
            found = memoryview(bytearray(len(line)))
            fs.preadv(fd, [found], end)
        finally:
            fs.release(fd)
        if bytes(found) == line:
            return
    raise OSError(errno.EIO, "another purge overwrites the mark again and again; try again", path)


def _make(fs: FileSystem, path: str) -> None:
    """Make an empty file. It has to be there before a purge: a node may remember for a while that a name is absent."""
    try:
        fd = fs.open(path, CREATE_FLAGS)
    except FileExistsError:
        return
    # Engines and the janitor may run as different users of one group.
    fs.share(fd)
    fs.close(fd)


def _replace(fs: FileSystem, path: str, line: bytes) -> None:
    """Add a line to a file of another user, on a volume that keeps the mode of files as it likes."""
    fd = fs.open(path, READ_FLAGS)
    try:
        content = memoryview(bytearray(fs.fstat(fd).st_size))
        fs.preadv(fd, [content], 0)
    finally:
        fs.release(fd)
    with replacing(fs, path) as new:
        fs.share(new)
        write_all(fs, new, memoryview(bytes(content) + line))
        fs.fsync(new)


class PurgeLog:
    """The purges of one root as far as a writer knows them. Any thread may call; `look` waits for the volume."""

    def __init__(self, fs: FileSystem, root: str, *, now: Callable[[], float] = time.monotonic) -> None:
        """Store the settings; nothing is read yet.

        Args:
            fs: The system calls.
            root: The generation.
            now: Seconds of a clock that all processes of the machine share and that never goes back.
        """
        self._fs = fs
        self._path = f"{root}/{PURGES_FILE}"
        self._now = now
        self._lock = threading.Lock()
        self._size = -1
        """Bytes known; -1 before the first look."""
        self._seen: list[tuple[float, Purge]] = []

    @property
    def is_known(self) -> bool:
        """Whether `look` has succeeded once."""
        return self._size >= 0

    def look(self, *, may_write: bool = True) -> None:
        """Learn of new purges; raise OSError if the volume does not answer. One open, one fstat and one close.

        With `may_write` the file is made where there is none.
        """
        fd = self._open(may_write=may_write)
        if fd is None:
            with self._lock:
                self._size = max(self._size, 0)
            return
        try:
            size = self._fs.fstat(fd).st_size
            with self._lock:
                known = self._size
            found = [] if size == known else self._read(fd, known, size)
        finally:
            self._fs.release(fd)
        if size == known:
            return
        with self._lock:
            # Another thread may have read the same: twice costs nothing.
            now = self._now()
            self._seen += [(now, purge) for purge in found]
            if len(self._seen) > _MOST_KEPT:
                self._seen = [(now, _EVERYTHING)]
            self._size = size if size < known or self._size == known else max(self._size, size)

    def is_purged(self, key: BlockKey, lineage: Lineage, queued: float) -> bool:
        """Return whether a block that was queued at a time of `now` was purged since, as far as is known."""
        with self._lock:
            return any(queued <= seen and purge.matches(key, lineage) for seen, purge in self._seen)

    def _open(self, *, may_write: bool) -> int | None:
        try:
            return self._fs.open(self._path, READ_FLAGS)
        except FileNotFoundError:
            if not may_write:
                return None
            _make(self._fs, self._path)
            return self._fs.open(self._path, READ_FLAGS)

    def _read(self, fd: int, known: int, size: int) -> list[Purge]:
        start = max(0, known)
        if size < start or size - start > _MOST_READ_BYTES:
            # The directory was made anew, or this process has not looked for long.
            return [_EVERYTHING]
        buffer = memoryview(bytearray(size - start))
        done = 0
        while done < buffer.nbytes and (count := self._fs.preadv(fd, [buffer[done:]], start + done)):
            done += count
        return [_parse(line) for line in bytes(buffer[:done]).splitlines()]


def _parse(line: bytes) -> Purge:
    """Read a line; one that is damaged counts as a purge of everything."""
    try:
        document = json.loads(line)
        tenant, adapter = document["tenant"], document["adapter"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return _EVERYTHING
    is_sound = all(each is None or isinstance(each, str) for each in (tenant, adapter))
    return Purge(tenant, adapter) if is_sound else _EVERYTHING
