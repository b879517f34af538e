# SPDX-License-Identifier: Apache-2.0
"""A file system that passes every call on to a directory, until it is told to hang or to fail: FUSE, run as a program.

    python passthrough.py SOURCE MOUNTPOINT CONTROL

While CONTROL has a file ``hang.<call>``, that call waits; with ``fail.<call>``, it fails with the error number that the
file holds. Calls: root, lookup, open, read, write. It ends when it is unmounted.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations

POLL_SECONDS = 0.005


class PassThrough(Operations):
    use_ns = True

    def __init__(self, source: str, control: str) -> None:
        self._source = source
        self._control = Path(control)

    def _at(self, path: str) -> str:
        return self._source + path

    def _gate(self, call: str) -> None:
        while (self._control / f"hang.{call}").exists():
            # A test switches the fault by a file, and has no other way to this process.
            time.sleep(POLL_SECONDS)
        try:
            number = int((self._control / f"fail.{call}").read_text())
        except (FileNotFoundError, ValueError):
            return
        raise FuseOSError(number)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        # The attributes of an open file are known even while lookups hang. The root has a switch of its own.
        if fh is None:
            self._gate("lookup" if path != "/" else "root")
        status = os.lstat(self._at(path)) if fh is None else os.fstat(fh)
        names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        return {name: getattr(status, name) for name in names} | {
            "st_mtime": status.st_mtime_ns,
            "st_atime": status.st_atime_ns,
            "st_ctime": status.st_ctime_ns,
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        with os.scandir(self._at(path)) as entries:
            return [".", "..", *(entry.name for entry in entries)]

    def open(self, path: str, flags: int) -> int:
        self._gate("open")
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._gate("read")
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._gate("write")
        return os.pwrite(fh, data, offset)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def rename(self, old: str, new: str) -> int:
        Path(self._at(old)).rename(self._at(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    def unlink(self, path: str) -> int:
        Path(self._at(path)).unlink()
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        Path(self._at(path)).mkdir(stat.S_IMODE(mode))
        return 0

    def rmdir(self, path: str) -> int:
        Path(self._at(path)).rmdir()
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times or (time.time_ns(), time.time_ns()))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        volume = os.statvfs(self._at(path))
        return {name: getattr(volume, name) for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail")}

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        raise FuseOSError(errno.ENOTSUP)


if __name__ == "__main__":
    source, mountpoint, control = sys.argv[1:]
    FUSE(PassThrough(source, control), mountpoint, foreground=True, nothreads=False, attr_timeout=0, entry_timeout=0)
