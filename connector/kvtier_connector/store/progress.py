# SPDX-License-Identifier: Apache-2.0
"""How far long work on a volume is: the share that is done, and what was seen. Shows nothing by itself."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[float, int, int], None]
"""Told the share that is done, from 0 to 1, and how many blocks and bytes were dealt with so far."""


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


class Progress:
    """Counts over several walks, which are taken to be of one length. Owned by one thread."""

    def __init__(self, tell: Tell = lambda _share, _blocks, _bytes: None) -> None:
        """Count nothing yet."""
        self._tell = tell
        self._walks = 1
        self._walked = 0
        self._share = 0.0
        self._blocks = 0
        self._bytes = 0

    def begin(self, walks: int) -> None:
        """Say over how many walks it goes."""
        self._walks = max(1, walks)

    def add(self, size: int) -> None:
        """Count a block."""
        self._blocks += 1
        self._bytes += size
        self._show()

    def reach(self, share: float) -> None:
        """Note how much of the present walk is done."""
        self._share = share
        self._show()

    def finish(self) -> None:
        """End the present walk."""
        self._walked, self._share = self._walked + 1, 0.0
        self._show()

    def _show(self) -> None:
        self._tell(min(1.0, (self._walked + self._share) / self._walks), self._blocks, self._bytes)
