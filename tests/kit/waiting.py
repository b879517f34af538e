# SPDX-License-Identifier: Apache-2.0
"""Waits for a condition with a deadline, so that no test sleeps and none hangs, and has a clock that a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

PAUSES = 4
"""How many times as long as a look the pause after it is."""
LONGEST_PAUSE_SECONDS = 0.1


def until(
    condition: Callable[[], Result],
    what: str | Callable[[], str] = "",
    *,
    seconds: float = 120.0,
    pause_seconds: float = 0.01,
) -> Result:
    """Return the first true result of the condition; fail when the deadline passes, and say what was waited for.

    A condition that takes long to look at is looked at less often: what it waits for needs the processor, too.
    """
    asked = time.monotonic()
    deadline, pause = asked + seconds, threading.Event()
    while not (result := condition()):
        answered = time.monotonic()
        if answered >= deadline:
            raise AssertionError(f"still {result!r} after {seconds} s: {what() if callable(what) else what}")
        pause.wait(max(pause_seconds, min(PAUSES * (answered - asked), LONGEST_PAUSE_SECONDS)))
        asked = time.monotonic()
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


def is_alive(process: int) -> bool:
    """Tell whether a process runs: one that ended and that its parent has not asked about does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Clock:
    """Called like ``time.monotonic``; a test sets ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds
