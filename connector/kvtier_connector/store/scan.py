# SPDX-License-Identifier: Apache-2.0
"""Walk a root and name every file in it: the janitor, the index, the usage count and the check share this walk.

Files may come and go meanwhile; one that is gone before it is looked at is left out.
"""

from __future__ import annotations

import enum
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.layout import QUARANTINE, TIER_FILE, BlockKey, is_partial, parse_block_path

PARTIAL_AGE_SECONDS = 3600.0
"""A partial file this old has no writer any more: no write of one block takes an hour."""


class BlockEntry(NamedTuple):
    """A file whose name is a block's. Its bytes were not looked at."""

    key: BlockKey
    path: str
    """Relative to the root."""
    size: int
    mtime_ns: int


class LeftoverKind(enum.Enum):
    """Why a file is no block."""

    PARTIAL = "partial"
    """Its writer died before the rename."""
    QUARANTINED = "quarantined"
    """A reader found it damaged and moved it away."""
    FOREIGN = "foreign"
    """Nothing here makes such a name."""


class Leftover(NamedTuple):
    """A file that is no block."""

    kind: LeftoverKind
    path: str
    """Relative to the root."""
    size: int
    mtime_ns: int


def scan(
    root: Path,
    *,
    fs: FileSystem = LOCAL,
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    clock: Callable[[], int] = time.time_ns,
) -> Iterator[BlockEntry | Leftover]:
    """Yield blocks and leftovers under the root, directory by directory; a root that is not there has none.

    A partial file younger than `partial_age_seconds` belongs to a writer at work and is not yielded.

    Raises:
        StoreUnavailable: a directory or a file cannot be looked at.
    """
    youngest_ns = clock() - int(partial_age_seconds * 1e9)
    try:
        for path, status in _walk(fs, str(root), ""):
            entry = _classify(path, status)
            if entry is not None and (not _is_partial(entry) or entry.mtime_ns <= youngest_ns):
                yield entry
    except OSError as error:
        raise StoreUnavailable(f"{root}: cannot be walked: {error}") from error


def _is_partial(entry: BlockEntry | Leftover) -> bool:
    return isinstance(entry, Leftover) and entry.kind is LeftoverKind.PARTIAL


def _classify(path: str, status: os.stat_result) -> BlockEntry | Leftover | None:
    size, mtime_ns = status.st_size, status.st_mtime_ns
    name = path.rpartition("/")[2]
    is_file = stat.S_ISREG(status.st_mode)
    if path == TIER_FILE and is_file:
        return None
    # An NFS client keeps a removed file under such a name while somebody has it open, then removes it by itself.
    if name.startswith(".nfs"):
        return None
    if is_file and (key := parse_block_path(path)) is not None:
        return BlockEntry(key, path, size, mtime_ns)
    if is_file and path.startswith(QUARANTINE + "/"):
        return Leftover(LeftoverKind.QUARANTINED, path, size, mtime_ns)
    kind = LeftoverKind.PARTIAL if is_file and is_partial(name) else LeftoverKind.FOREIGN
    return Leftover(kind, path, size, mtime_ns)


def _walk(fs: FileSystem, root: str, relative: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        entries = fs.scandir(f"{root}/{relative}" if relative else root)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        path = f"{relative}/{entry.name}" if relative else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(fs, root, path)
            continue
        try:
            status = fs.stat(f"{root}/{path}")
        except FileNotFoundError:
            continue
        yield path, status
