# SPDX-License-Identifier: Apache-2.0
"""Shows in the listing of the journals how long the one of this process is, so that nobody opens it in vain.

The mark is the name of an empty file. It is renamed after each write to the journal; what it says is never more than
what the volume has. Where it is missing, the journal is read at each news: so one that cannot be renamed is removed.
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
        """Say whether the volume shows it, or none; one that is shown already costs no call, others are tried again."""
        with contextlib.suppress(OSError):
            if mark != self._shown:
                self._move(mark)
                self._shown = mark
        return self._shown in {mark, None}

    def _move(self, mark: Mark) -> None:
        path = f"{self._root}/{mark_path(mark)}"
        if self._shown is not None:
            shown = f"{self._root}/{mark_path(self._shown)}"
            try:
                return self._fs.rename(shown, path)
            except FileNotFoundError:
                # Whoever removed it took this process for a dead one.
                self._shown = None
            except OSError:
                # To whoever believes it there is nothing new.
                self._fs.unlink(shown)
                self._shown = None
                raise
        self._fs.close(self._fs.open(path, FIRST_WRITE_FLAGS))
        return None
