# SPDX-License-Identifier: Apache-2.0
"""Says with one system call whether any process of a root has news, so that nobody reads journals in which is none.

The bell is the time of the directory of the journals: whoever wrote to a journal sets it to now, and the volume does so
itself when a journal is added or removed. One thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from kvtier_connector.store.fs import READ_FLAGS, FileSystem
from kvtier_connector.store.layout import JOURNAL
from kvtier_connector.store.statx import State

_SETTLING_ROUNDS = 2
"""After a change, so many more rounds count as ringing. Some volumes tell times in whole seconds, and caches of nodes
are up to a second late, so that what was written soon after a change may look like the change."""

MOST_SILENT_ROUNDS = 240
"""A bell that was silent for so many rounds counts as ringing once: there are volumes on which nobody can ring it, and
caches that hide it for long. Each look costs calls for each process, so it is rare."""

_NO_SUCH_CALL = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})
"""What a system, or a filter of its calls, says of one that it does not have; the C library, which then stands in for
it, says EINVAL, since it cannot ask the server."""


class Bell:
    """The bell of one root, as one process hears it."""

    def __init__(
        self, root: Path, *, fs: FileSystem, is_cached: bool = False, most_silent_rounds: int = MOST_SILENT_ROUNDS
    ) -> None:
        """Store the settings; `is_cached` is for a volume, NFS, of which the node answers from a cache for long."""
        self._path = f"{root}/{JOURNAL}"
        self._fs = fs
        self._is_cached = is_cached
        self._most_silent_rounds = most_silent_rounds
        self._seen: State | None = None
        self._rounds = _SETTLING_ROUNDS + 1

    def is_ringing(self) -> bool:
        """Say whether there may be news since the last call; True, too, where the volume does not answer."""
        try:
            state = self._look()
        except OSError:
            self._rounds = _SETTLING_ROUNDS
            return True
        if state != self._seen:
            self._seen, self._rounds = state, _SETTLING_ROUNDS + 1
        elif self._rounds <= -self._most_silent_rounds:
            self._rounds = 1
        self._rounds -= 1
        return self._rounds >= 0

    def ring(self) -> None:
        """Have the others look; where the volume does not take it, they hear with the next news."""
        with contextlib.suppress(OSError):
            self._fs.touch(self._path)

    def _look(self) -> State | None:
        try:
            if self._is_cached:
                return self._look_at_server()
            status = self._fs.stat(self._path)
        except FileNotFoundError:
            return None
        return State(status.st_dev, status.st_ino, status.st_mtime_ns)

    def _look_at_server(self) -> State:
        try:
            return self._fs.stat_at_server(self._path)
        except OSError as error:
            if error.errno not in _NO_SUCH_CALL:
                raise
        # A client of NFS asks the server whenever a directory is opened.
        fd = self._fs.open(self._path, READ_FLAGS)
        try:
            status = self._fs.fstat(fd)
        finally:
            self._fs.close(fd)
        return State(status.st_dev, status.st_ino, status.st_mtime_ns)
