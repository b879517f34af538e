# SPDX-License-Identifier: Apache-2.0
"""Tasks of the I/O workers and their answers, and how both are encoded between engine and worker. Pure.

Both sides run the same release under the same interpreter, so the encoding is Python's own and has no version.
"""

from __future__ import annotations

import enum
import marshal
import struct
from typing import NamedTuple

from kvtier_connector.store.blockstore import Hit, Miss, Outcome, Present, Stored, StoreFault, StoreOutcome
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage


class Lane(enum.IntEnum):
    """Purpose of a task; the lower number is served first."""

    LOAD = 0
    """A request waits for the block."""
    PREFETCH = 1
    """A request that is not scheduled yet will need the block."""
    STORE = 2
    """No request waits."""


class Task(NamedTuple):
    """A chunk to move between its row of the CPU tier and its file."""

    lane: Lane
    key: BlockKey
    row: int = -1
    lineage: Lineage = NO_LINEAGE
    """Stores only."""
    queued: float = 0.0
    """Stores only: `time.monotonic` when the engine submitted the task."""


class Refused(NamedTuple):
    """The task was not started."""

    cause: str
    """``breaker``, ``stuck``, ``no_workers`` or ``closed``."""


class Ending(enum.Enum):
    """End of a task without an outcome."""

    CANCELLED = "cancelled"
    UNNEEDED = "unneeded"
    """No request waits for it any more."""
    LATE = "late"
    """The volume did not answer within the deadline."""


Answer = Outcome | StoreOutcome
"""Result of a task as a worker reports it."""


class Done(NamedTuple):
    """End of one task. No worker touches its row any more."""

    task: int
    """The caller's number of the task."""
    outcome: Answer | Refused | Ending
    seconds: float = 0.0
    """Time that a worker spent on the task."""
    ended: float = 0.0
    """When it ended, in seconds of `time.monotonic`; 0 if no worker worked on it."""


TASK_BYTES = 512
"""Length of a message that hands a task to a worker."""
REPLY = struct.Struct("=IIfdQ")
"""A worker's reply: ticket, code, seconds, when it ended, number. Code and number are those of `encode_answer`."""

_NONE, _HIT, _STORED, _FIRST_PLAIN = range(4)
_PLAIN: tuple[Answer, ...] = (Miss(), Present(), *Fault, *StoreFault)


class TaskMessage(NamedTuple):
    """A task on its way to a worker."""

    entry: int
    """Its entry in the table."""
    ticket: int
    task: Task
    active_key: str = ""
    """The encryption key of stores; empty without one."""


def encode_task(message: TaskMessage) -> bytes:
    """Return the bytes that `decode_task` reads; raise ValueError for a task that is too long."""
    entry, ticket, (lane, key, row, lineage, queued), active_key = message
    data = marshal.dumps((entry, ticket, (int(lane), tuple(key), row, tuple(lineage), queued), active_key))
    if len(data) > TASK_BYTES:
        raise ValueError(f"a task of {len(data)} bytes does not fit a message of {TASK_BYTES}")
    return data.ljust(TASK_BYTES, b"\0")


def decode_task(data: bytes) -> TaskMessage:
    """Return the message that `encode_task` encoded."""
    entry, ticket, (lane, key, row, lineage, queued), active_key = marshal.loads(data)  # noqa: S302 - the engine's own
    return TaskMessage(entry, ticket, Task(Lane(lane), BlockKey(*key), row, Lineage(*lineage), queued), active_key)


def encode_answer(answer: Answer | None) -> tuple[int, int]:
    """Return a code and a number; None stands for a recalled task that the worker did not do."""
    if isinstance(answer, Hit):
        return _HIT, answer.bytes_read
    if isinstance(answer, Stored):
        return _STORED, answer.bytes_written
    return (_NONE if answer is None else _FIRST_PLAIN + _PLAIN.index(answer)), 0


def decode_answer(code: int, number: int) -> Answer | None:
    """Return the answer that `encode_answer` encoded."""
    if code >= _FIRST_PLAIN:
        return _PLAIN[code - _FIRST_PLAIN]
    if code == _HIT:
        return Hit(number)
    return Stored(number) if code == _STORED else None
