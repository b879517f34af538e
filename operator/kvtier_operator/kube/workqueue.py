# SPDX-License-Identifier: Apache-2.0
"""Who is reconciled when: a queue of keys with worker threads, back-off and a steady second look.

A key waits at most once however often it is added, and never runs in two threads at a time: what is added while it runs
makes it run once more. After a pass the key comes back by itself: soon after a failure, later each time, and after the
resync interval otherwise, so that nothing depends on an event having been delivered.

kopf's own queue is not used: it keeps what is to be tried again in annotations, and knows the changes of one kind only.

Threads: `add` may be called from any thread. All fields are guarded by one condition; the work itself runs outside it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

LONGEST_DELAY_SECONDS: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a pass asks for next."""

    retry_after: float | None = None
    """Seconds until the next try after the first failure in a row; None where the pass did not fail."""
    again_after: float | None = None
    """Seconds until the next look after a pass that did not fail; None for the resync interval."""
    is_gone: bool = False
    """Nothing is left to do for the key until it is added again."""


class WorkQueue(Generic[Key]):
    """Runs `work(key, attempt)` on worker threads for every key that was added, until it is closed."""

    def __init__(
        self,
        work: Callable[[Key, int], Done],
        *,
        workers: int,
        resync_seconds: float,
        settle_seconds: float = 0.0,
    ) -> None:
        """Store the settings; `start` starts the threads.

        Args:
            work: one pass; told the key and how many times in a row it is being tried. What it raises counts as a
                failure and is logged.
            workers: threads, and so keys that run at the same time.
            resync_seconds: after how long a key runs again by itself, give or take a tenth.
            settle_seconds: how long an added key waits, so that a burst of events makes one pass.
        """
        self._work = work
        self._workers = workers
        self._resync_seconds = resync_seconds
        self._settle_seconds = settle_seconds
        self._changed = threading.Condition()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._running: dict[Key, float | None] = {}
        self._failures: dict[Key, int] = {}
        self._hurried: set[Key] = set()
        """Keys that are due because somebody added them."""
        self._beat = time.monotonic()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the workers."""
        self._threads = [
            threading.Thread(target=self._run, name=f"reconcile-{number}", daemon=True)
            for number in range(self._workers)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, *, timeout: float) -> bool:
        """Stop taking keys, let running passes end, and tell whether they did within the time-out."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def add(self, key: Key) -> None:
        """Run a pass over the key soon, whatever it waits for now."""
        with self._changed:
            self._hurried.add(key)
            self._schedule(key, time.monotonic() + self._settle_seconds)

    def seconds_overdue(self) -> float:
        """Return how long the longest waiting key has been due without any worker having moved: 0 is healthy."""
        with self._changed:
            now = time.monotonic()
            earliest = min(self._due.values(), default=now)
            return max(0.0, min(now - earliest, now - self._beat))

    def depth(self) -> int:
        """Return how many keys are due and wait for a worker."""
        with self._changed:
            now = time.monotonic()
            return sum(1 for due in self._due.values() if due <= now)

    def seconds_late(self) -> float:
        """Return how long the longest waiting key has been due."""
        with self._changed:
            now = time.monotonic()
            return max(0.0, now - min(self._due.values(), default=now))

    def _schedule(self, key: Key, due: float) -> None:
        """Make the key due, or due earlier; a running one when its pass has ended. Caller holds the condition."""
        if key in self._running:
            again = self._running[key]
            self._running[key] = due if again is None else min(again, due)
        elif self._due.get(key, float("inf")) > due:
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._order), key))
            self._changed.notify()

    def _run(self) -> None:
        while (key := self._take()) is not None:
            with self._changed:
                attempt, is_hurried = self._failures.get(key, 0) + 1, key in self._hurried
                self._hurried.discard(key)
            try:
                done = self._work(key, attempt)
            except Exception:
                logger.exception("A pass over %s failed unexpectedly; it is tried again.", key)
                done = Done(retry_after=1.0)
            # What changes again and again while something lasting is wrong with it must not make all else wait long.
            self._finish(key, done, max(1, attempt - 1) if is_hurried else attempt)

    def _take(self) -> Key | None:
        """Wait for a key that is due and return it, or None when the queue is closed."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
                    heapq.heappop(self._heap)  # rescheduled since: the newer entry counts
                if self._heap and self._heap[0][0] <= now:
                    _, _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    self._running[key] = None
                    self._beat = now
                    return key
                self._changed.wait(self._heap[0][0] - now if self._heap else None)
            return None

    def _finish(self, key: Key, done: Done, attempt: int) -> None:
        with self._changed:
            again = self._running.pop(key)
            self._beat = time.monotonic()
            if done.retry_after is not None:
                self._failures[key] = attempt
                delay = min(done.retry_after * 2 ** min(attempt - 1, 16), LONGEST_DELAY_SECONDS)
            else:
                self._failures.pop(key, None)
                delay = self._resync_seconds if done.again_after is None else done.again_after
            if again is not None:
                self._schedule(key, again)
            elif not done.is_gone:
                # Jitter keeps a thousand tiers, listed in one second, from being looked at in one second for ever.
                self._schedule(key, self._beat + delay * random.uniform(0.9, 1.1))  # noqa: S311  no secret
