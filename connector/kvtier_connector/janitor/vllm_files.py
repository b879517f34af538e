# SPDX-License-Identifier: Apache-2.0
"""How vLLM's own fs tier lays out its files below a generation: which are blocks, and which are leftovers. Pure.

``<model>_<12 hex>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``, beside ``<model>_<12 hex>/config.json``; what is being
written ends in ``_<number>.tmp``. Nothing else there is ever removed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from kvtier_connector.store.fs import FileSystem

_RANK = re.compile(r"^.+_[0-9a-f]{12}_r[0-9]+$")
_FIRST = re.compile(r"^[0-9a-f]{3}$")
_SECOND = re.compile(r"^[0-9a-f]{2}_g[0-9]+$")
_BLOCK = re.compile(r"^[0-9a-f]{16,128}\.bin$")
_PARTIAL = re.compile(r"^[0-9a-f]{16,128}\.bin_[0-9]+\.tmp$")


class File(NamedTuple):
    """One file of the fs tier."""

    generation: str
    path: str
    """Relative to the tier's directory."""
    size: int
    mtime_ns: int
    used_ns: int
    """The later of written and, as far as the mount keeps that, read."""
    is_partial: bool


def is_generation(fs: FileSystem, root: str) -> bool:
    """Tell whether a directory holds files of vLLM's tier; raises OSError if it cannot be looked at."""
    return any(_RANK.match(entry.name) and entry.is_dir(follow_symlinks=False) for entry in _list(fs, root))


def walk(fs: FileSystem, tier_dir: str, generation: str) -> Iterator[list[File]]:
    """Yield the files of a generation, one directory of them after another; raises OSError where one is refused."""
    for rank in _directories(fs, f"{tier_dir}/{generation}", _RANK):
        for first in _directories(fs, f"{tier_dir}/{generation}/{rank}", _FIRST):
            below = f"{generation}/{rank}/{first}"
            for second in _directories(fs, f"{tier_dir}/{below}", _SECOND):
                yield list(_files(fs, tier_dir, generation, f"{below}/{second}"))


def directories(fs: FileSystem, tier_dir: str, generation: str) -> Iterator[str]:
    """Yield the directories of a generation that hold files or directories of vLLM's, the deepest first."""
    for rank in _directories(fs, f"{tier_dir}/{generation}", _RANK):
        for first in _directories(fs, f"{tier_dir}/{generation}/{rank}", _FIRST):
            below = f"{generation}/{rank}/{first}"
            yield from (f"{below}/{second}" for second in _directories(fs, f"{tier_dir}/{below}", _SECOND))
            yield below
        yield f"{generation}/{rank}"


def _files(fs: FileSystem, tier_dir: str, generation: str, directory: str) -> Iterator[File]:
    for entry in _list(fs, f"{tier_dir}/{directory}"):
        is_partial = _PARTIAL.match(entry.name) is not None
        if not is_partial and not _BLOCK.match(entry.name):
            continue
        try:
            found = fs.stat(f"{tier_dir}/{directory}/{entry.name}")
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            used_ns = max(found.st_mtime_ns, found.st_atime_ns)
            path = f"{directory}/{entry.name}"
            yield File(generation, path, found.st_size, found.st_mtime_ns, used_ns, is_partial)


def _directories(fs: FileSystem, path: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the names of directories, and of no link to one, that the tier makes."""
    found = [each for each in _list(fs, path) if pattern.match(each.name) and each.is_dir(follow_symlinks=False)]
    return sorted(each.name for each in found)


def _list(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    try:
        return fs.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
