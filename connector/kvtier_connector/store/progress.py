# SPDX-License-Identifier: Apache-2.0
"""Shows a person how far a command is: one line that is written over, a few times a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import TextIO

_SECONDS = 0.2


class Progress:
    """Counts files and bytes. Owned by one thread."""

    def __init__(self, stream: TextIO | None, *, now: Callable[[], float]) -> None:
        """Store the settings; without a stream nothing is shown."""
        self._stream = stream
        self._now = now
        self._started = self._next = now()
        self._files = 0
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count a file, and show the counts if it is time to."""
        self._files += 1
        self._bytes += size
        if self._stream is not None and self._now() >= self._next:
            self._next = self._now() + _SECONDS
            self._show(self._stream)

    def end(self) -> None:
        """Show the last counts and leave the line."""
        if self._stream is not None:
            self._show(self._stream)
            self._stream.write("\n")
            self._stream.flush()

    def _show(self, stream: TextIO) -> None:
        seconds = max(self._now() - self._started, 1e-9)
        stream.write(f"\r{self._files} blocks, {self._bytes / 1e9:.2f} GB, {self._bytes / 1e9 / seconds:.2f} GB/s")
        stream.flush()
