# SPDX-License-Identifier: Apache-2.0
"""The memory that the engine and its movers share, and the rule that keeps a late copy out of a slot given away.

Each task lies in an entry and has a ticket, a number that is used once. A mover copies to or from a row of the CPU tier
only while it holds the lock of its own number, and only if the entry still shows the ticket of its task. The engine
withdraws a task by clearing the entry's ticket, and then waits until it has held each mover's lock once.

Why that suffices, on any processor: the locks are the kernel's record locks, and taking and giving back one of them
orders memory as a mutex does. A mover that took its lock before the engine did has given it back, so its copy is over.
One that takes it later sees the cleared ticket and copies nothing. A mover that dies, however it dies, loses its lock
when its memory is gone. Nobody else's memory is at stake: the system reads the volume into the mover's own buffer, so
what a dead or hanging mount delivers late lands there.

No other field decides anything about a slot. A torn or outdated value costs a task that is done twice or given up.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

ENTRIES = 1024
"""Tasks that movers know of at once; more wait with the engine."""
MOST_MOVERS = 256
NO_TICKET = 0

TOKEN = struct.Struct("=II")
"""Entry and ticket: what goes through the pipes, each in one write."""

_MOVER = struct.Struct("=IId")
_RESULT = struct.Struct("=QQd")
_LENGTH = struct.Struct("=H")
_ENTRY_BYTES = 512
_TICKETS_START = MOST_MOVERS * _MOVER.size
_ENTRIES_START = _TICKETS_START + ENTRIES * 4
_TASK_START = _RESULT.size + _LENGTH.size
MOST_TASK_BYTES = _ENTRY_BYTES - _TASK_START
_BOARD_BYTES = _ENTRIES_START + ENTRIES * _ENTRY_BYTES


class Current(NamedTuple):
    """What a mover works on."""

    entry: int
    ticket: int
    """`NO_TICKET` while it waits for work."""
    started: float
    """On `time.monotonic`, which all processes of a host share; 0 until it is ready for work."""


class Result(NamedTuple):
    """How a task ended."""

    code: int
    """See `outcomes`."""
    moved_bytes: int
    seconds: float


class Board:
    """A view of the shared memory. The engine writes tasks and tickets, each mover its own record and its results.

    Not thread-safe: the scheduler's thread alone uses the engine's, and a mover has one thread.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory behind the descriptor, which `create_board` made."""
        self._fd = fd
        self._memory = mmap.mmap(fd, _BOARD_BYTES)
        self._tickets = memoryview(self._memory)[_TICKETS_START:_ENTRIES_START].cast("I")

    def close(self) -> None:
        """Unmap it; the descriptor stays open."""
        self._tickets.release()
        self._memory.close()

    def ticket(self, entry: int) -> int:
        """Return the ticket that the entry shows."""
        return self._tickets[entry]

    def set_ticket(self, entry: int, ticket: int) -> None:
        """Show a ticket; `NO_TICKET` withdraws the task once `is_unlocked` was true of every mover."""
        self._tickets[entry] = ticket

    def write_task(self, entry: int, task: bytes) -> None:
        """Describe a task, `MOST_TASK_BYTES` at most, before its token is sent."""
        if len(task) > MOST_TASK_BYTES:
            raise ValueError(f"a task of {len(task)} bytes does not fit an entry of {MOST_TASK_BYTES}")
        start = _entry_start(entry) + _RESULT.size
        _LENGTH.pack_into(self._memory, start, len(task))
        start += _LENGTH.size
        self._memory[start : start + len(task)] = task

    def task(self, entry: int) -> bytes:
        """Return what `write_task` wrote."""
        start = _entry_start(entry) + _RESULT.size
        (length,) = _LENGTH.unpack_from(self._memory, start)
        start += _LENGTH.size
        return self._memory[start : start + min(length, MOST_TASK_BYTES)]

    def write_result(self, entry: int, result: Result) -> None:
        """Say how a task ended, before its token is sent back."""
        _RESULT.pack_into(self._memory, _entry_start(entry), result.code, result.moved_bytes, result.seconds)

    def result(self, entry: int) -> Result:
        """Return what `write_result` wrote."""
        code, moved_bytes, seconds = _RESULT.unpack_from(self._memory, _entry_start(entry))
        return Result(code, int(moved_bytes), seconds)

    def set_current(self, mover: int, current: Current) -> None:
        """Say what a mover works on."""
        _MOVER.pack_into(self._memory, mover * _MOVER.size, *current)

    def current(self, mover: int) -> Current:
        """Return what a mover works on."""
        return Current(*_MOVER.unpack_from(self._memory, mover * _MOVER.size))

    @contextlib.contextmanager
    def locked(self, mover: int) -> Iterator[None]:
        """Hold the mover's lock; for that mover's process only."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, mover)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, mover)

    def is_unlocked(self, mover: int) -> bool:
        """Take the mover's lock and give it back; False if the mover holds it. For the engine's process only."""
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


def _entry_start(entry: int) -> int:
    return _ENTRIES_START + entry * _ENTRY_BYTES
