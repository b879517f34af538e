# SPDX-License-Identifier: Apache-2.0
"""A queue of keys with priorities, worker threads, back-off and a resync.

Edits of tiers that serve go first, then all other changes, then routine. Routine keys may be very many at a time: after
a resync, or when no pod of a namespace can be reached. One reconcile in four is for routine all the same.

A key waits at most once, however often it is added, and never runs in two threads. A key that is added while it runs
runs once more. After a reconcile the key comes back by itself: soon after a failure, later each time, or after the
resync interval. So nothing depends on the delivery of an event.

kopf's own queue is not used: it keeps retries in annotations, and knows the changes of one kind only.

Threads: `add` may be called from any thread. All fields are guarded by one condition; the work itself runs outside it.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

LONGEST_DELAY_SECONDS: Final = 300.0

ROUTINE_SHARE: Final = 4
"""One in so many reconciles is for routine keys."""


class Priority(enum.IntEnum):
    """How soon a key that is due gets a worker."""

    EDIT_OF_SERVING = 0
    """An edit of engines under load: Bypass must not wait behind a thousand creations."""
    CHANGE = 1
    ROUTINE = 2


class _Due(NamedTuple):
    at: float
    priority: Priority


@dataclass(frozen=True, kw_only=True)
class Requeue:
    """When a key is to run again."""

    retry_after: float | None = None
    """Seconds until the next try after the first failure in a row; None where nothing failed."""
    poll_after: float | None = None
    """Delay before polling again for a condition that may clear by itself; doubles each time. None: do not poll.

    Counted apart from failures: it may last for days, and a failure meanwhile is the first one all the same."""
    requeue_after: float | None = None
    """Seconds until the next run, if that is sooner; None for the resync interval."""
    is_gone: bool = False
    """Nothing is left to do for the key until it is added again."""


class WorkQueue(Generic[Key]):
    """Runs `work(key, attempt)` on worker threads for every key that was added, until it is closed."""

    def __init__(
        self, work: Callable[[Key, int], Requeue], *, workers: int, resync_seconds: float, debounce_seconds: float = 0.0
    ) -> None:
        """Store the settings; `start` starts the threads.

        `work` gets the key and the number of attempts in a row; an exception is logged and counts as a failure. A key
        runs again after the resync interval, give or take a tenth. An added one waits for the end of a burst.
        """
        self._work = work
        self._workers = workers
        self._resync_seconds = resync_seconds
        self._debounce_seconds = debounce_seconds
        self._changed = threading.Condition()
        self._due: dict[Key, _Due] = {}
        self._heaps: dict[Priority, list[tuple[float, int, Key]]] = {each: [] for each in Priority}
        self._order = itertools.count()
        self._taken = 0
        self._running: dict[Key, _Due | None] = {}
        self._failures: dict[Key, int] = {}
        self._rechecks: dict[Key, int] = {}
        self._hurried: set[Key] = set()
        """Keys that are due because they were added."""
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
        """Stop taking keys, let running reconciles end, and tell whether they did within the time-out."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def add(self, key: Key, *, priority: Priority = Priority.CHANGE) -> None:
        """Run the key soon, whatever it waits for now; before all keys of a lower priority."""
        with self._changed:
            self._hurried.add(key)
            self._schedule(key, _Due(time.monotonic() + self._debounce_seconds, priority))

    def add_routine(self, key: Key) -> None:
        """Run the key when no change waits for a worker."""
        self.add(key, priority=Priority.ROUTINE)

    def seconds_overdue(self) -> float:
        """Return how long the longest waiting key has been due without any worker having moved: 0 is healthy."""
        with self._changed:
            now = time.monotonic()
            return max(0.0, min(now - self._earliest(now), now - self._beat))

    def depth(self) -> int:
        """Return how many keys are due and wait for a worker."""
        with self._changed:
            now = time.monotonic()
            return sum(1 for due in self._due.values() if due.at <= now)

    def seconds_late(self) -> float:
        """Return how long the longest waiting key has been due."""
        with self._changed:
            now = time.monotonic()
            return max(0.0, now - self._earliest(now))

    def _earliest(self, now: float) -> float:
        return min((due.at for due in self._due.values()), default=now)

    def _schedule(self, key: Key, due: _Due) -> None:
        """Make the key due, or due earlier; a running one when its run has ended. Caller holds the condition."""
        before = self._running[key] if key in self._running else self._due.get(key)
        if before is not None and before.at <= due.at and before.priority <= due.priority:
            return
        if before is not None:
            due = due._replace(priority=min(before.priority, due.priority))
        if key in self._running:
            self._running[key] = due
            return
        self._due[key] = due
        heapq.heappush(self._heaps[due.priority], (due.at, next(self._order), key))
        self._changed.notify()

    def _run(self) -> None:
        while (key := self._take()) is not None:
            with self._changed:
                attempt, is_hurried = self._failures.get(key, 0) + 1, key in self._hurried
                self._hurried.discard(key)
            try:
                done = self._work(key, attempt)
            except Exception:
                logger.exception("The reconcile of %s failed unexpectedly; it is tried again.", key)
                done = Requeue(retry_after=1.0)
            self._finish(key, done, is_hurried=is_hurried)

    def _take(self) -> Key | None:
        """Wait for a key that is due and return it, or None when the queue is closed."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                first = {priority: self._first(priority) for priority in Priority}
                due = [priority for priority, at in first.items() if at is not None and at <= now]
                if due:
                    self._taken += 1
                    is_for_routine = self._taken % ROUTINE_SHARE == 0 and due[0] is not Priority.EDIT_OF_SERVING
                    _, _, key = heapq.heappop(self._heaps[due[-1] if is_for_routine else due[0]])
                    del self._due[key]
                    self._running[key] = None
                    self._beat = now
                    return key
                self._changed.wait(min((at - now for at in first.values() if at is not None), default=None))
            return None

    def _first(self, priority: Priority) -> float | None:
        """Return when the first key of a heap is due. Caller holds the condition."""
        heap = self._heaps[priority]
        while heap and self._due.get(heap[0][2]) != (heap[0][0], priority):
            heapq.heappop(heap)  # rescheduled since: the newer entry counts
        return heap[0][0] if heap else None

    def _finish(self, key: Key, done: Requeue, *, is_hurried: bool) -> None:
        with self._changed:
            again = self._running.pop(key)
            self._beat = time.monotonic()
            delays = [done.requeue_after, _put_off(self._failures, key, done.retry_after, is_hurried=is_hurried)]
            if done.retry_after is None:
                # A reconcile that failed need not have come to the condition that is polled for.
                delays.append(_put_off(self._rechecks, key, done.poll_after, is_hurried=is_hurried))
                delays.append(self._resync_seconds)
            delay = min(each for each in delays if each is not None)
            if again is not None:
                self._schedule(key, again)
            elif not done.is_gone:
                # Jitter spreads a thousand tiers that were listed in one second.
                at = self._beat + delay * random.uniform(0.9, 1.1)  # noqa: S311  no secret
                self._schedule(key, _Due(at, Priority.ROUTINE))


def _put_off(counts: dict[Key, int], key: Key, first: float | None, *, is_hurried: bool) -> float | None:
    """Count one more in a row and return its delay in seconds, twice as long each time; None ends the row."""
    if first is None:
        counts.pop(key, None)
        return None
    # A tier that changes again and again while a failure lasts must not make its other changes wait long.
    count = max(1, counts.get(key, 0) + (not is_hurried))
    counts[key] = count
    delay: float = min(first * 2 ** min(count - 1, 16), LONGEST_DELAY_SECONDS)
    return delay
