# SPDX-License-Identifier: Apache-2.0
"""The system calls of a mover that is a process of its own: it reads files in memory, and closes files, in its own way.

A close is a round trip to a network volume, and of the three that a block takes the one whose answer nobody needs: the
next file is opened meanwhile.

Many processes that read files in memory wait for each other: the first `read` of a page that was written moves it from
one of the kernel's lists to another under one lock, and with sixteen readers on a tmpfs that takes longer than the
copy. A mapping advised to be read once leaves the lists alone, and saves a copy. A file that is cut short while it is
being read ends the process: a mover may, its engine counts a fault and starts another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import time

from kvtier_connector.store.fs import FileSystem, is_in_memory

_SLOW_SECONDS = 0.0003
"""A close that takes longer is worth another thread's waking up."""
_MOST_WAITING = 2
"""Whoever reads waits itself while so many wait: then the volume, or this machine, does not keep up."""
_MOST_MAPPED_BYTES = 4 << 30
"""No block is as long: a longer file, which may have no bytes at all, is read as elsewhere."""


class ReleasingFs(FileSystem):
    """The real system calls. One thread, besides its own, which closes."""

    def __init__(self) -> None:
        """Start without knowing how long a close takes."""
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_started = False
        self._is_slow = False
        """Whether the last close was; set by whichever thread that was, and only speed is at stake."""

    def release(self, fd: int) -> None:
        """Close a file that was only read: at once where that is quick, behind the caller's back where it is not."""
        if self._is_slow and self._waiting.qsize() < _MOST_WAITING and self._can_wait():
            self._waiting.put(fd)
        else:
            self._close(fd)

    def _can_wait(self) -> bool:
        if not self._is_started:
            # A host that has no room for another thread goes without.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._close_all, name="kvtier-close", daemon=True).start()
                self._is_started = True
        return self._is_started

    def _close_all(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._close(self._waiting.get())

    def _close(self, fd: int) -> None:
        began = time.monotonic()
        try:
            self.close(fd)
        finally:
            self._is_slow = time.monotonic() - began > _SLOW_SECONDS


class MappingFs(ReleasingFs):
    """The real system calls, and mappings of files in memory. One thread, besides the one that closes."""

    def __init__(self) -> None:
        """Start without knowing any volume."""
        super().__init__()
        self._in_memory: dict[int, bool] = {}

    def map(self, fd: int) -> memoryview | None:
        """Map a file that lies in memory; the mapping ends with the last view of it."""
        status = os.fstat(fd)
        is_ours = self._in_memory.get(status.st_dev)
        if is_ours is None:
            is_ours = self._in_memory[status.st_dev] = is_in_memory(status.st_dev)
        if not is_ours or not 0 < status.st_size <= _MOST_MAPPED_BYTES:
            return None
        # Writable, and private to this process, only so that its address can be asked for.
        memory = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY)
        memory.madvise(mmap.MADV_SEQUENTIAL)
        return memoryview(memory)
