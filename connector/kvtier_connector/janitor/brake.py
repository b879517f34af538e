# SPDX-License-Identifier: Apache-2.0
"""Asks the engines of a tier to stop storing, and lets them go again: the file is there before it is needed.

A full volume has no room for a new file, so it is made at the start and overwritten in place. What it says runs out by
itself, so it is renewed while the reason lasts.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from kvtier_connector.store.fs import CREATE_FLAGS, FIRST_WRITE_FLAGS, NO_FILE, FileSystem, new_token
from kvtier_connector.store.layout import partial_path
from kvtier_connector.store.live import BRAKE_FILE, RELEASED, Brake, encode_brake
from kvtier_connector.store.mode import Mode

LEASE_SECONDS = 120.0
"""How long a brake holds that is not renewed; it is renewed after a third of that."""


class BrakeWriter:
    """The brake of one tier. Owned by one thread."""

    def __init__(self, tier_dir: str, *, fs: FileSystem, clock: Callable[[], int] = time.time_ns) -> None:
        """Store the settings; nothing is written yet."""
        self._path = f"{tier_dir}/{BRAKE_FILE}"
        self._fs = fs
        self._clock = clock
        self._written: Brake | None = None

    @property
    def reason(self) -> str:
        """Why the engines are braked, as far as the volume took it; empty if they are not."""
        return "" if self._written is None else self._written.reason

    def ask_time_ns(self) -> int | None:
        """Return the time that the volume gives the file when it is touched; None where it refuses.

        Without the file, one is made for a moment.
        """
        with contextlib.suppress(OSError):
            try:
                self._fs.touch(self._path)
                return self._fs.stat(self._path).st_mtime_ns
            except FileNotFoundError:
                path = partial_path(self._path, new_token())
                self._fs.close(self._fs.open(path, CREATE_FLAGS))
                try:
                    return self._fs.stat(path).st_mtime_ns
                finally:
                    self._fs.unlink(path)
        return None

    def set(self, reason: str) -> None:
        """Brake for this reason, or let go if it is empty; nothing is written while that is what the file says.

        Raises:
            OSError: the volume does not take it.
        """
        now_ns = self._clock()
        lasting_ns = int(LEASE_SECONDS * 1e9)
        written = self._written
        is_said = written is not None and bool(written.reason) == bool(reason)
        # More than it lasts is left only if the clock went back: for the engines it has run out by then.
        if is_said and (not reason or (written and lasting_ns * 2 // 3 < written.until_ns - now_ns <= lasting_ns)):
            return
        brake = Brake(Mode.READ_ONLY, reason, now_ns + lasting_ns) if reason else RELEASED
        self._write(encode_brake(brake))
        self._written = brake

    def _write(self, content: bytes) -> None:
        try:
            self._overwrite(content)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            # Somebody put a link or a pipe there, which would keep the engines from hearing of a brake.
            self._fs.unlink(self._path)
            self._overwrite(content)

    def _overwrite(self, content: bytes) -> None:
        fd = self._fs.open(self._path, FIRST_WRITE_FLAGS)
        try:
            # One call, so that a reader sees one text or the other.
            self._fs.pwritev(fd, [memoryview(content)], 0)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.close(fd)
            raise
        self._fs.close(fd)


def make_tier_directory(fs: FileSystem, tier_dir: str) -> None:
    """Make the directory of the tier if the volume is new; that above it must be there."""
    if os.path.dirname(tier_dir) != tier_dir:  # noqa: PTH120 - text in, text out
        with contextlib.suppress(FileExistsError):
            fs.mkdir(tier_dir)
