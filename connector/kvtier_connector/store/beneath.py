# SPDX-License-Identifier: Apache-2.0
"""Removes below one directory and nowhere else, whatever links somebody plants there.

A volume is shared: whoever can write to it can put a link in the place of any directory, also between two system calls.
So whoever removes with rights of its own goes down from the base directory by directory, holding each open.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from kvtier_connector.store.fs import FileSystem


class Beneath(FileSystem):
    """Another file system, of which `unlink` and `rmdir` take only what lies below the base. Any thread may call."""

    def __init__(self, fs: FileSystem, base: str) -> None:
        """Store the settings.

        Args:
            fs: Makes the system calls.
            base: Absolute; what is above it may be links, itself and what is below may not.
        """
        self._fs = fs
        self._base = base
        for name in set(vars(FileSystem)) - set(vars(Beneath)):
            if not name.startswith("_"):
                setattr(self, name, getattr(fs, name))

    def unlink(self, path: str) -> None:
        """Remove a name; raise NotADirectoryError if a link is in the way."""
        with self._parent(path) as (directory, name):
            self._fs.unlink_in(directory, name)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory; raise NotADirectoryError if a link is in the way, or in its place."""
        with self._parent(path) as (directory, name):
            self._fs.rmdir_in(directory, name)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Hold the directory open that has the name."""
        *above, name = path.removeprefix(f"{self._base}/").split("/")
        if not path.startswith(f"{self._base}/") or {"", ".", ".."} & {*above, name}:
            raise ValueError(f"{path}: is not below {self._base}")
        try:
            held = self._open_base()
            try:
                for each in above:
                    below = self._fs.open_directory(each, held)
                    held, above_it = below, held
                    self._fs.close(above_it)
                yield held, name
            finally:
                with contextlib.suppress(OSError):
                    self._fs.close(held)
        except OSError as error:
            # The calls were given a part of it.
            error.filename = path
            raise

    def _open_base(self) -> int:
        try:
            return self._fs.open_directory(self._base)
        except NotADirectoryError as error:
            # Not to be taken for a file that is gone.
            what = f"{self._base} is a link, or no directory; nothing is removed through a link: name what it names"
            raise OSError(errno.ELOOP, what) from error
