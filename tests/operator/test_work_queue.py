# SPDX-License-Identifier: Apache-2.0
"""Every key is worked on, once at a time, again after a failure, and again for no reason."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from waiting import Clock, until

from kvtier_operator.kube import work_queue
from kvtier_operator.kube.work_queue import Priority, Requeue, WorkQueue

NEVER = 3600.0


@contextmanager
def queue(
    work: Callable[[str, int], Requeue],
    *,
    resync_seconds: float = NEVER,
    debounce_seconds: float = 0.0,
    workers: int = 2,
) -> Iterator[WorkQueue[str]]:
    found: WorkQueue[str] = WorkQueue(
        work, workers=workers, resync_seconds=resync_seconds, debounce_seconds=debounce_seconds
    )
    found.start()
    try:
        yield found
    finally:
        assert found.close(timeout=60)


class Seen(Counter[str]):
    """Work that counts its keys, and says of each when it is to run again."""

    def __init__(self, again: Callable[[str], Requeue] = lambda _key: Requeue()) -> None:
        super().__init__()
        self.attempts: list[int] = []
        self._again = again

    def __call__(self, key: str, attempt: int) -> Requeue:
        self.attempts.append(attempt)
        self[key] += 1
        return self._again(key)


def test_a_burst_of_events_makes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(work_queue, "time", SimpleNamespace(monotonic=clock))
    with queue(seen := Seen(), debounce_seconds=0.2) as found:
        for _ in range(100):
            found.add("a")
            # A worker that did not wait for the end of the burst would begin.
            threading.Event().wait(0.001)
        clock.seconds += 1
        until(lambda: seen["a"])
        found.add("b")
        clock.seconds += 1
        until(lambda: seen["b"])
    assert seen["a"] == 1


def test_a_key_never_runs_twice_at_a_time_and_what_is_added_meanwhile_is_not_lost() -> None:
    entered, release = threading.Semaphore(0), threading.Semaphore(0)
    busy = threading.Lock()
    overlaps: list[str] = []

    def work(key: str, attempt: int) -> Requeue:
        if not busy.acquire(blocking=False):
            overlaps.append(key)
            return Requeue()
        entered.release()
        release.acquire()
        busy.release()
        return Requeue()

    with queue(work, workers=4) as found:
        found.add("a")
        assert entered.acquire(timeout=60)
        for _ in range(10):
            found.add("a")
        release.release()
        assert entered.acquire(timeout=60)  # the additions made one more pass
        release.release()
        assert not entered.acquire(timeout=0.1)  # and only one
    assert overlaps == []


def test_a_failure_is_counted_until_it_succeeds_whatever_else_was_looked_at_before() -> None:
    seen = Seen(lambda _key: Requeue(retry_after=0.01) if len(seen.attempts) < 4 else Requeue())
    with queue(seen) as found:
        found.add("a")
        until(lambda: len(seen.attempts) == 4)
        found.add("a")
        until(lambda: len(seen.attempts) == 5)
    assert seen.attempts == [1, 2, 3, 4, 1]

    def again(_key: str) -> Requeue:
        # Only the resync lets it run again so soon: the tenth look in a row is put off for minutes.
        return Requeue(retry_after=0.001) if 10 < len(seen.attempts) <= 13 else Requeue(poll_after=1.0)

    with queue(seen := Seen(again), resync_seconds=0.001) as found:
        found.add("a")
        until(lambda: len(seen.attempts) >= 16)
    assert seen.attempts[:16] == [*[1] * 11, 2, 3, 4, 1, 1]


def test_what_nothing_waits_for_is_looked_at_less_and_less_often_until_it_has_passed() -> None:
    def again(key: str) -> Requeue:
        is_polled = key == "lasts" or (key == "passes" and seen[key] % 2)
        return Requeue(poll_after=0.001) if is_polled else Requeue(requeue_after=0.001)

    with queue(seen := Seen(again)) as found:
        for key in ("steady", "lasts", "passes"):
            found.add(key)
        until(lambda: seen["steady"] > 300 and seen["passes"] > 100)
    # Each wait is twice as long as the one before, up to a minute: the thirtieth ends after a quarter of an hour.
    assert 1 < seen["lasts"] < 30


def test_an_unexpected_error_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def again(_key: str) -> Requeue:
        if len(seen.attempts) == 1:
            raise ZeroDivisionError
        return Requeue()

    with caplog.at_level(logging.ERROR), queue(seen := Seen(again)) as found:
        found.add("a")
        until(lambda: seen.attempts == [1, 2])
    assert "ZeroDivisionError" in caplog.text


def test_a_key_comes_back_by_itself_until_it_is_gone() -> None:
    with queue(seen := Seen(lambda key: Requeue(is_gone=key == "gone")), resync_seconds=0.01) as found:
        found.add("gone")
        found.add("here")
        until(lambda: seen["here"] > 5)
    assert seen["gone"] == 1


def test_closing_lets_a_running_pass_end_and_starts_no_other() -> None:
    entered, release = threading.Event(), threading.Event()
    ended: list[str] = []

    def work(key: str, attempt: int) -> Requeue:
        entered.set()
        release.wait(60)
        ended.append(key)
        return Requeue()

    found: WorkQueue[str] = WorkQueue(work, workers=1, resync_seconds=NEVER)
    found.start()
    found.add("a")
    found.add("b")
    assert entered.wait(60)
    assert found.close(timeout=0) is False
    release.set()
    assert found.close(timeout=60) is True
    assert ended == ["a"]


def test_a_queue_that_does_not_move_shows_it() -> None:
    entered, release = threading.Event(), threading.Event()

    def work(key: str, attempt: int) -> Requeue:
        entered.set()
        release.wait(60)
        return Requeue()

    with queue(work, workers=1) as found:
        assert found.seconds_overdue() == 0
        found.add("stuck")
        assert entered.wait(60)
        found.add("waits")
        until(lambda: found.seconds_overdue() > 0)
        release.set()
        until(lambda: found.seconds_overdue() == 0)


def test_being_added_again_does_not_make_a_failing_key_wait_longer_nor_does_its_failure_put_off_a_look() -> None:
    with queue(seen := Seen(lambda _key: Requeue(retry_after=NEVER))) as found:
        for number in range(1, 6):
            found.add("a")
            until(lambda number=number: len(seen.attempts) == number)  # type: ignore[misc]  # mypy sees no default
    assert seen.attempts == [1, 2, 2, 2, 2]
    with queue(seen := Seen(lambda _key: Requeue(retry_after=NEVER, requeue_after=0.01))) as found:
        found.add("a")
        until(lambda: seen.attempts[:3] == [1, 2, 3])


def order_of(add: Callable[[WorkQueue[int]], None], count: int) -> list[int]:
    """Return in which order one worker, busy at first, takes the keys that were added meanwhile."""
    order: list[int] = []
    is_full, may_go = threading.Event(), threading.Event()

    def work(key: int, _attempt: int) -> Requeue:
        if key < 0:
            is_full.set()
            may_go.wait(60)
        order.append(key)
        return Requeue(is_gone=True)

    queue: WorkQueue[int] = WorkQueue(work, workers=1, resync_seconds=60)
    queue.start()
    queue.add(-1)
    assert is_full.wait(60)
    add(queue)
    may_go.set()
    until(lambda: len(order) >= count + 1 and queue.depth() == 0)
    assert queue.close(timeout=60)
    return order[1:]


def test_what_somebody_changed_goes_before_what_can_wait_and_an_edit_before_creations() -> None:
    def add(queue: WorkQueue[int]) -> None:
        for key in range(20):
            queue.add_routine(key)
        for key in (100, 5, 101):
            queue.add(key)

    order = order_of(add, 22)
    assert max(order.index(key) for key in (100, 5, 101)) <= 3
    assert sorted(order) == [*range(20), 100, 101]

    def add(queue: WorkQueue[int]) -> None:
        for key in range(1000):
            queue.add(key)
        for key in (2000, 500, 2001):
            queue.add(key, priority=Priority.EDIT_OF_SERVING)

    assert order_of(add, 1002)[:3] == [2000, 500, 2001]

    def add(queue: WorkQueue[int]) -> None:
        for key in (1, 2, 1):
            queue.add_routine(key)
            queue.add(key)
            queue.add_routine(key)

    assert order_of(add, 2) == [1, 2]
