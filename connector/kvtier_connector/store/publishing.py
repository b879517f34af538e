# SPDX-License-Identifier: Apache-2.0
"""How a file gets its name: written aside, closed, renamed. Readers see the old file or the new one, never half of one.

Whoever dies on the way leaves a partial file, which anybody may remove when it is old.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from kvtier_connector.store.fs import CREATE_FLAGS, FileSystem, abandon, new_token
from kvtier_connector.store.layout import partial_path

_PIECE_BYTES = 1 << 22
"""Written by one system call at most, so that a slow volume holds a thread no longer than that takes."""


@contextlib.contextmanager
def replacing(
    fs: FileSystem, path: str, *, flags: int = CREATE_FLAGS, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[int]:
    """Give the descriptor of a new file, which takes the path when the caller is done; after a failure it is gone.

    Raises:
        OSError: the volume does not take it, or `is_wanted` says False at the end; what was at the path stays.
    """
    partial = partial_path(path, new_token())
    fd = -1
    is_left = True
    try:
        try:
            fd = fs.open(partial, flags)
        except FileNotFoundError:
            # Its directory is not there yet, so neither is the file: one call less for the first one of each.
            is_left = False
            raise
        yield fd
        closing, fd = fd, -1
        # Network file systems report a failed write here, so the file gets its name only afterwards.
        fs.close(closing)
        if not is_wanted():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED), path)
        fs.rename(partial, path)
        is_left = False
    finally:
        if is_left:
            abandon(fs, fd, partial)


def write_all(fs: FileSystem, fd: int, data: memoryview, offset: int = 0) -> int:
    """Write all of it at the offset; return where it ends. The view must be of bytes."""
    done = 0
    while done < data.nbytes:
        done += fs.pwritev(fd, [data[done : done + _PIECE_BYTES]], offset + done)
    return offset + done
