# SPDX-License-Identifier: Apache-2.0
"""Remove what crashed writers and damaged blocks leave behind. Any process may do it at any time, also two at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.scan import Leftover, LeftoverKind, list_journals, scan


def remove_stale_partials(
    root: Path, older_than_seconds: float, *, fs: FileSystem = LOCAL, clock: Callable[[], int] = time.time_ns
) -> list[str]:
    """Remove partial files last written that long ago; return their paths relative to the root.

    A writer that is slower than that loses its file, notices at the rename, and writes again.

    Raises:
        StoreUnavailable: the root cannot be walked, or a file cannot be removed.
    """
    return _remove(root, LeftoverKind.PARTIAL, older_than_seconds, fs=fs, clock=clock)


def remove_quarantined(
    root: Path, older_than_seconds: float, *, fs: FileSystem = LOCAL, clock: Callable[[], int] = time.time_ns
) -> list[str]:
    """Remove quarantined files last written that long ago; return their paths relative to the root.

    Raises:
        StoreUnavailable: the root cannot be walked, or a file cannot be removed.
    """
    return _remove(root, LeftoverKind.QUARANTINED, older_than_seconds, fs=fs, clock=clock)


def remove_old_journals(
    root: Path, older_than_seconds: float, *, fs: FileSystem = LOCAL, clock: Callable[[], int] = time.time_ns
) -> list[str]:
    """Remove journals last written that long ago; return their paths relative to the root.

    A process that has only been quiet notices at its next write, and begins a new one.

    Raises:
        StoreUnavailable: the journals cannot be looked at, or one cannot be removed.
    """
    youngest_ns = clock() - int(older_than_seconds * 1e9)
    removed = []
    for path, _, mtime_ns in list_journals(root, fs=fs):
        if mtime_ns <= youngest_ns and _unlink(fs, root, path):
            removed.append(path)
    return removed


def _unlink(fs: FileSystem, root: Path, path: str) -> bool:
    """Remove a file; say whether it was there."""
    try:
        fs.unlink(f"{root}/{path}")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreUnavailable(f"{root}/{path}: cannot be removed: {error}") from error
    return True


def _remove(
    root: Path, kind: LeftoverKind, older_than_seconds: float, *, fs: FileSystem, clock: Callable[[], int]
) -> list[str]:
    youngest_ns = clock() - int(older_than_seconds * 1e9)
    removed = []
    for entry in scan(root, fs=fs, partial_age_seconds=older_than_seconds, clock=clock):
        is_old = isinstance(entry, Leftover) and entry.kind is kind and entry.mtime_ns <= youngest_ns
        if is_old and _unlink(fs, root, entry.path):
            removed.append(entry.path)
    return removed
