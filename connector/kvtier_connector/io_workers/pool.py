# SPDX-License-Identifier: Apache-2.0
"""The pool of I/O workers of one engine: tasks in, the end of each task out, one chunk a task.

A task waits in the queue of its lane until the table has room and the breaker and the permit admit it. One message
through a pipe hands it to a worker, and one message back reports its end. Nothing here waits or makes a system
call on the volume. Every task ends once. The breaker knows the outcome by then, and no worker touches the task's row
any more. While no worker can be started, every task is refused.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvtier_connector.contract.engine import MOST_IO_PROCESSES
from kvtier_connector.io_workers.buffers import OwnRows, Region
from kvtier_connector.io_workers.reading_limit import ReadingLimit
from kvtier_connector.io_workers.supervisor import START_SECONDS, Supervisor, WorkerProcess, WorkerThread
from kvtier_connector.io_workers.task_table import ENTRIES, NO_TICKET, Current, MessagePipe, TaskTable, create_table
from kvtier_connector.io_workers.tasks import (
    REPLY,
    TASK_BYTES,
    Answer,
    Done,
    Ending,
    Lane,
    Refused,
    Task,
    TaskMessage,
    decode_answer,
    encode_task,
)
from kvtier_connector.io_workers.worker import PoolSettings, Worker, WorkerSettings, start_process
from kvtier_connector.store.blockstore import Hit, Outcome, Stored, StoreFault, StoreOutcome
from kvtier_connector.store.crypto import Keyring
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.health import Breaker, Direction
from kvtier_connector.store.permit import StorePermit

BREAKER, STUCK, NO_WORKERS, CLOSED = Refused("breaker"), Refused("stuck"), Refused("no_workers"), Refused("closed")

_TICK_SECONDS = 0.05
_IDLE_TICK_SECONDS = 1.0
_STORING_SHARE, _YIELDING_SHARE = 0.75, 0.125
"""Shares of the workers that may store: usually, so that a load finds a free worker, and while something is read."""
_DIRECTIONS = {Lane.LOAD: Direction.LOAD, Lane.PREFETCH: Direction.LOAD, Lane.STORE: Direction.STORE}
_LANE_ENTRIES = {Lane.LOAD: ENTRIES // 2, Lane.PREFETCH: ENTRIES // 4, Lane.STORE: ENTRIES // 8}
"""Share of the table that each lane may take, so that no lane blocks another."""
_SLOW_SECONDS = 1.0
"""Another worker reads in the place of one whose task takes longer."""
_LOST_DEADLINES = 10
"""A task that no worker works on for so many deadlines after it was handed over is lost."""
_LOCK_SECONDS = 1.0
"""A copy takes a millisecond; a worker that holds its lock for longer than this is stopped, and is killed."""


FEWEST = 3
"""Fewest workers on any host: two can store and one is free for a load, even where writes hang."""
_GROW_SECONDS = 0.5
"""Time until added workers have begun to work."""
_TRIPS = 3
"""Round trips for one chunk: open, read, close."""
_CORE_BYTES_PER_SECOND = 2.5e9
"""Rate at which one core verifies and copies."""


def workers_for(*, round_trip_seconds: float, chunk_bytes: int) -> int:
    """Return the number of workers that keeps every processor busy while other workers wait for the volume."""
    moving_seconds = max(1, chunk_bytes) / _CORE_BYTES_PER_SECOND
    return round(len(os.sched_getaffinity(0)) * (1 + _TRIPS * round_trip_seconds / moving_seconds))


class TaskState(enum.Enum):
    """Progress of a task that was submitted."""

    QUEUED = "queued"
    """It waits with the engine."""
    ON_TABLE = "on table"
    """Workers know of it."""
    RECALLED = "recalled"
    """Its ticket is cleared, but a worker may still copy."""
    ENDED = "ended"
    """The caller knows its end. A ticket that it still has means that a worker has not answered yet."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A task that was submitted, until it has ended and no worker works on it any more."""

    number: int
    """The caller's number."""
    task: Task
    lane: Lane
    """Its present urgency."""
    state: TaskState = TaskState.QUEUED
    entry: int = 0
    ticket: int = NO_TICKET
    """Identifies it to workers, until the answer came or is no longer expected."""
    ending: Ending | Refused | None = None
    """Its end if no answer comes before its row is safe."""
    is_skipped: bool = False
    """Whether the breaker already counted an end for it."""
    placed_at: float = math.inf
    """When it was put on the table."""


@dataclass(slots=True)
class _Fence:
    """Waits until no worker copies under a ticket that was cleared before."""

    remaining: set[int]
    began: float
    tasks: list[InFlight]


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

        The CPU tier is a table in this process with one row per chunk, and no reference to it is kept. The files of the
        regions hold the same rows, and stay open as long as this object. Any file system but `LOCAL` has the workers
        run on threads, as tests do.

        Raises:
            OSError: This process may not open more files, or the host has no memory.
            ValueError: The rows are not a table.
        """
        self._settings, self._permit, self._keyring, self._breaker = settings, permit, keyring, breaker
        self._rows, self._regions = OwnRows(rows), tuple(regions)
        self._block_bytes = HEADER_BYTES + self._rows.row_bytes
        self.round_trip_seconds = 0.0
        """Time in which the volume says that it does not have a file; 0 while that was not measured."""
        self._fs = fs
        # A process has the real file system only, so an injected one means threads.
        self._has_processes = fs is LOCAL
        pipes: list[MessagePipe] = []
        with contextlib.ExitStack() as opened:
            self._table_fd = create_table()
            opened.callback(os.close, self._table_fd)
            self._table = TaskTable(self._table_fd, threads=0 if self._has_processes else settings.workers)
            opened.callback(self._table.close)
            for size in (*[TASK_BYTES] * len(Lane), REPLY.size):
                pipes.append(MessagePipe(size))
                opened.callback(pipes[-1].close)
            opened.pop_all()
        self._pipes, self._replies = pipes[:-1], pipes[-1]
        least = min(settings.first_workers or settings.workers, settings.workers)
        self._supervisor = Supervisor(least, self._launch, first_backoff_seconds=settings.retry_seconds)
        self._grow_at = 0.0
        self._free = list(range(ENTRIES))
        self._taken = dict.fromkeys(Lane, 0)
        self._tickets: dict[int, InFlight] = {}
        self._fences: list[_Fence] = []
        self._next_ticket = 1
        self._stuck: set[int] = set()
        """Workers that hang."""
        self._queues: dict[Lane, deque[InFlight]] = {lane: deque() for lane in Lane}
        self._open: dict[int, InFlight] = {}
        self._done: list[Done] = []
        self.storing_share = _STORING_SHARE
        """Largest share of the workers that may store."""
        self._reading = ReadingLimit()
        self._slow: set[int] = set()
        """Workers whose task takes long, or that are not ready yet; others read in their place."""
        self._reads = self._stores = 0
        """Numbers of open tasks."""
        self._read_at = self._moved_at = 0.0
        """When a worker last finished a read, and any task."""
        self._ticked = 0.0
        self._is_ready = False
        self._is_closed = False

    def start(self) -> None:
        """Start the workers."""
        self._let_store(1.0)
        self._supervisor.start()

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
                working = self._working()
            if task.ticket not in working:
                back.append(task)
        self._recall(back)
        for task in back:
            task.lane = Lane.LOAD
        self._finish_recalled()
        self._feed()

    def cancel(self, tasks: Iterable[int], ending: Ending = Ending.CANCELLED) -> list[int]:
        """Give tasks up and return them; each still ends, with `ending` or its outcome, once its row is safe.

        Tasks that are `UNNEEDED` go on where a worker has begun: otherwise nothing would tell that the volume hangs.
        """
        if not self._open:
            return []
        self._take_answers()
        spared = self._working() if ending is Ending.UNNEEDED else ()
        known = (self._open.get(number) for number in tasks)
        found = [task for task in known if task is not None and task.ending is None and task.ticket not in spared]
        self._give_up(found, ending)
        self._finish_recalled()
        self._feed()
        return [task.number for task in found]

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
        return self._supervisor.is_usable

    def is_stuck(self, lane: Lane) -> bool:
        """Return whether a new task of the lane would be refused, because no worker could start it."""
        return self._refusal(lane) is not None

    def counts(self) -> PoolCounts:
        """Return the values of gauges."""
        self._recheck_stuck()
        return PoolCounts(self._supervisor.count(), len(self._stuck))

    def close(self, timeout_seconds: float) -> bool:
        """End the workers and all tasks; False if workers hang and stay behind. No row is touched afterwards."""
        if self._is_closed:
            return True
        self._is_closed = True
        is_ended = self._end_workers(timeout_seconds)
        self._fences.clear()
        for task in list(self._open.values()):
            if task.ticket:
                self._undo_admission(task)
            self._end(task, task.ending or Ending.CANCELLED)
        return is_ended

    def _refusal(self, lane: Lane) -> Refused | None:
        if self._is_closed:
            return CLOSED
        if not self._supervisor.is_usable:
            return NO_WORKERS
        if not self._stuck:
            return None
        # A new task would not start where every worker that may take it hangs.
        storing = self._table.storing if lane is Lane.STORE else MOST_IO_PROCESSES
        is_stuck = self._stuck.issuperset(worker for worker in self._supervisor.numbers() if worker < storing)
        return STUCK if is_stuck else None

    def _feed(self) -> None:
        """Put tasks on the table while there is room and the breaker admits them, and hand them to the workers."""
        if self._is_closed or not self._supervisor.is_usable:
            return
        active_key = "" if self._keyring is None else self._keyring.active_name
        # The first workers do not read if the volume does not need them; they may store.
        first, most = 0, self._reading.most(self._supervisor.count())
        if self._reads and most < self._supervisor.count() - len(self._slow):
            first = sorted({*self._supervisor.numbers()} - self._slow)[-most]
        self._table.reading_from = first
        for (lane, queue), pipe in zip(self._queues.items(), self._pipes, strict=True):
            messages = []
            while queue and self._free and self._taken[lane] < _LANE_ENTRIES[lane]:
                task = queue.popleft()
                # A task that was cancelled or promoted since is still in its first queue.
                if task.lane is lane and task.state is TaskState.QUEUED and self._admit(task):
                    messages.append(self._place(task, active_key))
            if lane is Lane.STORE:
                # The last lane: tasks that were not admitted have ended, and no worker has seen a store yet.
                self._let_store(1.0 if not self._stores else _YIELDING_SHARE if self._reads else self.storing_share)
            pipe.send(messages)

    def _admit(self, task: InFlight) -> bool:
        """Ask the breaker and the store permit; end a task that is not admitted."""
        direction = _DIRECTIONS[task.lane]
        if not self._breaker.admit(direction):
            self._end(task, BREAKER)
            return False
        task.is_skipped = False
        if direction is Direction.STORE:
            outcome = self._permit.reserve(self._block_bytes, task.task.key.tenant)
            if outcome is not None:
                self._breaker.record_store(outcome)
                self._end(task, outcome)
                return False
        return True

    def _place(self, task: InFlight, active_key: str) -> bytes:
        """Put a task on the table; return the message that hands it to a worker."""
        task.entry = entry = self._free.pop()
        task.ticket = ticket = self._next_ticket
        task.state = TaskState.ON_TABLE
        task.placed_at = time.monotonic()
        self._next_ticket = ticket % 0xFFFFFFFF + 1
        self._taken[task.lane] += 1
        self._tickets[ticket] = task
        self._table.set_ticket(entry, ticket)
        return encode_task(TaskMessage(entry, ticket, task.task, active_key))

    def _let_store(self, share: float) -> None:
        """Let this share of the workers store at most, but at least one worker."""
        storing = max(1, int(share * self._supervisor.size))
        if storing != self._table.storing:
            self._table.storing = storing

    def _take_answers(self) -> None:
        for ticket, code, seconds, ended, number in REPLY.iter_unpack(self._replies.receive()):
            task = self._tickets.pop(ticket, None)
            if task is None:
                continue
            self._moved_at = time.monotonic()
            task.ticket = NO_TICKET
            self._clear(task)
            if task.lane is not Lane.STORE:
                self._read_at = self._moved_at
            answer = decode_answer(code, number)
            if answer is None:
                # A recalled task: it ends with the others of its fence.
                self._undo_admission(task)
            else:
                self._supervisor.note_work()
                if isinstance(answer, Hit):
                    workers = self._supervisor.count()
                    self._reading.note(seconds, ended, reads=self._reads, workers=workers, now=self._moved_at)
                self._record(task, answer)
                self._end(task, answer, seconds, ended)

    def _record(self, task: InFlight, answer: Answer) -> None:
        """Tell permit and breaker the outcome of a task."""
        if task.lane is Lane.STORE:
            stored = cast("StoreOutcome", answer)
            self._permit.end(self._block_bytes, stored.bytes_written if isinstance(stored, Stored) else 0)
            if not task.is_skipped:
                self._breaker.record_store(stored)
        elif not task.is_skipped:
            self._breaker.record_load(cast("Outcome", answer))

    def _end(self, task: InFlight, outcome: Answer | Refused | Ending, *times: float) -> None:
        if task.state is TaskState.ENDED:
            return
        task.state = TaskState.ENDED
        del self._open[task.number]
        if task.lane is Lane.STORE:
            self._stores -= 1
        else:
            self._reads -= 1
        self._done.append(Done(task.number, outcome, *times))

    def _undo_admission(self, task: InFlight) -> None:
        if task.lane is Lane.STORE:
            self._permit.end(self._block_bytes, 0)
        if not task.is_skipped:
            self._breaker.skip(_DIRECTIONS[task.lane])
        task.is_skipped = True

    def _working(self) -> set[int]:
        """Return the tickets that workers work on."""
        return {self._table.current(worker).ticket for worker in self._supervisor.numbers()} - {NO_TICKET}

    def _clear(self, task: InFlight) -> bool:
        """Take a task off the table; return whether it was there. It counts as recalled."""
        if task.state is not TaskState.ON_TABLE:
            return False
        task.state = TaskState.RECALLED
        self._table.set_ticket(task.entry, NO_TICKET)
        self._free.append(task.entry)
        self._taken[task.lane] -= 1
        return True

    def _recall(self, tasks: Iterable[InFlight]) -> None:
        """Begin to recall those of the tasks that are on the table; `_finish_recalled` ends them."""
        cleared = [task for task in tasks if self._clear(task)]
        if cleared:
            self._fences.append(_Fence(set(self._supervisor.numbers()), time.monotonic(), cleared))

    def _give_up(self, tasks: Sequence[InFlight], ending: Ending | Refused) -> None:
        """Recall the tasks on the table, and end the others."""
        for task in tasks:
            task.ending = ending
            if task.state is TaskState.QUEUED:
                self._end(task, ending)
        self._recall(tasks)

    def _is_passed(self, fence: _Fence) -> bool:
        """Return whether no worker copies for the tasks of a fence any more."""
        if self._table.is_unlocked(0, max(fence.remaining, default=0) + 1):
            fence.remaining.clear()
        fence.remaining = {worker for worker in fence.remaining if not self._table.is_unlocked(worker)}
        if time.monotonic() - fence.began > _LOCK_SECONDS:
            for worker in fence.remaining:
                self._supervisor.kill(worker)
        return not fence.remaining

    def _finish_recalled(self) -> None:
        """End the tasks whose rows are safe, and queue those again that are still wanted."""
        if not self._fences:
            return
        passed = [fence for fence in self._fences if self._is_passed(fence)]
        self._fences = [fence for fence in self._fences if fence.remaining]
        working = self._working()
        for task in reversed([task for fence in passed for task in fence.tasks]):
            # A store that is being written has an outcome to record when its answer comes.
            if task.ticket and not (task.ticket in working and task.ending is not None):
                self._tickets.pop(task.ticket, None)
                task.ticket = NO_TICKET
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
        self._supervisor.tick(self._is_worker_ready)
        if self._supervisor.is_usable:
            self._grow(now)
        self._reap()
        if not self._supervisor.is_usable:
            self._give_up([task for task in self._open.values() if task.ending is None], NO_WORKERS)
            return
        self._end_hanging(now)
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
        if self._stuck:
            self._tick_idle(_TICK_SECONDS)

    def _grow(self, now: float) -> None:
        """Start more workers where all of them read more than fewer would, and chunks do not come quickly.

        Workers never become fewer again: one that waits costs its memory only.
        """
        if now < self._grow_at:
            return
        self._grow_at = now + _GROW_SECONDS
        size = wanted = self._supervisor.size
        if self._reads > size and self._reading.may_need_more(size):
            wanted += max(1, size // 2)
        if self.round_trip_seconds:
            slow = workers_for(round_trip_seconds=self.round_trip_seconds, chunk_bytes=self._rows.row_bytes)
            wanted = max(wanted, slow)
        if (wanted := min(wanted, self._settings.workers)) > size:
            self._supervisor.size = wanted
            self._supervisor.start()

    def _reap(self) -> None:
        """End the tasks of dead workers, and replace the workers."""
        dead = self._supervisor.reap()
        if not dead:
            return
        # Their last answers are in the pipe.
        self._take_answers()
        for worker in dead:
            if self._stores:
                # It may have written a block and not said so.
                self._permit.end(0, self._block_bytes)
            task = self._tickets.pop(self._table.current(worker).ticket, None)
            self._table.set_current(worker, Current(NO_TICKET, 0.0))
            if task is None:
                continue
            task.ticket = NO_TICKET
            self._clear(task)
            # The breaker counts only what the volume did.
            self._undo_admission(task)
            if task.ending is None:
                self._end(task, StoreFault.IO if task.lane is Lane.STORE else Fault.IO)
        # A message that a dead worker had just read is lost.
        working = self._working()
        self._recall(task for task in self._tickets.values() if task.ticket not in working)
        for worker in dead:
            self._supervisor.replace(worker)

    def _end_hanging(self, now: float) -> None:
        """Kill the workers that hang, as far as they can be killed, and end their tasks."""
        self._stuck, self._slow = set(), set()
        for worker in self._supervisor.numbers():
            current = self._table.current(worker)
            is_away = current.ticket != NO_TICKET or not current.started
            if is_away and now - current.started > _SLOW_SECONDS:
                self._slow.add(worker)
            if current.ticket == NO_TICKET or now - current.started <= self._settings.deadline_seconds:
                continue
            # It counts as stuck until it is reaped.
            self._stuck.add(worker)
            self._supervisor.kill(worker)
            task = self._tickets.get(current.ticket)
            if task is not None and task.ending is None:
                self._breaker.record_timeout(_DIRECTIONS[task.lane])
                task.is_skipped = True
                self._give_up([task], Ending.LATE)

    def _end_late(self, now: float) -> None:
        """Give up on tasks that wait while no worker finishes one, or for very long; stores wait for reads, too.

        A worker that is stopped before it says what it works on keeps a task for itself.
        """
        was_ready = self._is_ready
        self._is_ready = any(self._is_worker_ready(worker) for worker in self._supervisor.numbers())
        if self._is_ready and not was_ready:
            # Workers begin just now.
            self._read_at = self._moved_at = now
        slow = self._settings.deadline_seconds
        if not self._is_ready:
            slow = max(slow, START_SECONDS)
        is_late = {lane: now - (self._moved_at if lane is Lane.STORE else self._read_at) > slow for lane in Lane}
        lost_before, working = now - _LOST_DEADLINES * slow, self._working()
        late = [
            task
            for task in self._open.values()
            if (is_late[task.lane] or task.placed_at < lost_before)
            and task.ending is None
            and task.ticket not in working
        ]
        self._give_up(late, Ending.LATE)
        if late and not working:
            # There is work, and the workers do nothing.
            for worker in self._supervisor.numbers():
                self._supervisor.kill(worker)

    def _end_workers(self, timeout_seconds: float) -> bool:
        """End the workers; False if some hang even now, which touch no row."""
        self._recall(self._tickets.values())
        # Only a worker that may take tasks sees the end of a pipe.
        self._table.reading_from = 0
        deadline = time.monotonic() + timeout_seconds
        while any(not self._is_passed(fence) for fence in self._fences) and time.monotonic() < deadline:
            time.sleep(0.001)
        for pipe in self._pipes:
            os.close(pipe.writer)
        is_ended = self._supervisor.close(max(0.0, deadline - time.monotonic()))
        if not is_ended and not self._has_processes:
            # A thread that hangs still uses the descriptors.
            return False
        for pipe in self._pipes:
            os.close(pipe.reader)
        self._replies.close()
        self._table.close()
        os.close(self._table_fd)
        return is_ended

    def _is_worker_ready(self, worker: int) -> bool:
        return self._table.current(worker).started > 0

    def _launch(self, number: int) -> WorkerProcess:
        # The record of the worker before it does not hold for the new one.
        self._table.set_current(number, Current(NO_TICKET, 0.0))
        pipes = tuple(pipe.reader for pipe in self._pipes)
        settings = WorkerSettings(
            worker=number,
            parent=os.getpid(),
            table=self._table_fd,
            regions=self._regions,
            row_bytes=self._rows.row_bytes,
            pipes=pipes,
            replies=self._replies.writer,
            pool=self._settings,
        )
        if not self._has_processes:
            store = self._settings.open_volume(self._fs)
            return WorkerThread(Worker(settings, table=self._table, rows=self._rows, store=store).run)
        inherited = [self._table_fd, *{region.fd for region in self._regions}, *pipes, self._replies.writer]
        return start_process("kvtier_connector.io_workers.worker", settings.encode(), inherited)
