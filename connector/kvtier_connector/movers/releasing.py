# SPDX-License-Identifier: Apache-2.0
"""Closes files that were read while the next one is opened, because a close is a round trip to a network volume.

Of the three that a block takes, that is the one whose answer nobody needs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time

from kvtier_connector.store.fs import FileSystem

_SLOW_SECONDS = 0.0003
"""A close that takes longer is worth another thread's waking up."""
_MOST_WAITING = 2
"""Whoever reads waits itself while so many wait: then the volume, or this machine, does not keep up."""


class ReleasingFs(FileSystem):
    """The real system calls. One thread, besides its own, which closes."""

    def __init__(self) -> None:
        """Start without knowing how long a close takes."""
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_started = False
        self._is_slow = False
        """Whether the last close was; set by whichever thread that was, and only speed is at stake."""

    def release(self, fd: int) -> None:
        """Close a file that was only read: at once where that is quick, behind the caller's back where it is not."""
        if self._is_slow and self._waiting.qsize() < _MOST_WAITING and self._can_wait():
            self._waiting.put(fd)
        else:
            self._close(fd)

    def _can_wait(self) -> bool:
        if not self._is_started:
            # A host that has no room for another thread goes without.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._close_all, name="kvtier-close", daemon=True).start()
                self._is_started = True
        return self._is_started

    def _close_all(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._close(self._waiting.get())

    def _close(self, fd: int) -> None:
        began = time.monotonic()
        try:
            self.close(fd)
        finally:
            self._is_slow = time.monotonic() - began > _SLOW_SECONDS
