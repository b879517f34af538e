# SPDX-License-Identifier: Apache-2.0
"""What another writer of the volume could put where a file belongs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

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
