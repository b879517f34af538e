# SPDX-License-Identifier: Apache-2.0
"""The pool of I/O workers of one engine: tasks in, the end of each task out, one chunk a task.

`WorkerPool` decides which tasks are handed to workers, and what happens to those that are late, cancelled or lost with
a worker. Nothing here waits or makes a system call on the volume. Every task ends once. The breaker knows the outcome
by then, and no worker touches the task's row any more. Tasks are queued in lanes by urgency. While no worker can be
started, every task is refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from kvtier_connector.io_workers.buffers import OwnRows, Region
from kvtier_connector.io_workers.dispatcher import Dispatcher, InFlight, TaskState
from kvtier_connector.io_workers.tasks import (
    Answer,
    Done,
    Ending,
    Lane,
    Refused,
    Task,
)
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.blockstore import Outcome, Stored, StoreFault, StoreOutcome
from kvtier_connector.store.crypto import Keyring
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.health import Breaker, Direction
from kvtier_connector.store.permit import StorePermit

BREAKER, STUCK, NO_WORKERS, CLOSED = Refused("breaker"), Refused("stuck"), Refused("no_workers"), Refused("closed")

_TICK_SECONDS = 0.05
_IDLE_TICK_SECONDS = 1.0
_START_SECONDS = 20.0
"""Longest start of a process on a busy host."""
_STORING_SHARE, _YIELDING_SHARE = 0.75, 0.125
"""Shares of the workers that may store: usually, so that a load finds a free worker, and while something is read."""
_DIRECTIONS = {Lane.LOAD: Direction.LOAD, Lane.PREFETCH: Direction.LOAD, Lane.STORE: Direction.STORE}


class PoolCounts(NamedTuple):
    """Values of the pool's gauges."""

    processes: int
    """Usable worker processes; 0 while none can be started."""
    stuck: int
    """Workers that hang in the volume."""


class WorkerPool:
    """The I/O workers of one engine. Scheduler's thread only.

    Call `submit` and `collect` in each step, and `close` at the end.
    """

    def __init__(  # noqa: PLR0913 - keywords but for the first
        self,
        settings: PoolSettings,
        *,
        permit: StorePermit,
        keyring: Keyring | None = None,
        breaker: Breaker,
        rows: memoryview,
        regions: Sequence[Region] = (),
        fs: FileSystem = LOCAL,
    ) -> None:
        """Make the table and the pipes; `start` starts the workers.

        Args:
            settings: The volume, the number of workers and their deadlines.
            permit: Is asked before a block is written, and told how many bytes were.
            keyring: Names the key that blocks are encrypted with; None if they are not.
            breaker: Admits each task and records what the volume did.
            rows: The CPU tier in this process: a table with one row per chunk. No reference is kept.
            regions: Files with the rows, which stay open as long as this object.
            fs: The file system. Any but `LOCAL` has the workers run on threads, as tests do.

        Raises:
            OSError: This process may not open more files, or the host has no memory.
            ValueError: The rows are not a table.
        """
        self._settings = settings
        self._permit, self._keyring = permit, keyring
        self.round_trip_seconds = 0.0
        """Time in which the volume says that it does not have a file; 0 while that was not measured."""
        self._breaker = breaker
        self._row_bytes = rows.strides[0] if rows.strides else 0
        self._dispatcher = Dispatcher(settings, OwnRows(rows), regions, fs=fs)
        self._queues: dict[Lane, deque[InFlight]] = {lane: deque() for lane in Lane}
        self._open: dict[int, InFlight] = {}
        self._done: list[Done] = []
        self.storing_share = _STORING_SHARE
        """Largest share of the workers that may store."""
        self._reads = self._stores = 0
        """Numbers of open tasks."""
        self._read_at = self._moved_at = 0.0
        """When a worker last finished a read, and any task."""
        self._ticked = 0.0
        self._is_ready = False
        self._is_closed = False

    def start(self) -> None:
        """Start the workers."""
        self._dispatcher.start()

    def submit(self, tasks: Iterable[tuple[int, Task]]) -> None:
        """Queue tasks, each with a number that no open task has; tasks of one lane start in this order."""
        self._recheck_stuck()
        now = time.monotonic()
        for number, task in tasks:
            lane = task.lane
            if (refusal := self._refusal(lane)) is not None:
                self._done.append(Done(number, refusal, 0.0))
                continue
            # The time that a lane has waited is counted from its first task.
            if lane is Lane.STORE:
                self._stores += 1
                if self._stores == 1:
                    self._moved_at = now
            else:
                self._reads += 1
                if self._reads == 1:
                    self._read_at = now
            entry = self._open[number] = InFlight(number, task, lane)
            self._queues[lane].append(entry)
        self._feed()

    def promote(self, tasks: Iterable[int]) -> None:
        """Turn prefetches that no worker has started into loads: a request waits for them now."""
        working: set[int] | None = None
        back = []
        for number in tasks:
            task = self._open.get(number)
            if task is None or task.lane is not Lane.PREFETCH:
                continue
            if not task.ticket:
                task.lane = Lane.LOAD
                self._queues[Lane.LOAD].append(task)
                continue
            if working is None:
                working = self._dispatcher.working()
            if task.ticket not in working:
                task.lane = Lane.LOAD
                back.append(task)
        self._dispatcher.recall(back)
        self._finish_recalled()
        self._feed()

    def cancel(self, tasks: Iterable[int]) -> None:
        """Give tasks up; each still ends, with `Ending.CANCELLED` or its outcome, once its row is safe."""
        back = []
        for number in tasks:
            task = self._open.get(number)
            if task is None or task.ending is not None:
                continue
            task.ending = Ending.CANCELLED
            back.append(task)
        self._give_up(back)
        self._finish_recalled()

    def collect(self) -> list[Done]:
        """Return the tasks that ended since the last call."""
        now = time.monotonic()
        if self._open and not self._is_closed:
            self._take_answers()
            if now - self._ticked >= _TICK_SECONDS:
                self._tick(now)
            self._finish_recalled()
            self._feed()
        else:
            self._tick_idle(_IDLE_TICK_SECONDS)
        done, self._done = self._done, []
        return done

    @property
    def is_usable(self) -> bool:
        """Whether there are workers, hanging ones included."""
        return self._dispatcher.supervisor.is_usable

    def is_stuck(self, lane: Lane) -> bool:
        """Return whether a new task of the lane would be refused, because no worker could start it."""
        return self._refusal(lane) is not None

    def counts(self) -> PoolCounts:
        """Return the values of gauges."""
        self._recheck_stuck()
        return PoolCounts(self._dispatcher.supervisor.count(), self._dispatcher.count_stuck())

    def close(self, timeout_seconds: float) -> bool:
        """End the workers and all tasks; False if workers hang and stay behind. No row is touched afterwards."""
        if self._is_closed:
            return True
        self._is_closed = True
        is_ended = self._dispatcher.close(timeout_seconds)
        for task in list(self._open.values()):
            if task.ticket:
                self._undo_admission(task)
            self._end(task, task.ending or Ending.CANCELLED)
        return is_ended

    def _refusal(self, lane: Lane) -> Refused | None:
        if self._is_closed:
            return CLOSED
        if not self._dispatcher.supervisor.is_usable:
            return NO_WORKERS
        return STUCK if self._dispatcher.is_stuck(lane) else None

    def _feed(self) -> None:
        """Put tasks on the table while there is room and the breaker admits them."""
        if self._is_closed or not self._dispatcher.supervisor.is_usable:
            return
        active_key = "" if self._keyring is None else self._keyring.active_name
        for lane, queue in self._queues.items():
            while queue and self._dispatcher.has_room(lane):
                task = queue.popleft()
                # A task that was cancelled or promoted since is still in its first queue.
                if task.lane is lane and task.state is TaskState.QUEUED and self._admit(task):
                    self._dispatcher.place(task, active_key)
        self._dispatcher.share(1.0 if not self._stores else _YIELDING_SHARE if self._reads else self.storing_share)
        self._dispatcher.send()

    def _admit(self, task: InFlight) -> bool:
        """Ask the breaker and the store permit; end a task that is not admitted."""
        direction = _DIRECTIONS[task.lane]
        if not self._breaker.admit(direction):
            self._end(task, BREAKER)
            return False
        task.is_skipped = False
        if direction is Direction.STORE:
            outcome = self._permit.reserve(HEADER_BYTES + self._row_bytes, task.task.key.tenant)
            if outcome is not None:
                self._breaker.record_store(outcome)
                self._end(task, outcome)
                return False
        return True

    def _take_answers(self) -> None:
        answers = self._dispatcher.drain()
        if answers:
            self._moved_at = time.monotonic()
        for task, answer, seconds in answers:
            if task.lane is not Lane.STORE:
                self._read_at = self._moved_at
            if answer is None:
                # A recalled task: it ends with the others of its fence.
                self._undo_admission(task)
            else:
                self._record(task, answer)
                self._end(task, answer, seconds)

    def _record(self, task: InFlight, answer: Answer, *, is_from_volume: bool = True) -> None:
        """Tell permit and breaker the outcome of a task; the breaker counts only what the volume did."""
        if task.lane is Lane.STORE:
            stored = cast("StoreOutcome", answer)
            self._end_permitted(stored.bytes_written if isinstance(stored, Stored) else 0)
            if is_from_volume and not task.is_skipped:
                self._breaker.record_store(stored)
        else:
            loaded = cast("Outcome", answer)
            if is_from_volume and not task.is_skipped:
                self._breaker.record_load(loaded)
        if not is_from_volume:
            self._skip(task)

    def _end(self, task: InFlight, outcome: Answer | Refused | Ending, seconds: float = 0.0) -> None:
        if task.state is TaskState.ENDED:
            return
        task.state = TaskState.ENDED
        del self._open[task.number]
        if task.lane is Lane.STORE:
            self._stores -= 1
        else:
            self._reads -= 1
        self._done.append(Done(task.number, outcome, seconds))

    def _undo_admission(self, task: InFlight) -> None:
        if task.lane is Lane.STORE:
            self._end_permitted(0)
        self._skip(task)

    def _end_permitted(self, written: int) -> None:
        self._permit.end(HEADER_BYTES + self._row_bytes, written)

    def _skip(self, task: InFlight) -> None:
        if not task.is_skipped:
            self._breaker.skip(_DIRECTIONS[task.lane])
        task.is_skipped = True

    def _give_up(self, tasks: Sequence[InFlight]) -> None:
        """Recall the tasks on the table; end the others, whose `ending` is set."""
        self._dispatcher.recall(tasks)
        for task in tasks:
            if task.state is TaskState.QUEUED and task.ending is not None:
                self._end(task, task.ending)

    def _finish_recalled(self) -> None:
        """End the tasks whose rows are safe, and queue those again that are still wanted."""
        recalled = self._dispatcher.recalled()
        if not recalled:
            return
        working = self._dispatcher.working()
        for task in reversed(recalled):
            # A store that is being written has an outcome to record when its answer comes.
            is_awaited = task.ticket in working and task.ending is not None
            if task.ticket and not is_awaited:
                self._dispatcher.forget(task)
                self._undo_admission(task)
            if task.state is TaskState.ENDED:
                continue
            if task.ending is not None:
                self._end(task, task.ending)
            else:
                task.state = TaskState.QUEUED
                self._queues[task.lane].appendleft(task)

    def _tick(self, now: float) -> None:
        """Look after the workers, and give up on late tasks."""
        self._ticked = now
        self._dispatcher.tick(now, reads=self._reads, round_trip_seconds=self.round_trip_seconds)
        self._reap()
        if not self._dispatcher.supervisor.is_usable:
            self._refuse_all()
            return
        hanging = [task for task in self._dispatcher.end_hanging(now) if task.ending is None]
        for task in hanging:
            task.ending = Ending.LATE
            self._breaker.record_timeout(_DIRECTIONS[task.lane])
            task.is_skipped = True
        lost = [task for task in self._dispatcher.lost(now) if task.ending is None]
        for task in lost:
            task.ending = Ending.LATE
        self._dispatcher.recall([*hanging, *lost])
        self._end_late(now)

    def _tick_idle(self, every_seconds: float) -> None:
        """Look after the workers while no task is open."""
        now = time.monotonic()
        if now - self._ticked >= every_seconds and not self._is_closed:
            self._take_answers()
            self._tick(now)
            self._finish_recalled()

    def _recheck_stuck(self) -> None:
        """Check whether workers still hang, since an engine at rest takes no step that would."""
        if self._dispatcher.count_stuck():
            self._tick_idle(_TICK_SECONDS)

    def _reap(self) -> None:
        """End the tasks of dead workers, and replace the workers."""
        dead = self._dispatcher.reap()
        if not dead:
            return
        # Their last answers are in the pipe.
        self._take_answers()
        for _, task in dead:
            if task is None:
                continue
            if task.ending is None and task.state is not TaskState.ENDED:
                fault = StoreFault.IO if task.lane is Lane.STORE else Fault.IO
                self._record(task, fault, is_from_volume=False)
                self._end(task, fault)
            else:
                self._undo_admission(task)
        # A token that a dead worker had just read is lost.
        working = self._dispatcher.working()
        self._dispatcher.recall(task for task in self._dispatcher.on_table() if task.ticket not in working)
        for worker, _ in dead:
            self._dispatcher.supervisor.replace(worker)

    def _refuse_all(self) -> None:
        """Refuse the open tasks: there are no workers."""
        tasks = [task for task in self._open.values() if task.ending is None]
        for task in tasks:
            task.ending = NO_WORKERS
        self._give_up(tasks)

    def _end_late(self, now: float) -> None:
        """Give up on tasks that wait while no worker finishes one; stores wait for reads, too."""
        was_ready, self._is_ready = self._is_ready, self._dispatcher.is_ready()
        if self._is_ready and not was_ready:
            # Workers begin just now.
            self._read_at = self._moved_at = now
        slow = self._settings.deadline_seconds
        if not self._is_ready:
            slow = max(slow, _START_SECONDS)
        is_waiting = {
            Lane.LOAD: now - self._read_at > slow,
            Lane.PREFETCH: now - self._read_at > slow,
            Lane.STORE: now - self._moved_at > slow,
        }
        if not any(is_waiting.values()):
            return
        working = self._dispatcher.working()
        late = [
            task
            for task in self._open.values()
            if is_waiting[task.lane] and task.ending is None and task.ticket not in working
        ]
        for task in late:
            task.ending = Ending.LATE
        self._give_up(late)
        if late and not working:
            # There is work, and the workers do nothing.
            self._dispatcher.end_all()
