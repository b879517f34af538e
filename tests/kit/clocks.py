# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still unless a test moves it."""

from __future__ import annotations


class Clock:
    """Called like ``time.monotonic``; a test sets ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds
