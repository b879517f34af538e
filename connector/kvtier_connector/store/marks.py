# SPDX-License-Identifier: Apache-2.0
"""Shows in the listing of the journals how long the one of this process is, so that nobody opens it in vain.

The mark is the name of an empty file. It is renamed after each write to the journal; what it says is never more than
what the volume has. Where it is missing, the journal is read at each news.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvtier_connector.store.fs import FIRST_WRITE_FLAGS, FileSystem
from kvtier_connector.store.layout import Mark, mark_path


class Marker:
    """The mark of one process's journal. One thread at a time."""

    def __init__(self, root: Path, *, fs: FileSystem) -> None:
        """Store the settings; nothing is shown yet."""
        self._root = str(root)
        self._fs = fs
        self._shown: Mark | None = None

    def show(self, mark: Mark) -> bool:
        """Say whether the volume shows it; one that is shown already costs no call, one that is not is tried again."""
        with contextlib.suppress(OSError):
            if mark != self._shown:
                self._move(mark)
                self._shown = mark
        return mark == self._shown

    def _move(self, mark: Mark) -> None:
        path = f"{self._root}/{mark_path(mark)}"
        if self._shown is not None:
            # Whoever removed it took this process for a dead one.
            with contextlib.suppress(FileNotFoundError):
                return self._fs.rename(f"{self._root}/{mark_path(self._shown)}", path)
        self._fs.close(self._fs.open(path, FIRST_WRITE_FLAGS))
        return None
