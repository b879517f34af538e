# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the task table: hands tasks to workers, takes their answers, and recalls tasks.

One token through a pipe announces a task, and one message back reports its end. Nothing here waits or makes a system
call on the volume. `WorkerPool` decides which tasks are handed out.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier_connector.io_workers.buffers import OwnRows, Region
from kvtier_connector.io_workers.supervisor import Supervisor, WorkerProcess, WorkerThread
from kvtier_connector.io_workers.task_table import (
    ENTRIES,
    NO_TICKET,
    TOKEN,
    Current,
    MessagePipe,
    TaskTable,
    create_table,
)
from kvtier_connector.io_workers.tasks import REPLY, Answer, Ending, Lane, Refused, Task, decode_answer, encode_task
from kvtier_connector.io_workers.worker import PoolSettings, Worker, WorkerSettings, start_process
from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import Fault

_LANE_ENTRIES = {
    Lane.LOAD: ENTRIES // 2,
    Lane.PREFETCH: ENTRIES // 4,
    Lane.STORE: ENTRIES // 8,
}
"""Share of the table that each lane may take, so that no lane blocks another."""
_LOCK_SECONDS = 1.0
"""A copy takes a millisecond; a worker that holds its lock for longer than this is stopped, and is killed."""


FEWEST = 3
"""Fewest workers on any host: two can store and one is free for a load, even where writes hang."""
_GROW_SECONDS = 0.5
"""Time until added workers have begun to work."""
_MOST_WAIT_SHARE = 0.2
"""Workers that wait for a core for a larger share of their time get no company."""
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
    table_lane: Lane = Lane.STORE
    """The lane whose share of the table it takes."""
    ending: Ending | Refused | None = None
    """Its end if no answer comes before its row is safe."""
    is_skipped: bool = False
    """Whether the breaker already counted an end for it."""
    placed: int = 0
    """Counts the tasks that were put on the table, this one included."""
    passed_at: float | None = None
    """When the engine first saw that a task of the same lane which was placed later had been answered."""


@dataclass(slots=True)
class _Fence:
    """Waits until no worker copies under a ticket that was cleared before."""

    remaining: set[int]
    began: float
    tasks: list[InFlight]


class Dispatcher:
    """The engine's end of the task table. Scheduler's thread only."""

    def __init__(
        self, settings: PoolSettings, rows: OwnRows, regions: Sequence[Region], *, fs: FileSystem = LOCAL
    ) -> None:
        """Make the table and the pipes; `start` starts the workers.

        Raises:
            OSError: This process may not open more files, or the host has no memory; nothing stays open.
        """
        self._settings = settings
        self._rows = rows
        self._regions = tuple(regions)
        self._fs = fs
        # A process has the real file system only, so an injected one means threads.
        self._has_processes = fs is LOCAL
        pipes: list[MessagePipe] = []
        with contextlib.ExitStack() as opened:
            self._table_fd = create_table()
            opened.callback(os.close, self._table_fd)
            self._table = TaskTable(self._table_fd, threads=0 if self._has_processes else settings.workers)
            opened.callback(self._table.close)
            for size in (*[TOKEN.size] * len(Lane), REPLY.size):
                pipes.append(MessagePipe(size))
                opened.callback(pipes[-1].close)
            opened.pop_all()
        self._pipes, self._replies = pipes[:-1], pipes[-1]
        least = min(settings.first_workers or settings.workers, settings.workers)
        self.supervisor = Supervisor(least, self._launch, first_backoff_seconds=settings.retry_seconds)
        self._grow_at = 0.0
        self._free = list(range(ENTRIES))
        self._taken = dict.fromkeys(Lane, 0)
        self._tickets: dict[int, InFlight] = {}
        self._unsent: dict[Lane, list[bytes]] = {lane: [] for lane in Lane}
        self._fences: list[_Fence] = []
        self._next_ticket = 1
        self._placed = 0
        self._answered = dict.fromkeys(Lane, 0)
        """By lane, `InFlight.placed` of the last task that was answered."""
        self._stuck: set[int] = set()

    def start(self) -> None:
        """Start the workers."""
        self.share(1.0)
        self.supervisor.start()

    def has_room(self, lane: Lane) -> bool:
        """Return whether the table takes another task of the lane."""
        return bool(self._free) and self._taken[lane] < _LANE_ENTRIES[lane]

    def place(self, task: InFlight, active_key: str) -> None:
        """Put a task on the table; `send` announces it."""
        task.entry = entry = self._free.pop()
        task.ticket = ticket = self._next_ticket
        task.table_lane = task.lane
        task.state = TaskState.ON_TABLE
        self._placed += 1
        task.placed, task.passed_at = self._placed, None
        self._next_ticket = ticket % 0xFFFFFFFF + 1
        self._taken[task.lane] += 1
        self._tickets[ticket] = task
        self._table.write_task(entry, encode_task(task.task, active_key))
        self._table.set_ticket(entry, ticket)
        self._unsent[task.lane].append(TOKEN.pack(entry, ticket))

    def send(self) -> None:
        """Announce the tasks that were placed."""
        for lane, pipe in zip(Lane, self._pipes, strict=True):
            if tokens := self._unsent[lane]:
                self._unsent[lane] = []
            if tokens or pipe.is_full:
                pipe.send(tokens)

    def share(self, share: float) -> None:
        """Let this share of the workers store at most, but at least one worker."""
        storing = max(1, int(share * self.supervisor.size))
        if storing != self._table.storing:
            self._table.storing = storing

    def drain(self) -> list[tuple[InFlight, Answer | None, float]]:
        """Return the tasks that workers answered, with the answer and seconds; None for a recalled task not done."""
        answers = []
        for ticket, code, seconds, number in REPLY.iter_unpack(self._replies.receive()):
            task = self._tickets.pop(ticket, None)
            if task is not None:
                task.ticket = NO_TICKET
                self._answered[task.table_lane] = max(self._answered[task.table_lane], task.placed)
                was_on_table = self._clear(task)
                answer = decode_answer(code, number)
                if answer is None and was_on_table:
                    # Only a torn entry reads so. The task must end.
                    answer = StoreFault.IO if task.lane is Lane.STORE else Fault.IO
                answers.append((task, answer, seconds))
        if any(answer is not None for _, answer, _ in answers):
            self.supervisor.note_work()
        return answers

    def recall(self, tasks: Iterable[InFlight]) -> None:
        """Begin to recall tasks; `recalled` returns those that are."""
        cleared = [task for task in tasks if self._clear(task)]
        if cleared:
            self._fences.append(_Fence(set(self.supervisor.numbers()), time.monotonic(), cleared))

    def recalled(self) -> list[InFlight]:
        """Return recalled tasks whose rows no worker will touch any more."""
        tasks: list[InFlight] = []
        if self._fences:
            self._fences = [fence for fence in self._fences if not self._is_passed(fence, tasks)]
        return tasks

    def forget(self, task: InFlight) -> None:
        """Ignore an answer to a recalled task."""
        self._tickets.pop(task.ticket, None)
        task.ticket = NO_TICKET

    def working(self) -> set[int]:
        """Return the tickets that workers work on."""
        return {self._table.current(worker).ticket for worker in self.supervisor.numbers()} - {NO_TICKET}

    def on_table(self) -> list[InFlight]:
        """Return the tasks on the table."""
        return [task for task in self._tickets.values() if task.state is TaskState.ON_TABLE]

    def reap(self) -> list[tuple[int, InFlight | None]]:
        """Return the workers that died, each with its task; the caller ends the task and calls `replace`."""
        found = []
        for worker in self.supervisor.reap():
            task = self._tickets.pop(self._table.current(worker).ticket, None)
            if task is not None:
                task.ticket = NO_TICKET
                self._clear(task)
            self._table.set_current(worker, Current(0, NO_TICKET, 0.0))
            found.append((worker, task))
        return found

    def end_hanging(self, now: float) -> list[InFlight]:
        """Kill the workers that hang, as far as they can be killed, and return their tasks."""
        found = []
        self._stuck = set()
        for worker in self.supervisor.numbers():
            current = self._table.current(worker)
            if current.ticket == NO_TICKET:
                continue
            task = self._tickets.get(current.ticket)
            if now - current.started > self._settings.deadline_seconds:
                # It counts as stuck until it is reaped.
                self._stuck.add(worker)
                self.supervisor.kill(worker)
                if task is not None:
                    found.append(task)
        return found

    def lost(self, now: float) -> list[InFlight]:
        """Return tasks that a worker has taken and neither works on nor answers, for longer than the deadline.

        Workers take the tasks of a lane in their order, so a task is taken once a later one of its lane was answered.
        A worker that is stopped before it says what it works on keeps a task for itself.
        """
        working = self.working()
        found = []
        for task in self.on_table():
            if task.placed >= self._answered[task.table_lane] or task.ticket in working:
                task.passed_at = None
            elif task.passed_at is None:
                task.passed_at = now
            elif now - task.passed_at > self._settings.deadline_seconds:
                found.append(task)
        return found

    def end_all(self) -> None:
        """Kill all workers: none of them does anything."""
        for worker in self.supervisor.numbers():
            self.supervisor.kill(worker)

    def tick(self, now: float, *, reads: int, round_trip_seconds: float) -> None:
        """Let the supervisor work, and start more workers where the volume leaves processors idle.

        Workers never become fewer again: one that waits costs its memory only.
        """
        supervisor = self.supervisor
        supervisor.tick(self._is_ready)
        if not supervisor.is_usable or now < self._grow_at:
            return
        self._grow_at = now + _GROW_SECONDS
        size = wanted = supervisor.size
        if reads > size and supervisor.wait_share() <= _MOST_WAIT_SHARE:
            wanted += max(1, size // 2)
        if round_trip_seconds:
            wanted = max(wanted, workers_for(round_trip_seconds=round_trip_seconds, chunk_bytes=self._rows.row_bytes))
        if (wanted := min(wanted, self._settings.workers)) > size:
            supervisor.grow(wanted)

    def is_ready(self) -> bool:
        """Return whether a worker is ready for work."""
        return any(self._is_ready(worker) for worker in self.supervisor.numbers())

    def is_stuck(self, lane: Lane) -> bool:
        """Return whether a new task of the lane would not start, because every worker that may take it hangs."""
        if not self._stuck:
            return False
        able = self.supervisor.numbers()
        if lane is Lane.STORE:
            able = [worker for worker in able if worker < self._table.storing]
        return self._stuck.issuperset(able)

    def count_stuck(self) -> int:
        """Return the number of workers that hang."""
        return len(self._stuck)

    def close(self, timeout_seconds: float) -> bool:
        """End the workers; False if some hang even now, which touch no row."""
        self.recall(self.on_table())
        deadline = time.monotonic() + timeout_seconds
        while self._fences and time.monotonic() < deadline:
            self.recalled()
            time.sleep(0.001)
        for pipe in self._pipes:
            os.close(pipe.writer)
        is_ended = self.supervisor.close(max(0.0, deadline - time.monotonic()))
        if not is_ended and not self._has_processes:
            # A thread that hangs still uses the descriptors.
            return False
        for pipe in self._pipes:
            os.close(pipe.reader)
        self._replies.close()
        self._table.close()
        os.close(self._table_fd)
        return is_ended

    def _clear(self, task: InFlight) -> bool:
        """Take a task off the table; return whether it was there. It counts as recalled."""
        if task.state is not TaskState.ON_TABLE:
            return False
        task.state = TaskState.RECALLED
        self._table.set_ticket(task.entry, NO_TICKET)
        self._free.append(task.entry)
        self._taken[task.table_lane] -= 1
        return True

    def _is_passed(self, fence: _Fence, tasks: list[InFlight]) -> bool:
        fence.remaining = {worker for worker in fence.remaining if not self._table.is_unlocked(worker)}
        if not fence.remaining:
            tasks += fence.tasks
        elif time.monotonic() - fence.began > _LOCK_SECONDS:
            for worker in fence.remaining:
                self.supervisor.kill(worker)
        return not fence.remaining

    def _is_ready(self, worker: int) -> bool:
        return self._table.current(worker).started > 0

    def _launch(self, number: int) -> WorkerProcess:
        # The record of the worker before it does not hold for the new one.
        self._table.set_current(number, Current(0, NO_TICKET, 0.0))
        pipes = tuple(pipe.reader for pipe in self._pipes)
        row_bytes, replies = self._rows.row_bytes, self._replies.writer
        if not self._has_processes:
            store = self._settings.open_volume(self._fs)
            return WorkerThread(
                Worker(
                    number,
                    table=self._table,
                    rows=self._rows,
                    row_bytes=row_bytes,
                    store=store,
                    pipes=pipes,
                    replies=replies,
                ).run
            )
        settings = WorkerSettings(
            worker=number,
            parent=os.getpid(),
            table=self._table_fd,
            regions=self._regions,
            row_bytes=row_bytes,
            pipes=pipes,
            replies=replies,
            pool=self._settings,
        )
        inherited = [self._table_fd, *{region.fd for region in self._regions}, *pipes, replies]
        return start_process("kvtier_connector.io_workers.worker", settings.encode(), inherited)
