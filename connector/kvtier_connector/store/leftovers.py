# SPDX-License-Identifier: Apache-2.0
"""Remove what crashed writers and damaged blocks leave behind. Any process may do it at any time, also two at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.scan import Leftover, LeftoverKind, scan


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


def _remove(
    root: Path, kind: LeftoverKind, older_than_seconds: float, *, fs: FileSystem, clock: Callable[[], int]
) -> list[str]:
    youngest_ns = clock() - int(older_than_seconds * 1e9)
    removed = []
    for entry in scan(root, fs=fs, partial_age_seconds=older_than_seconds, clock=clock):
        if isinstance(entry, Leftover) and entry.kind is kind and entry.mtime_ns <= youngest_ns:
            try:
                fs.unlink(f"{root}/{entry.path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreUnavailable(f"{root}/{entry.path}: cannot be removed: {error}") from error
            removed.append(entry.path)
    return removed
