# SPDX-License-Identifier: Apache-2.0
"""Two small files that change while engines run: the live settings of the tier, and the janitor's brake.

The live settings are one key of a ConfigMap: Kubernetes swaps a symbolic link above it, so a read by path sees the old
text or the new one and never a mixture. The brake is a file on the volume itself, which the janitor overwrites in
place, since a full volume has no room for a new one; it expires by itself, in case the janitor is gone.

What the volume may be used for.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvtier_connector.contract.engine import LiveSettings, decode_live
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.store.fs import FOLLOW_FLAGS, LOCAL, READ_FLAGS, FileSystem


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


def stricter(one: Mode, other: Mode) -> Mode:
    """Return the one that allows less."""
    return max(one, other, key=list(Mode).index)


BRAKE_FILE = "brake.json"
"""Name of the janitor's file, beside the generations of the tier."""
BRAKE_BYTES = 1024
"""Length of the file, whatever it says: so that overwriting it never needs room."""
LONGEST_BRAKE_SECONDS = 3600.0
"""A brake that nobody renews ends after this, whatever it says: its writer's clock may be wrong."""

_MOST_BYTES = 4096


class Brake(NamedTuple):
    """What the janitor asks of the engines."""

    mode: Mode
    """They use the volume for no more than this."""
    reason: str
    """For people."""
    until_ns: int
    """Nanoseconds since 1970 by the janitor's clock; afterwards it means nothing."""


RELEASED = Brake(Mode.READ_WRITE, "", 0)
"""No brake."""


def encode_brake(brake: Brake) -> bytes:
    """Return the whole content of the file, always of the same length; a reason that is too long is cut."""
    reason = brake.reason
    while True:
        document = {"mode": brake.mode.value, "reason": reason, "until_ns": brake.until_ns}
        text = json.dumps(document).encode()
        if len(text) < BRAKE_BYTES:
            return text.ljust(BRAKE_BYTES - 1) + b"\n"
        reason = reason[: len(reason) // 2]


def decode_brake(content: bytes) -> Brake:
    """Read what `encode_brake` wrote.

    Raises:
        ConfigInvalid: this is something else, or half of it.
    """
    try:
        document = json.loads(content)
        brake = Brake(Mode(document["mode"]), document.get("reason", ""), document["until_ns"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigInvalid(f"not a brake: {content[:80]!r}") from error
    if not isinstance(brake.reason, str) or type(brake.until_ns) is not int:
        raise ConfigInvalid(f"not a brake: {content[:80]!r}")
    return brake


class _WatchedFile:
    """`problem` is memory and may be read from any thread. `_read` may wait for the file."""

    def __init__(self, path: str, fs: FileSystem, flags: int) -> None:
        self._path = path
        self._fs = fs
        self._flags = flags
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why the file was not understood at the last read, and what to write; empty if it was."""
        return self._problem

    def _read(self) -> bytes:
        buffer = memoryview(bytearray(_MOST_BYTES))
        fd = self._fs.open(self._path, self._flags)
        try:
            return bytes(buffer[: self._fs.preadv(fd, [buffer], 0)])
        finally:
            self._fs.close(fd)


class LiveFile(_WatchedFile):
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
        super().__init__(path, fs, FOLLOW_FLAGS)
        self._seconds = seconds
        self._now = now
        self._refreshing = threading.Lock()
        self._next_read = now()
        self._settings = LiveSettings()

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


class BrakeFile(_WatchedFile):
    """The brake of one tier. `mode` and `reason` are memory and may be read from any thread.

    `refresh` reads the file on the volume, which may hang: call it from one background thread that may be lost.
    """

    def __init__(self, path: str, *, fs: FileSystem = LOCAL, clock: Callable[[], int] = time.time_ns) -> None:
        """Start without a brake; `clock` tells nanoseconds since 1970."""
        # Any writer of the volume can put something else there.
        super().__init__(path, fs, READ_FLAGS)
        self._clock = clock
        self._content = b""
        self._brake = RELEASED

    @property
    def mode(self) -> Mode:
        """What the janitor leaves to the engines now."""
        left_ns = self._brake.until_ns - self._clock()
        # More than the longest is left only if the clock went back since the file was read.
        return self._brake.mode if 0 < left_ns <= int(LONGEST_BRAKE_SECONDS * 1e9) else Mode.READ_WRITE

    @property
    def reason(self) -> str:
        """Why it brakes; empty if it does not."""
        return self._brake.reason if self.mode is not Mode.READ_WRITE else ""

    def refresh(self) -> Mode:
        """Read the file and return the mode; without a file there is no brake."""
        try:
            content = self._read()
            if content != self._content:
                # Of the same content the time of the first sight counts, so that a forgotten brake ends.
                brake = decode_brake(content)
                longest = self._clock() + int(LONGEST_BRAKE_SECONDS * 1e9)
                self._brake = brake._replace(until_ns=min(brake.until_ns, longest))
                self._content = content
            self._problem = ""
        except (FileNotFoundError, NotADirectoryError):
            self._brake, self._content, self._problem = RELEASED, b"", ""
        except OSError as error:
            self._problem = f"{self._path}: cannot be read: {error}"
        except ConfigInvalid as error:
            self._problem = f"{self._path}: {error}"
        return self.mode
