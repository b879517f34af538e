# SPDX-License-Identifier: Apache-2.0
"""Makes the directories that blocks lie in with no more calls than the volume needs: to many, each is a round trip.

There are 4096 of them, so many of the first blocks begin one. As long as directories had to be made, one is made before
anything is tried in it; once they are there, nothing is asked first.
"""

from __future__ import annotations

from kvtier_connector.store.fs import FileSystem, make_directories

_MOST_KNOWN = 1 << 14
"""Of those known to be there; four times what one tenant has. Beyond that they are learnt anew."""


class BlockDirectories:
    """The directories of one root. Any thread may call: what is remembered is a hint, and a wrong one costs a call."""

    def __init__(self, fs: FileSystem) -> None:
        """Store the settings; nothing is made yet."""
        self._fs = fs
        self._known: set[str] = set()
        """Those that this process has found or made."""
        self._is_new = False
        """Whether the last one that it did not know had to be made."""
        self._gives_mode: set[str] = set()
        """In which ones a directory was seen to have the mode that it is to have without being told twice: it takes
        over a part of that from the one above, which somebody may have copied without it."""

    def prepare(self, directory: str) -> None:
        """Make the directory of a block that is about to be written, if it is likely not to be there."""
        if self._is_new and directory not in self._known:
            self.make(directory)

    def make(self, directory: str) -> None:
        """Make the directory of a block, and those above; one that is there already is fine."""
        try:
            self._is_new = self._make_one(directory)
        except FileNotFoundError:
            # The first block of all, or somebody has removed the tree; a network volume may say so for a while, too.
            self._is_new = True
            make_directories(self._fs, directory.rpartition("/")[0])
            try:
                self._make_one(directory)
            except FileNotFoundError:
                make_directories(self._fs, directory)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._gives_mode.clear()
        self._known.add(directory)

    def _make_one(self, directory: str) -> bool:
        """Make one, and say whether it was not there."""
        try:
            self._fs.mkdir_plainly(directory)
        except FileExistsError:
            return False
        above = directory.rpartition("/")[0]
        if above not in self._gives_mode and self._fs.mend_mode(directory):
            self._gives_mode.add(above)
        return True
