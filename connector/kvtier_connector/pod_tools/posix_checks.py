# SPDX-License-Identifier: Apache-2.0
"""Properties that the store needs of a file system, each tried in a directory of its own.

A mount that looks like a file system may lack any of it; object stores behind a mount lack most.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from kvtier_connector.store.fs import (
    CREATE_FLAGS,
    FIRST_WRITE_FLAGS,
    NEXT_WRITE_FLAGS,
    READ_FLAGS,
    FileSystem,
    read_page,
)

_PAGE: Final = 4096
_REFUSED: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EACCES})
_NAMES: Final = 20
_LONG_AGO_SECONDS: Final = 1000


def missing_property(fs: FileSystem, directory: str) -> str:
    """Return the first thing that the volume does not do, and what that would cost; empty if it does all.

    Raises:
        OSError: the volume fails otherwise.
    """
    for check in (_creates_once, _lists_at_once, _appends, _replaces, _tells_times):
        if missing := check(fs, directory):
            return missing
    return ""


def _creates_once(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/once"
    fs.close(fs.open(path, CREATE_FLAGS))
    try:
        fs.close(fs.open(path, CREATE_FLAGS))
    except FileExistsError:
        return ""
    return "a file can be created twice (no O_EXCL): two engines would each take one directory for theirs"


def _lists_at_once(fs: FileSystem, directory: str) -> str:
    names = {f"listed{number}" for number in range(_NAMES)}
    for name in names:
        fs.close(fs.open(f"{directory}/{name}", CREATE_FLAGS))
    if not names <= _listed(fs, directory):
        return "a new file is not listed at once (eventual listings): engines would not hear of each other"
    for name in names:
        fs.unlink(f"{directory}/{name}")
    if names & _listed(fs, directory):
        return "a removed file stays listed (eventual listings): the janitor would count what is gone"
    return ""


def _appends(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/appended"
    try:
        for number in range(3):
            fd = fs.open(path, NEXT_WRITE_FLAGS if number else FIRST_WRITE_FLAGS)
            try:
                fs.pwritev(fd, [memoryview(bytes([number + 1]) * 1024)], 1024 * number)
            finally:
                fs.close(fd)
        page = memoryview(bytearray(_PAGE))
        fd = fs.open(path, READ_FLAGS)
        try:
            count = read_page(fs, fd, page)
        finally:
            fs.close(fd)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return f"a file cannot be written to again ({os.strerror(error.errno or 0)}): engines would have no journals"
    if bytes(page[:count]) != b"".join(bytes([number + 1]) * 1024 for number in range(3)):
        return "what is written to a file again is not there when it is opened: engines would not hear of each other"
    return ""


def _replaces(fs: FileSystem, directory: str) -> str:
    old, new = f"{directory}/old", f"{directory}/new"
    for path in (old, new):
        fs.close(fs.open(path, CREATE_FLAGS))
    try:
        fs.rename(new, old)
    except OSError as error:
        if error.errno not in {*_REFUSED, errno.EEXIST}:
            raise
        return f"a file cannot be renamed over another ({os.strerror(error.errno or 0)}): nothing could be published"
    return ""


def _tells_times(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/bell"
    fs.mkdir(path)
    try:
        long_ago = fs.stat(path).st_mtime - _LONG_AGO_SECONDS
        os.utime(path, (long_ago, long_ago))
        fs.touch(path)
        is_set = fs.stat(path).st_mtime > long_ago + _LONG_AGO_SECONDS / 2
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        is_set = False
    finally:
        fs.rmdir(path)
    return "" if is_set else "the time of a directory cannot be set: engines would not hear that there is news"


def _listed(fs: FileSystem, directory: str) -> set[str]:
    return {entry.name for entry in fs.scandir(directory)}
