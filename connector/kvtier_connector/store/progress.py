# SPDX-License-Identifier: Apache-2.0
"""What the commands of the store show a person: sizes to read, and one line that says how far they are."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_SECONDS = 0.2


def readable_size(count: float) -> str:
    """Return a number of bytes with a unit that leaves few digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:  # noqa: PLR2004 - the step between these units
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def existing_directory(text: str) -> Path:
    """Read the name of a directory; argparse turns the error into a message."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no directory")
    return path


class Progress:
    """Counts files and bytes, and writes them over and over on one line, a few times a second. Owned by one thread."""

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
