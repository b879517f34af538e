# SPDX-License-Identifier: Apache-2.0
"""Memory and pipes that an engine shares with its I/O workers, and the rule that protects a row that was given away.

Each task has an entry of the table and a ticket, a number that is used once; a pipe carries the task itself. A worker
copies to or from a row of the CPU tier only while it holds its own lock and the entry shows the ticket of its task. The
engine recalls a task by clearing the entry's ticket, and then waits until it has held each worker's lock once.

The rule suffices on any processor: the locks are the kernel's record locks, or mutexes where workers are threads, and
both order memory. A worker that took its lock before the engine did has released it, so its copy is over. A worker that
takes its lock later sees the cleared ticket and copies nothing. The kernel releases the lock of a process that dies
only after its memory is gone. The volume itself is read into the worker's own memory, so late data of a dead mount
lands there.

No other field decides anything about a row, and the engine accepts an answer by its ticket. An outdated value costs a
task that is done twice or given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvtier_connector.contract.engine import MOST_IO_PROCESSES
from kvtier_connector.io_workers import short_calls

ENTRIES = 4096
"""Most tasks that workers know of at once; more wait with the engine."""
NO_TICKET = 0

_STARTS = MOST_IO_PROCESSES * 4
"""Tickets of workers are before it."""
_TICKETS = _STARTS + MOST_IO_PROCESSES * 8
_STORING, _READING_FROM = ENTRIES, ENTRIES + 1
"""Places behind the tickets of all entries."""
_TABLE_BYTES = _TICKETS + (ENTRIES + 2) * 4

_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 17
"""The replies about all entries fit."""
_ATOMIC_BYTES = select.PIPE_BUF
"""The kernel writes so many bytes to a pipe completely or not at all."""


class Current(NamedTuple):
    """State of one worker."""

    ticket: int
    """Of its task; `NO_TICKET` while it is idle."""
    started: float
    """`time.monotonic` when it began the task or became idle; 0 until it is ready for work."""


class TaskTable:
    """A view of the shared memory. The engine writes tickets and who may work; each worker writes its own record.

    In the engine, only the scheduler's thread uses it, except for the methods of workers that run on threads.
    """

    def __init__(self, fd: int, *, threads: int = 0) -> None:
        """Map the memory of `create_table`; `threads` is the number of workers that are threads of this process."""
        self._fd = fd
        self._memory = mmap.mmap(fd, _TABLE_BYTES)
        # Numbers that other processes read are written one by one: struct would clear their place first.
        self._working = memoryview(self._memory)[:_STARTS].cast("I")
        self._starts = memoryview(self._memory)[_STARTS:_TICKETS].cast("d")
        self._tickets = memoryview(self._memory)[_TICKETS:].cast("I")
        self._mutexes = [threading.Lock() for _ in range(threads)]

    def close(self) -> None:
        """Unmap it; the descriptor stays open."""
        for view in (self._working, self._starts, self._tickets):
            view.release()
        self._memory.close()

    @property
    def storing(self) -> int:
        """Workers with a lower number may store."""
        return self._tickets[_STORING]

    @storing.setter
    def storing(self, workers: int) -> None:
        self._tickets[_STORING] = workers

    @property
    def reading_from(self) -> int:
        """Workers with this number or a higher one may read."""
        return self._tickets[_READING_FROM]

    @reading_from.setter
    def reading_from(self, worker: int) -> None:
        self._tickets[_READING_FROM] = worker

    def ticket(self, entry: int) -> int:
        """Return the ticket that the entry shows."""
        return self._tickets[entry]

    def set_ticket(self, entry: int, ticket: int) -> None:
        """Show a ticket; `NO_TICKET` recalls the task once `is_unlocked` was true of every worker."""
        self._tickets[entry] = ticket

    def set_current(self, worker: int, current: Current) -> None:
        """Write a worker's record; called by that worker. A reader never sees a ticket before its time."""
        if current.ticket == NO_TICKET:
            self._working[worker] = NO_TICKET
        self._starts[worker] = current.started
        self._working[worker] = current.ticket

    def current(self, worker: int) -> Current:
        """Return a worker's record."""
        # The ticket first: the time may be that of a later task, and is never that of an earlier one.
        ticket = self._working[worker]
        return Current(ticket, self._starts[worker])

    def lock(self, worker: int) -> None:
        """Take a worker's lock; called by that worker."""
        if self._mutexes:
            self._mutexes[worker].acquire()
        else:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, worker)

    def unlock(self, worker: int) -> None:
        """Release a worker's lock; called by that worker."""
        if self._mutexes:
            self._mutexes[worker].release()
        else:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, worker)

    def is_unlocked(self, worker: int, count: int = 1) -> bool:
        """Take and release the locks of so many workers; False if one of them holds its own. Called by the engine."""
        for mutex in self._mutexes[worker : worker + count]:
            if not mutex.acquire(blocking=False):
                return False
            mutex.release()
        if self._mutexes:
            return True
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, count, worker)
        except (BlockingIOError, PermissionError):
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, count, worker)
        return True


def create_table() -> int:
    """Return a descriptor of fresh memory for a `TaskTable`, all zero."""
    fd = os.memfd_create("kvtier-tasks")
    os.ftruncate(fd, _TABLE_BYTES)
    return fd


class MessagePipe:
    """A pipe for messages of one length, with a queue for those that do not fit. Neither end ever blocks.

    Not thread-safe. Worker processes inherit one of the descriptors.
    """

    def __init__(self, message_bytes: int) -> None:
        """Open both ends; raise OSError where the process may not open more files."""
        self._batch = _ATOMIC_BYTES // message_bytes
        self._buffer = ctypes.create_string_buffer(_READ_BYTES - _READ_BYTES % message_bytes)
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        with contextlib.suppress(OSError):
            # A pipe of the default size holds fewer messages than the table has entries; the rest is queued here.
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._unsent: deque[bytes] = deque()

    def send(self, messages: Iterable[bytes]) -> None:
        """Write messages after those that are queued, or queue them until there is room."""
        self._unsent.extend(messages)
        while self._unsent:
            batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), self._batch))]
            try:
                short_calls.write(self.writer, b"".join(batch))
            except BlockingIOError:
                self._unsent.extendleft(reversed(batch))
                return

    def receive(self) -> bytes:
        """Return the messages that have arrived, concatenated."""
        try:
            return short_calls.read(self.reader, self._buffer)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Close both ends; a worker that reads sees the end."""
        os.close(self.writer)
        os.close(self.reader)
