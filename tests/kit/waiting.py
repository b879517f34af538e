# SPDX-License-Identifier: Apache-2.0
"""Waits for a condition with a deadline, so that no test sleeps and none hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def until(
    condition: Callable[[], Result],
    what: str | Callable[[], str] = "",
    *,
    seconds: float = 120.0,
    pause_seconds: float = 0.01,
) -> Result:
    """Return the first true result of the condition; fail when the deadline passes, and say what was waited for."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (result := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"still {result!r} after {seconds} s: {what() if callable(what) else what}")
        pause.wait(pause_seconds)
    return result


def until_the_next_tick(directory: Path) -> None:
    """Wait until what is written has a later time than a directory, on volumes whose clock is coarse, too.

    Engines ring and look a second apart, so they do without; tests are done within a hundredth.
    """
    if not directory.exists():
        return
    clock, before = directory.parent.with_name("clock"), directory.stat().st_mtime_ns

    def has_moved_on() -> bool:
        clock.touch()
        return clock.stat().st_mtime_ns > before

    until(has_moved_on, "the volume's clock has moved on")
