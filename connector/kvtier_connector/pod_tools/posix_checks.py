# SPDX-License-Identifier: Apache-2.0
"""Properties that the store needs of a file system, each tried in a directory of its own.

A mount that looks like a file system may lack any of it; object stores behind a mount lack most.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

from kvtier_connector.store.fs import (
    CREATE_FLAGS,
    FIRST_WRITE_FLAGS,
    NEXT_WRITE_FLAGS,
    READ_FLAGS,
    FileSystem,
    read_page,
)

_REFUSED: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EACCES})
_NAMES: Final = 20
_LONG_AGO_SECONDS: Final = 1000


def missing_property(fs: FileSystem, directory: str) -> str:
    """Return the first thing that the volume does not do, and what that would cost; empty if it does all.

    Raises:
        OSError: the volume fails otherwise.
    """
    for check, refusal in _CHECKS:
        try:
            missing = check(fs, directory)
        except OSError as error:
            if not refusal or error.errno not in {*_REFUSED, errno.EEXIST}:
                raise
            missing = refusal.format(os.strerror(error.errno or 0))
        if missing:
            return missing
    return ""


def _create(fs: FileSystem, path: str) -> None:
    fs.close(fs.open(path, CREATE_FLAGS))


def _creates_once(fs: FileSystem, directory: str) -> str:
    _create(fs, f"{directory}/once")
    try:
        _create(fs, f"{directory}/once")
    except FileExistsError:
        return ""
    return "a file can be created twice (no O_EXCL): two engines would each take one directory for theirs"


def _lists_at_once(fs: FileSystem, directory: str) -> str:
    names = {f"listed{number}" for number in range(_NAMES)}
    for name in names:
        _create(fs, f"{directory}/{name}")
    if not names <= {entry.name for entry in fs.scandir(directory)}:
        return "a new file is not listed at once (eventual listings): the janitor would not count it"
    for name in names:
        fs.unlink(f"{directory}/{name}")
    if names & {entry.name for entry in fs.scandir(directory)}:
        return "a removed file stays listed (eventual listings): the janitor would count what is gone"
    return ""


def _appends(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/appended"
    for number in range(3):
        fd = fs.open(path, NEXT_WRITE_FLAGS if number else FIRST_WRITE_FLAGS)
        try:
            fs.pwritev(fd, [memoryview(bytes([number + 1]) * 1024)], 1024 * number)
        finally:
            fs.close(fd)
    page = memoryview(bytearray(4096))
    fd = fs.open(path, READ_FLAGS)
    try:
        count = read_page(fs, fd, page)
    finally:
        fs.close(fd)
    if bytes(page[:count]) != b"".join(bytes([number + 1]) * 1024 for number in range(3)):
        return "what is written to a file again is not there when it is opened: the janitor would miss records"
    return ""


def _replaces(fs: FileSystem, directory: str) -> str:
    for name in ("old", "new"):
        _create(fs, f"{directory}/{name}")
    fs.rename(f"{directory}/new", f"{directory}/old")
    return ""


def _tells_times(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/touched"
    _create(fs, path)
    long_ago = fs.stat(path).st_mtime - _LONG_AGO_SECONDS
    os.utime(path, (long_ago, long_ago))
    fs.touch(path)
    return "" if fs.stat(path).st_mtime > long_ago + _LONG_AGO_SECONDS / 2 else _NO_TIMES


_NO_TIMES: Final = "the time of a file cannot be set: no engine could tell how long its store permit lasts"
_CHECKS: Final[tuple[tuple[Callable[[FileSystem, str], str], str], ...]] = (
    (_creates_once, ""),
    (_lists_at_once, ""),
    (_appends, "a file cannot be written to again ({}): engines would have no journals"),
    (_replaces, "a file cannot be renamed over another ({}): nothing could be published"),
    (_tells_times, _NO_TIMES),
)
"""Each with what it means where the volume refuses a call of it; empty where that is a failure of the volume."""
