# SPDX-License-Identifier: Apache-2.0
"""Settings of a tier that change while engines run: one file, a key of a ConfigMap.

Kubernetes swaps a symbolic link above the file, so a read by path sees the old text or the new one and never a mixture.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

from kvtier_connector.contract.engine import LiveSettings, decode_live
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.store.fs import FOLLOW_FLAGS, LOCAL, FileSystem


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


_MOST_BYTES = 4096


class LiveFile:
    """The live settings of one tier. `settings` is memory and may be read from any thread.

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
        self._fs = fs
        self._problem = ""
        self._seconds = seconds
        self._now = now
        self._refreshing = threading.Lock()
        self._next_read = now()
        self._settings = LiveSettings()

    @property
    def problem(self) -> str:
        """Why the file was not understood at the last read, and what to write; empty if it was."""
        return self._problem

    @property
    def settings(self) -> LiveSettings:
        """The last that could be understood."""
        return self._settings

    @property
    def mode(self) -> Mode:
        """What the volume may be used for, as far as the settings say."""
        return Mode(self._settings.mode)

    def refresh(self) -> LiveSettings:
        """Read the file if it is time to, and return the settings."""
        with self._refreshing:
            if self._path and self._now() >= self._next_read:
                self._next_read = self._now() + self._seconds
                self._take()
        return self._settings

    def _take(self) -> None:
        staying = f"staying with mode {self._settings.mode}"
        try:
            self._settings = decode_live(self._read().decode())
        except OSError as error:
            self._problem = f"{self._path}: cannot be read: {error}; {staying}"
        except (ConfigInvalid, UnicodeDecodeError) as error:
            self._problem = f"{self._path}: {error}; {staying}"
        else:
            self._problem = ""

    def _read(self) -> bytes:
        buffer = memoryview(bytearray(_MOST_BYTES))
        fd = self._fs.open(self._path, FOLLOW_FLAGS)
        try:
            return bytes(buffer[: self._fs.preadv(fd, [buffer], 0)])
        finally:
            self._fs.close(fd)
