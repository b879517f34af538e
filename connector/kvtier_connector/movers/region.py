# SPDX-License-Identifier: Apache-2.0
"""Finds the file behind a piece of mapped memory, so that another process can map it too.

vLLM's CPU tier is a file in /dev/shm. What this process has mapped and opened is read from /proc/self, which needs no
knowledge of vLLM's fields and works where the file's name is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
from pathlib import Path
from typing import NamedTuple

_SELF = Path("/proc/self")


class Region(NamedTuple):
    """Shared memory that another process can map."""

    fd: int
    """Ours to close; open for reading and writing."""
    offset: int
    """Where in the file the memory begins."""
    size: int


class _Mapping(NamedTuple):
    start: int
    end: int
    is_shared: bool
    offset: int
    device: tuple[int, int]
    inode: int


def find_region(view: memoryview) -> Region | None:
    """Return the file that backs the memory, None if it is not one file mapped for sharing.

    Raises:
        OSError: this process cannot find out, for want of descriptors or of /proc.
    """
    if view.readonly or not view.nbytes:
        return None
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    mappings = [_parse(line) for line in (_SELF / "maps").read_text(errors="replace").splitlines()]
    first = _holding(mappings, start)
    last = _holding(mappings, start + view.nbytes - 1)
    if first is None or last is None or not (first.is_shared and last.is_shared and first.inode):
        return None
    is_one_file = (first.device, first.inode) == (last.device, last.inode)
    if not is_one_file or last.offset - first.offset != last.start - first.start:
        return None
    fd = _open_again(first)
    return None if fd is None else Region(fd, first.offset + start - first.start, view.nbytes)


def _parse(line: str) -> _Mapping:
    # address, permissions, offset, device, inode, path
    address, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
    start, end = (int(part, 16) for part in address.split("-"))
    major, minor = (int(part, 16) for part in device.split(":"))
    return _Mapping(start, end, permissions[3] == "s", int(offset, 16), (major, minor), int(inode))


def _holding(mappings: list[_Mapping], address: int) -> _Mapping | None:
    return next((mapping for mapping in mappings if mapping.start <= address < mapping.end), None)


def _open_again(mapping: _Mapping) -> int | None:
    """Duplicate the descriptor that the mapping was made from, which whoever made it keeps open."""
    descriptors = (int(link.name) for link in (_SELF / "fd").iterdir())
    fd = next((fd for fd in descriptors if _is_file_of(fd, mapping)), None)
    return None if fd is None else os.dup(fd)


def _is_file_of(fd: int, mapping: _Mapping) -> bool:
    """Say whether the mapping could be made from the descriptor."""
    with contextlib.suppress(OSError):
        status = os.fstat(fd)
        is_same = status.st_ino == mapping.inode and mapping.device == (
            os.major(status.st_dev),
            os.minor(status.st_dev),
        )
        return is_same and stat.S_ISREG(status.st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return False
