# SPDX-License-Identifier: Apache-2.0
"""The threads that wait for the volume, so that vLLM's scheduler never does.

One pool serves three lanes: probes (a request waits and the answer is one system call), loads (a request waits) and
stores (nobody waits). A free thread takes the most urgent lane that has work and is below its limit; the limits keep a
burst of stores, or a volume that hangs, from taking every thread.
"""

from __future__ import annotations

import enum
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

logger = init_logger("vllm.kvtier.workers")

Bytes = npt.NDArray[np.uint8]


class Lane(enum.IntEnum):
    """What a task is for; the lower number is served first."""

    PROBE = 0
    LOAD = 1
    STORE = 2


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """How one lane may use the pool."""

    threads: int
    """At most this many tasks of the lane run at once."""
    stuck_seconds: float
    """A task that runs longer than this counts as stuck."""


def default_limits(threads: int, *, probe_seconds: float, transfer_seconds: float) -> dict[Lane, LaneLimits]:
    """Return limits for a pool: probes and stores take half of it at most, loads all of it when nothing else waits.

    A probe goes before the next load, so it waits for one block at most; if loads hang on every thread, there is
    nothing to probe for.
    """
    half = max(1, threads // 2)
    return {
        Lane.PROBE: LaneLimits(half, probe_seconds),
        Lane.LOAD: LaneLimits(threads, transfer_seconds),
        Lane.STORE: LaneLimits(half, transfer_seconds),
    }


class Staging:
    """One page-aligned buffer, owned by one thread of the pool; its memory is taken at first use."""

    def __init__(self, size_bytes: int) -> None:
        """Store the size."""
        self._size_bytes = size_bytes
        self._array: Bytes | None = None

    @property
    def array(self) -> Bytes:
        """The whole buffer; its bytes are what the previous task left."""
        if self._array is None:
            self._array = np.frombuffer(mmap.mmap(-1, self._size_bytes), dtype=np.uint8)
        return self._array


Task = Callable[[Staging], None]
"""Runs on a thread of the pool, with that thread's buffer; may block for as long as the volume does."""


class WorkerPool:
    """Daemon threads over three queues. `submit`, `is_stuck` and `close` are the scheduler's; tasks are the threads'.

    `_changed` guards every field; it is never held while a task runs. A thread that hangs in a system call keeps its
    buffer until the call returns, so nobody else ever sees those late bytes.
    """

    def __init__(self, threads: int, limits: Mapping[Lane, LaneLimits], *, staging_bytes: int) -> None:
        """Store the settings; call `start`."""
        self._limits = limits
        self._changed = threading.Condition()
        self._queues: dict[Lane, deque[Task]] = {lane: deque() for lane in Lane}
        self._running: dict[Lane, dict[int, float]] = {lane: {} for lane in Lane}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(Staging(staging_bytes),), name=f"kvtier-io-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        """Start the threads; fewer where the host has no room for all, but one at least.

        Raises:
            RuntimeError: there is no room for one.
        """
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                if not started:
                    raise
                logger.warning(
                    "Only %d of %d threads for the volume can be started (%s): raise the container's limit of "
                    "processes",
                    started,
                    len(self._threads),
                    error,
                )
                del self._threads[started:]
                return

    def submit(self, lane: Lane, tasks: list[Task]) -> None:
        """Queue tasks; they start in this order within their lane. After `close` they are dropped."""
        with self._changed:
            if not self._is_closed:
                self._queues[lane].extend(tasks)
                self._changed.notify(len(tasks))

    def is_stuck(self, lane: Lane) -> bool:
        """Say whether a task of the lane would not start, because stuck tasks hold every thread it could have."""
        now = time.monotonic()
        with self._changed:
            stuck = {lane: self._count_stuck(lane, now) for lane in Lane}
        return stuck[lane] >= self._limits[lane].threads or sum(stuck.values()) >= len(self._threads)

    def count_stuck(self) -> int:
        """Return how many threads the volume holds up for longer than their lane allows."""
        now = time.monotonic()
        with self._changed:
            return sum(self._count_stuck(lane, now) for lane in Lane)

    def close(self, timeout_seconds: float) -> bool:
        """Drop what is queued, let running tasks end; return False if some did not in time and are left behind."""
        with self._changed:
            self._is_closed = True
            for queue in self._queues.values():
                queue.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _count_stuck(self, lane: Lane, now: float) -> int:
        oldest = now - self._limits[lane].stuck_seconds
        return sum(started < oldest for started in self._running[lane].values())

    def _next_lane(self) -> Lane | None:
        for lane in Lane:
            if self._queues[lane] and len(self._running[lane]) < self._limits[lane].threads:
                return lane
        return None

    def _work(self, staging: Staging) -> None:
        thread = threading.get_ident()
        lane: Lane | None = None
        while True:
            with self._changed:
                if lane is not None:
                    self._end_task(lane, thread)
                while (lane := self._next_lane()) is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
                task = self._queues[lane].popleft()
                self._running[lane][thread] = time.monotonic()
            try:
                task(staging)
            except Exception:
                # The edge of the thread: a task reports what it expects by itself, so this is a defect of ours.
                logger.exception("A task of the disk tier failed")
            finally:
                # A task is referenced by nothing else; keeping it would keep its job until the next one comes.
                del task

    def _end_task(self, lane: Lane, thread: int) -> None:
        was_full = len(self._running[lane]) >= self._limits[lane].threads
        del self._running[lane][thread]
        if was_full and self._queues[lane]:
            # A waiter may have been passed over because the lane was full; this thread takes one task only.
            self._changed.notify()
