# SPDX-License-Identifier: Apache-2.0
"""What another writer of the volume could put where a file belongs, and what a crashed one leaves."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtier_connector.store.scan import Leftover, LeftoverKind, scan

KINDS = ("link", "pipe", "socket", "directory")
TOO_DEEP = b"[" * 4000
"""JSON that no parser takes."""


def plant(kind: str, path: Path) -> None:
    """Put something that is no file where a file belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        (path / "inside").mkdir(parents=True)


def clear(root: Path, *kinds: LeftoverKind) -> list[str]:
    """Remove leftovers as the janitor does once they are old; return their paths relative to the root."""
    found = [
        entry for entry in scan(root, partial_age_seconds=0) if isinstance(entry, Leftover) and entry.kind in kinds
    ]
    for entry in found:
        (root / entry.path).unlink()
    return [entry.path for entry in found]
