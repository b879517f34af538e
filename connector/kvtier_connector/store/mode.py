# SPDX-License-Identifier: Apache-2.0
"""What the volume may be used for now, read from a mounted file that can change while the engine runs.

The file is a JSON object; its ``mode`` is read here. It is one key of a ConfigMap: Kubernetes swaps a symbolic link
above it, so a read by path sees the old text or the new one and never a mixture.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable

from kvtier_connector.store.fs import LOCAL, FileSystem

_MOST_BYTES = 4096
"""More than the live settings take."""


class Mode(enum.Enum):
    """The values are those of the resource's field."""

    READ_WRITE = "ReadWrite"
    READ_ONLY = "ReadOnly"
    """Blocks are loaded; nothing at all is written to the volume."""
    BYPASS = "Bypass"
    """The volume is not touched."""

    @property
    def may_load(self) -> bool:
        """Say whether blocks may be read."""
        return self is not Mode.BYPASS

    @property
    def may_store(self) -> bool:
        """Say whether anything may be written, journals included."""
        return self is Mode.READ_WRITE


class ModeFile:
    """The mode of one tier. `mode` and `problem` are memory and may be read from any thread.

    `refresh` reads the file: call it from a background thread; `_refreshing` lets one in at a time.
    """

    def __init__(
        self,
        path: str,
        *,
        seconds: float = 5.0,
        fs: FileSystem = LOCAL,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with ReadWrite until the first refresh; an empty path keeps it for ever.

        Args:
            path: The mounted file.
            seconds: It is read at most this often, however often `refresh` is called.
            fs: The system calls.
            now: Seconds that never go back.
        """
        self._path = path
        self._seconds = seconds
        self._fs = fs
        self._now = now
        self._refreshing = threading.Lock()
        self._next_read = now()
        self._mode = Mode.READ_WRITE
        self._problem = ""

    @property
    def mode(self) -> Mode:
        """The last mode that could be understood."""
        return self._mode

    @property
    def problem(self) -> str:
        """Why the file was not understood at the last read, and what to write; empty if it was."""
        return self._problem

    def refresh(self) -> Mode:
        """Read the file if it is time to, and return the mode."""
        with self._refreshing:
            if self._path and self._now() >= self._next_read:
                self._next_read = self._now() + self._seconds
                self._read()
        return self._mode

    def _read(self) -> None:
        buffer = memoryview(bytearray(_MOST_BYTES))
        try:
            # Links are followed here: a ConfigMap's files are links.
            fd = self._fs.open(self._path, 0)
            try:
                text = bytes(buffer[: self._fs.preadv(fd, [buffer], 0)])
            finally:
                self._fs.close(fd)
        except OSError as error:
            self._problem = f"{self._path}: cannot be read: {error}; staying with {self._mode.value}"
            return
        try:
            self._mode = Mode(json.loads(text)["mode"])
        except (ValueError, LookupError, TypeError):
            modes = ", ".join(mode.value for mode in Mode)
            self._problem = (
                f"{self._path}: {text[:80]!r} is not an object whose mode is one of {modes}; "
                f"staying with {self._mode.value}"
            )
        else:
            self._problem = ""
