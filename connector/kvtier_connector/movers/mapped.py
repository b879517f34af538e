# SPDX-License-Identifier: Apache-2.0
"""Reads files that lie in memory through a mapping, because many processes that read them wait for each other.

The first `read` of a page that was written moves it from one of the kernel's lists to another under one lock, and with
sixteen readers on a tmpfs that takes longer than the copy. A mapping advised to be read once leaves the lists alone,
and saves a copy.

A file that is cut short while it is being read ends the process: a mover may, its engine counts a fault and starts
another. No other process uses this.
"""

from __future__ import annotations

import mmap
import os

from kvtier_connector.movers.releasing import ReleasingFs
from kvtier_connector.store.fs import is_in_memory

_MOST_MAPPED_BYTES = 4 << 30
"""No block is as long: a longer file, which may have no bytes at all, is read as elsewhere."""


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
