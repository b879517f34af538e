# SPDX-License-Identifier: Apache-2.0
"""Writes the blocks that wait when an engine is told to end, while there is time.

vLLM goes on with its steps after SIGTERM until its requests have ended and no transfer is left, for `shutdown_timeout`
seconds at most. Then the front end kills the engine. So a part of that time is kept back for the end itself. Blocks
that the volume has not taken by then are given up and counted, and are computed again where they are needed.

The signal comes to the thread that runs the engine, between two of its instructions: it leaves the time there, and the
next step of the engine does the rest. Everything else is the scheduler's thread only.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

from kvtier_connector.vllm_adapter import metrics

logger = init_logger("vllm.kvtier.drain")

CLOSE_SECONDS = 12.0
"""Kept back of the time that vLLM leaves: workers and the threads of the volume get 5 s each to end."""
LEAST_SHARE = 0.5
"""Of that time that is for writing, however short it is."""


def seconds_to_write(shutdown_seconds: float) -> float:
    """Return how long blocks may be written after SIGTERM, of what vLLM leaves for its end."""
    return max(LEAST_SHARE * shutdown_seconds, shutdown_seconds - CLOSE_SECONDS)


class Drain:
    """See the module."""

    def __init__(self, shutdown_seconds: float, stats: metrics.Stats, *, name: str) -> None:
        """Store; `watch` begins.

        Args:
            shutdown_seconds: What vLLM leaves for the end of an engine, its `shutdown_timeout`.
            stats: Where blocks are counted.
            name: Of the tier, for the log.
        """
        self._seconds = seconds_to_write(shutdown_seconds)
        self._stats = stats
        self._name = name
        self._signalled_at: float | None = None
        """When the signal came, on `time.monotonic`; written by the signal handler alone."""
        self._restore: Callable[[], None] = lambda: None
        self._is_announced = False
        self._lost: set[OffloadKey] = set()
        self._outcome: tuple[int, int] | None = None
        """Written and lost blocks as logged last; None before."""
        self._counted = 0
        """The most lost blocks that there were when it was told: a counter only grows."""
        self.written = 0
        """Blocks that came to lie on the volume since the signal, or lay there."""

    def watch(self) -> None:
        """Hear of SIGTERM from now on, before vLLM does; without effect where vLLM listens to no signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if not callable(before):
            # The engine runs in its user's own process, whose signals are the user's.
            return

        def note(number: int, frame: FrameType | None) -> None:
            self.begin()
            before(number, frame)

        def restore() -> None:
            # Only the main thread may; from another one, what was heard of before goes on being told.
            is_ours = signal.getsignal(signal.SIGTERM) is note
            if is_ours and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)

        signal.signal(signal.SIGTERM, note)
        self._restore = restore

    def begin(self) -> None:
        """Note that the engine was told to end; a signal handler may call it, and more than once."""
        if self._signalled_at is None:
            self._signalled_at = time.monotonic()

    @property
    def is_begun(self) -> bool:
        """Whether the engine was told to end."""
        return self._signalled_at is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more may be written."""
        return self._signalled_at is not None and time.monotonic() - self._signalled_at >= self._seconds

    def announce(self, waiting: int) -> bool:
        """Say once that the engine ends, and with how many blocks waiting; return whether this was that time."""
        if self._is_announced or self._signalled_at is None:
            return False
        self._is_announced = True
        if waiting:
            logger.info("kvtier %s: %d blocks wait to be written, for %.0f s", self._name, waiting, self._seconds)
        return True

    def note(self, key: OffloadKey, *, is_written: bool) -> None:
        """Take in how a block that was to be written has ended; before the signal it is no matter of a drain."""
        if self._signalled_at is None:
            return
        if is_written:
            self._lost.discard(key)
            self.written += 1
            self._stats.count(metrics.DRAINED_BLOCKS, cause=metrics.WRITTEN)
        else:
            # It may be offered again, while there is time.
            self._lost.add(key)

    def tell(self, *, is_last: bool = False) -> None:
        """Say how it ended: once when the time is over, and at the very end if it has become another end."""
        if self._signalled_at is None:
            return
        self._stats.count(metrics.DRAINED_BLOCKS, max(0, self.lost - self._counted), cause=metrics.LOST)
        self._counted = max(self._counted, self.lost)
        outcome = self.written, self.lost
        if outcome == self._outcome or not (self._outcome is None or is_last):
            return
        self._outcome = outcome
        (logger.warning if self.lost else logger.info)(
            "kvtier %s: drained in %.1f s: %d blocks written, %d lost, which are computed again where they are needed",
            self._name,
            time.monotonic() - self._signalled_at,
            *outcome,
        )

    @property
    def lost(self) -> int:
        """Blocks that were to be written since the signal, and are not."""
        return len(self._lost)

    def close(self) -> None:
        """Say how it ended, and listen no more."""
        self.tell(is_last=True)
        self._restore()
