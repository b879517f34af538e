# SPDX-License-Identifier: Apache-2.0
"""What an engine and its movers share: pipes, and memory with the rule that keeps a late copy out of a row given away.

Each task lies in an entry and has a ticket, a number that is used once. A mover copies to or from a row of the CPU tier
only while it holds the lock of its own number, and only if the entry still shows the ticket of its task. The engine
takes a task back by clearing the entry's ticket, and then waits until it has held each mover's lock once.

Why that suffices, on any processor: the locks are the kernel's record locks, or a mutex where the mover is a thread,
and taking and giving back either orders memory. A mover that took its lock before the engine did has given it back, so
its copy is over. One that takes it later sees the cleared ticket and copies nothing. A mover that dies, however it
dies, loses its lock when its memory is gone. Nobody else's memory is at stake: the system reads the volume into the
mover's own memory, so what a dead or hanging mount delivers late lands there.

No other field decides anything about a row, and what a mover answers goes by its ticket. A torn or outdated value costs
a task that is done twice or given up.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvtier_connector.contract.engine import MOST_IO_PROCESSES, MOST_IO_THREADS

ENTRIES = 4096
"""Tasks that movers know of at once; more wait with the engine."""
FIRST_THREAD = MOST_IO_PROCESSES
"""Movers with this number or a higher one are threads of the engine's process."""
MOST_MOVERS = FIRST_THREAD + MOST_IO_THREADS
NO_TICKET = 0

TOKEN = struct.Struct("=II")
"""Entry and ticket: what tells a mover of a task."""

_HEAD = struct.Struct("=II8x")
_MOVER = struct.Struct("=IId")
_LENGTH = struct.Struct("=H")
_ENTRY_BYTES = 1024
_MOVERS_START = _HEAD.size
_TICKETS_START = _MOVERS_START + MOST_MOVERS * _MOVER.size
_ENTRIES_START = _TICKETS_START + ENTRIES * 4
MOST_TASK_BYTES = _ENTRY_BYTES - _LENGTH.size
_BOARD_BYTES = _ENTRIES_START + ENTRIES * _ENTRY_BYTES

_PIPE_BYTES = 1 << 20
_ATOMIC_BYTES = select.PIPE_BUF
"""The system writes so much whole or not at all."""


class Head(NamedTuple):
    """What goes for all movers that are processes."""

    wanted: int
    """A mover with this number or a higher one ends when it has nothing to do."""
    storing: int
    """Movers with a lower number may store; the others leave that alone."""


class Current(NamedTuple):
    """What a mover works on."""

    entry: int
    ticket: int
    """`NO_TICKET` while it waits for work."""
    started: float
    """On `time.monotonic`, which all processes of a host share; 0 until it is ready for work."""


class Board:
    """A view of the shared memory. The engine writes the head, tasks and tickets, each mover its own record.

    Of the engine's, the scheduler's thread uses everything but what is said to be a mover's.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory behind the descriptor, which `create_board` made."""
        self._fd = fd
        self._memory = mmap.mmap(fd, _BOARD_BYTES)
        # What others read meanwhile is written number by number: struct clears all of its place first.
        self._numbers = memoryview(self._memory)[:_TICKETS_START].cast("I")
        self._starts = memoryview(self._memory)[:_TICKETS_START].cast("d")
        self._tickets = memoryview(self._memory)[_TICKETS_START:_ENTRIES_START].cast("I")
        self._mutexes = [threading.Lock() for _ in range(MOST_IO_THREADS)]

    def close(self) -> None:
        """Unmap it; the descriptor stays open."""
        for view in (self._numbers, self._starts, self._tickets):
            view.release()
        self._memory.close()

    def head(self) -> Head:
        """Return what the engine last said to all."""
        return Head(*_HEAD.unpack_from(self._memory))

    def set_head(self, head: Head) -> None:
        """Say something to all."""
        self._numbers[0], self._numbers[1] = head

    def ticket(self, entry: int) -> int:
        """Return the ticket that the entry shows."""
        return self._tickets[entry]

    def set_ticket(self, entry: int, ticket: int) -> None:
        """Show a ticket; `NO_TICKET` takes the task back once `is_unlocked` was true of every mover."""
        self._tickets[entry] = ticket

    def write_task(self, entry: int, task: bytes) -> None:
        """Describe a task, `MOST_TASK_BYTES` at most, before its token is sent."""
        if len(task) > MOST_TASK_BYTES:
            raise ValueError(f"a task of {len(task)} bytes does not fit an entry of {MOST_TASK_BYTES}")
        start = _ENTRIES_START + entry * _ENTRY_BYTES
        _LENGTH.pack_into(self._memory, start, len(task))
        start += _LENGTH.size
        self._memory[start : start + len(task)] = task

    def task(self, entry: int) -> bytes:
        """Return what `write_task` wrote."""
        start = _ENTRIES_START + entry * _ENTRY_BYTES
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        return self._memory[start : start + min(length, MOST_TASK_BYTES)]

    def set_current(self, mover: int, current: Current) -> None:
        """Say what a mover works on; a mover's. Nobody sees a ticket before what goes with it."""
        start = _MOVERS_START + mover * _MOVER.size
        number = start // self._numbers.itemsize
        if current.ticket == NO_TICKET:
            self._numbers[number + 1] = NO_TICKET
        self._numbers[number] = current.entry
        self._starts[start // self._starts.itemsize + 1] = current.started
        self._numbers[number + 1] = current.ticket

    def current(self, mover: int) -> Current:
        """Return what a mover works on."""
        start = _MOVERS_START + mover * _MOVER.size
        number = start // self._numbers.itemsize
        # The ticket first: what goes with it may be of a later one, and is never of an earlier one.
        ticket = self._numbers[number + 1]
        return Current(self._numbers[number], ticket, self._starts[start // self._starts.itemsize + 1])

    def lock(self, mover: int) -> None:
        """Take the mover's lock; that mover's own."""
        if mover < FIRST_THREAD:
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, mover)
        else:
            self._mutexes[mover - FIRST_THREAD].acquire()

    def unlock(self, mover: int) -> None:
        """Give the mover's lock back; that mover's own."""
        if mover < FIRST_THREAD:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, mover)
        else:
            self._mutexes[mover - FIRST_THREAD].release()

    def is_unlocked(self, mover: int) -> bool:
        """Take the mover's lock and give it back; False if the mover holds it. For the engine only."""
        if mover >= FIRST_THREAD:
            mutex = self._mutexes[mover - FIRST_THREAD]
            is_free = mutex.acquire(blocking=False)
            if is_free:
                mutex.release()
            return is_free
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, mover)
        except (BlockingIOError, PermissionError):
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, mover)
        return True


def create_board() -> int:
    """Return a descriptor of fresh memory for a `Board`, all zero."""
    fd = os.memfd_create("kvtier-board")
    os.ftruncate(fd, _BOARD_BYTES)
    return fd


class MessagePipe:
    """Messages of one length on their way; more than fit wait here. Nothing waits, on either end.

    Not thread-safe. The movers inherit one end or the other as a descriptor.
    """

    def __init__(self, message_bytes: int) -> None:
        """Open both ends; raise OSError where the process has no room for them."""
        self._batch = _ATOMIC_BYTES // message_bytes
        self._read_bytes = _PIPE_BYTES - _PIPE_BYTES % message_bytes
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        with contextlib.suppress(OSError):
            # A pipe of the usual size holds fewer messages than the board entries; then some wait here.
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._unsent: deque[bytes] = deque()

    @property
    def is_full(self) -> bool:
        """Whether messages wait here for room."""
        return bool(self._unsent)

    def send(self, messages: Iterable[bytes]) -> None:
        """Write messages, or keep them until there is room."""
        self._unsent.extend(messages)
        self.flush()

    def flush(self) -> None:
        """Write what there is room for now."""
        while self._unsent:
            batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), self._batch))]
            try:
                os.write(self.writer, b"".join(batch))
            except BlockingIOError:
                self._unsent.extendleft(reversed(batch))
                return

    def receive(self) -> bytes:
        """Return the messages that have arrived, one after the other."""
        try:
            return os.read(self.reader, self._read_bytes)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Close both ends; a mover that reads sees the end."""
        os.close(self.writer)
        os.close(self.reader)
