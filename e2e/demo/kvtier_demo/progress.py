# SPDX-License-Identifier: Apache-2.0
"""Prints the steps of the demo: a line for each change, and one every ten seconds while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable

_HEARTBEAT_SECONDS = 10.0
_POLL_SECONDS = 0.25


class Progress:
    """Prints lines with the seconds since the start."""

    def __init__(self) -> None:
        """Start the clock."""
        self._started = time.monotonic()
        self._said: dict[str, str] = {}
        self._last = 0.0

    def say(self, text: str) -> None:
        """Print one line."""
        self._last = time.monotonic()
        print(f"[{self._last - self._started:5.0f}s] {text}", flush=True)

    def state(self, subject: str, text: str) -> None:
        """Print ``subject: text`` if it differs from what was said of the subject last."""
        if text and self._said.get(subject) != text:
            self._said[subject] = text
            self.say(f"{subject}: {text}")

    def wait(self, what: str, is_done: Callable[[], bool], *, seconds: float) -> None:
        """Wait until ``is_done``; raise TimeoutError naming ``what`` after the time."""
        deadline = time.monotonic() + seconds
        while not is_done():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"{what}: not so after {seconds:.0f} s")
            if now - self._last > _HEARTBEAT_SECONDS:
                self.say(f"waiting for {what}")
            time.sleep(_POLL_SECONDS)
