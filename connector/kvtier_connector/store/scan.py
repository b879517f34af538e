# SPDX-License-Identifier: Apache-2.0
"""Walks a root and names every file in it, for the janitor, the check and the usage count; and counts its progress.

Files may come and go meanwhile; a file that is gone before it is looked at is left out.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store import layout
from kvtier_connector.store.fs import LOCAL, FileSystem, list_directory

PARTIAL_AGE_SECONDS = 3600.0
"""A partial file this old has no writer any more: no write of one block takes an hour."""


class BlockEntry(NamedTuple):
    """A file whose name is a block's. Its bytes were not looked at."""

    key: layout.BlockKey
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


def scan(  # noqa: PLR0913 - keywords with defaults
    root: Path,
    *,
    fs: FileSystem = LOCAL,
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    clock: Callable[[], int] = time.time_ns,
    threads: int = 1,
    unread: list[OSError] | None = None,
    on_share: Callable[[float], None] = lambda _: None,
) -> Iterator[BlockEntry | Leftover]:
    """Yield blocks and leftovers under the root, directory by directory; a root that is not there has none.

    A partial file younger than `partial_age_seconds` belongs to a writer at work and is not yielded.

    As many directories as there are `threads` are read at once: a network volume answers each only after a while. The
    threads end when the caller stops asking. One that hangs in the volume is left behind: it is a daemon.
    With `unread`, a directory that cannot be read does not end the walk: its error is added to the list.

    `on_share` is told how much of the walk is done, from 0 to 1: hashes spread blocks evenly over directories.

    Raises:
        StoreUnavailable: a directory or a file cannot be looked at, and there is no `unread`.
    """
    youngest_ns = clock() - int(partial_age_seconds * 1e9)
    share = 0.0
    try:
        for done, found in _walk(functools.partial(_list, fs, str(root)), threads, unread):
            for path, status in found:
                entry = _classify(path, status)
                is_partial_file = isinstance(entry, Leftover) and entry.kind is LeftoverKind.PARTIAL
                if entry is not None and (not is_partial_file or entry.mtime_ns <= youngest_ns):
                    yield entry
            share += done
            on_share(min(1.0, share))
    except OSError as error:
        raise StoreUnavailable(f"{root}: cannot be walked: {error}") from error


def _classify(path: str, status: os.stat_result) -> BlockEntry | Leftover | None:
    size, mtime_ns = status.st_size, status.st_mtime_ns
    name = path.rpartition("/")[2]
    is_file = stat.S_ISREG(status.st_mode)
    is_ours = path in {layout.TIER_FILE, layout.PURGES_FILE} or path.startswith(f"{layout.RELEASES}/")
    if is_file and (is_ours or layout.parse_journal_path(path) is not None):
        return None
    # An NFS client keeps a removed file under such a name while a process has it open, then removes it by itself.
    if name.startswith(".nfs"):
        return None
    if is_file and (key := layout.parse_block_path(path)) is not None:
        return BlockEntry(key, path, size, mtime_ns)
    if is_file and layout.is_quarantined(path):
        return Leftover(LeftoverKind.QUARANTINED, path, size, mtime_ns)
    kind = LeftoverKind.PARTIAL if is_file and layout.is_partial(name) else LeftoverKind.FOREIGN
    return Leftover(kind, path, size, mtime_ns)


_Found = list[tuple[str, os.stat_result]]
"""Paths relative to the root, and what they are."""
_Listed = tuple[float, _Found]
"""Files of one directory, with its share of the whole walk, less that of its subdirectories."""
_FEW = frozenset({layout.JOURNAL, layout.QUARANTINE, layout.RELEASES})
"""Directories beside which the rest has nearly all files."""


def _shares(share: float, below: list[str]) -> tuple[float, list[tuple[str, float]]]:
    """Return what of a directory's share is done once it is listed, and those of the directories in it."""
    heavy = [path for path in below if path.rpartition("/")[2] not in _FEW]
    each = share / len(heavy) if heavy else 0.0
    return 0.0 if heavy else share, [(path, 0.0 if path.rpartition("/")[2] in _FEW else each) for path in below]


def _list(fs: FileSystem, root: str, relative: str) -> tuple[list[str], _Found]:
    """Return the directories in this one, and its files."""
    path = f"{root}/{relative}" if relative else root
    try:
        entries = list_directory(fs, path)
    except OSError as error:
        # It was removed or replaced on the server while it was read: its name says what is there now.
        if error.errno != errno.ESTALE:
            raise
        entries = list_directory(fs, path)
    directories, found = [], []
    for entry in entries:
        path = f"{relative}/{entry.name}" if relative else entry.name
        if entry.is_dir(follow_symlinks=False):
            directories.append(path)
            continue
        with contextlib.suppress(FileNotFoundError):
            found.append((path, fs.stat(f"{root}/{path}")))
    return directories, found


_Directory = tuple[str, float]
"""Path relative to the root, and its share of the whole walk."""
_Answer = tuple[_Directory, tuple[list[str], _Found] | OSError]


def _walk(
    list_one: Callable[[str], tuple[list[str], _Found]], threads: int, unread: list[OSError] | None
) -> Iterator[_Listed]:
    """Yield the files of one directory after the other; few are listed ahead of the caller."""
    pending: list[_Directory] = [("", 1.0)]
    wanted: queue.SimpleQueue[_Directory | None] = queue.SimpleQueue()
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()

    def work() -> None:
        """List directories until there is a None."""
        while (directory := wanted.get()) is not None:
            try:
                answers.put((directory, list_one(directory[0])))
            except OSError as error:
                answers.put((directory, error))

    for number in range(threads):
        threading.Thread(target=work, name=f"kvtier-walk-{number}", daemon=True).start()
    under_way = 0
    try:
        while pending or under_way:
            while pending and under_way < 2 * threads - 1:
                wanted.put(pending.pop())
                under_way += 1
            (_, share), answer = answers.get()
            under_way -= 1
            if isinstance(answer, OSError):
                if unread is None:
                    raise answer
                unread.append(answer)
                answer = [], []
            below, found = answer
            done, parts = _shares(share, below)
            # The last one next: so the list stays as small as the tree is deep and wide, not as it is large.
            pending.extend(reversed(parts))
            yield done, found
    finally:
        for _ in range(threads):
            wanted.put(None)


Tell = Callable[[float, int, int], None]
"""Told the share that is done, from 0 to 1, and how many blocks and bytes were dealt with so far."""


class WalkProgress:
    """Counts over several walks, which are taken to be of one length. Owned by one thread."""

    def __init__(self, tell: Tell = lambda _share, _blocks, _bytes: None) -> None:
        """Count nothing yet."""
        self._tell = tell
        self._walks = 1
        self._walked = 0
        self._share = 0.0
        self._blocks = 0
        self._bytes = 0

    def begin(self, walks: int) -> None:
        """Set the number of walks."""
        self._walks = max(1, walks)

    def add(self, size: int) -> None:
        """Count a block."""
        self._blocks += 1
        self._bytes += size
        self._show()

    def reach(self, share: float) -> None:
        """Note how much of the present walk is done."""
        self._share = share
        self._show()

    def finish(self) -> None:
        """End the present walk."""
        self._walked, self._share = self._walked + 1, 0.0
        self._show()

    def _show(self) -> None:
        self._tell(min(1.0, (self._walked + self._share) / self._walks), self._blocks, self._bytes)
