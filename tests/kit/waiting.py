# SPDX-License-Identifier: Apache-2.0
"""Waits for a condition with a deadline, so that no test sleeps and none hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
