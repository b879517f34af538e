# SPDX-License-Identifier: Apache-2.0
"""Moves a damaged block file out of the way, and never a good one that a writer put in its place meanwhile."""

from __future__ import annotations

import contextlib
import os

from kvtier_connector.store.format import Fault
from kvtier_connector.store.fs import FileSystem, make_directories, new_token
from kvtier_connector.store.layout import BlockKey, block_path, quarantine_path


def quarantine(fs: FileSystem, root: str, bad: os.stat_result, key: BlockKey, fault: Fault) -> int:
    """Move the file away, unless the name means another file by now; give up quietly where that fails.

    Returns:
        The bytes that were freed, because the file had to be removed instead.
    """
    path = f"{root}/{block_path(key)}"
    moved = f"{root}/{quarantine_path(key, fault.value, new_token())}"
    with contextlib.suppress(OSError):
        if not os.path.samestat(bad, fs.stat(path)):
            return 0
        try:
            _rename(fs, path, moved)
        except FileNotFoundError:
            return 0
        except OSError:
            # A full volume has no room for the new name. The block must go all the same, or no writer replaces it.
            fs.unlink(path)
            return bad.st_size
        if not os.path.samestat(bad, fs.stat(moved)):
            # A writer replaced the file between our two calls: this is its block, and it goes back.
            fs.rename(moved, path)
    return 0


def _rename(fs: FileSystem, path: str, moved: str) -> None:
    try:
        fs.rename(path, moved)
    except FileNotFoundError:
        make_directories(fs, moved.rpartition("/")[0])
        fs.rename(path, moved)
