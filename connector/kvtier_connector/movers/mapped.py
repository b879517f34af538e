# SPDX-License-Identifier: Apache-2.0
"""Reads files that lie in memory through a mapping, because many processes that read them wait for each other.

The first `read` of a page that was written moves it from one of the kernel's lists to another under one lock, and with
sixteen readers on a tmpfs that takes longer than the copy. A mapping advised to be read once leaves the lists alone.

The bytes are copied out before anybody verifies them, as `read` does. A file that is cut short while it is being read
ends the process: a mover may, its engine counts a fault and starts another. No other process uses this.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from kvtier_connector.store.fs import FileSystem, is_in_memory

_PIECE_BYTES = 32 << 10
"""Small copies stay in the processor's cache, where they are verified next."""
_MOST_MAPPED_BYTES = 4 << 30
"""No block is as long: a longer file, which may have no bytes at all, is read as elsewhere."""


class _Mapping(NamedTuple):
    memory: mmap.mmap
    view: memoryview


class MappingFs(FileSystem):
    """The real system calls, but for reads of files in memory. One thread."""

    def __init__(self) -> None:
        """Start with nothing mapped."""
        self._mappings: dict[int, _Mapping] = {}
        self._in_memory: dict[int, bool] = {}

    def open(self, path: str, flags: int) -> int:
        """Open a file, and map it if it is only read and lies in memory."""
        fd = super().open(path, flags)
        if flags & (os.O_ACCMODE | os.O_CREAT) == os.O_RDONLY:
            try:
                self._map(fd)
            except OSError:
                super().close(fd)
                raise
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Copy from the mapping, if there is one."""
        mapping = self._mappings.get(fd)
        if mapping is None:
            return super().preadv(fd, buffers, offset)
        done = 0
        for buffer in buffers:
            part = mapping.view[offset + done : offset + done + buffer.nbytes]
            for start in range(0, part.nbytes, _PIECE_BYTES):
                piece = part[start : start + _PIECE_BYTES]
                buffer[start : start + piece.nbytes] = piece
            done += part.nbytes
            if part.nbytes < buffer.nbytes:
                break
        return done

    def close(self, fd: int) -> None:
        """Close a file."""
        mapping = self._mappings.pop(fd, None)
        if mapping is not None:
            mapping.view.release()
            mapping.memory.close()
        super().close(fd)

    def _map(self, fd: int) -> None:
        status = os.fstat(fd)
        is_ours = self._in_memory.get(status.st_dev)
        if is_ours is None:
            is_ours = self._in_memory[status.st_dev] = is_in_memory(status.st_dev)
        if is_ours and 0 < status.st_size <= _MOST_MAPPED_BYTES:
            memory = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
            memory.madvise(mmap.MADV_SEQUENTIAL)
            self._mappings[fd] = _Mapping(memory, memoryview(memory))
