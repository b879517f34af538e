# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of its movers and what they answer, also as bytes between the two. Pure.

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

MOST_PROBED = 16
"""Blocks that one probe asks for; a longer prompt is spread over the movers."""
NO_ROW = -1


class Lane(enum.IntEnum):
    """What a task is for; the lower number is served first."""

    PROBE = 0
    """A request waits to know whether the volume has its blocks."""
    LOAD = 1
    """A request waits for the block."""
    PREFETCH = 2
    """A request that is not scheduled yet will want the block."""
    STORE = 3
    """Nobody waits."""


class Task(NamedTuple):
    """One chunk to move between its row of the CPU tier and its file, or files to look for."""

    lane: Lane
    keys: tuple[BlockKey, ...]
    """The chunk; for a probe, up to `MOST_PROBED`."""
    row: int = NO_ROW
    lineage: Lineage = NO_LINEAGE
    """Of what is stored."""
    queued: float = 0.0
    """Of what is stored: when the engine handed it over, in seconds of `time.monotonic`."""
    is_prefix: bool = True
    """Of a probe: whether the keys are in the order of a prompt, and none is wanted behind one that is absent."""


class Looked(NamedTuple):
    """What a probe found."""

    present: tuple[bool, ...]
    """For the first of the keys; of a prefix it ends with the first that is absent."""


class Refused(NamedTuple):
    """The task was not begun."""

    cause: str
    """``breaker``, ``stuck`` or ``closed``."""


class Ending(enum.Enum):
    """How a task ended that was given up before it had an outcome."""

    WITHDRAWN = "withdrawn"
    LATE = "late"
    """The volume did not answer within the deadline."""


Answer = Outcome | StoreOutcome | Looked
"""Of a mover."""


class Done(NamedTuple):
    """The end of one task. The movers do not touch its row any more."""

    task: int
    """The number that the caller gave it."""
    outcome: Answer | Refused | Ending
    seconds: float
    """That a mover spent on it."""


REPLY = struct.Struct("=IIfQ")
"""Ticket, code, seconds, and what else the answer says: what a mover sends back of each task."""

_NONE, _HIT, _MISS, _STORED, _PRESENT, _LOOKED = range(6)
_FAULTS: tuple[Fault | StoreFault, ...] = (*Fault, *StoreFault)
_FIRST_FAULT = 16
_CODES = {fault: number for number, fault in enumerate(_FAULTS, start=_FIRST_FAULT)}
_OTHERS: dict[int, Answer] = {_MISS: Miss(), _PRESENT: Present()}


def encode_task(task: Task, active_key: str = "") -> bytes:
    """Return what `decode_task` reads; `active_key` names the key that encrypts what is stored, if there are any."""
    lane, keys, row, lineage, queued, is_prefix = task
    if lane is Lane.PROBE and len(keys) > MOST_PROBED:
        raise ValueError(f"a probe of {len(keys)} blocks is longer than {MOST_PROBED}")
    return marshal.dumps((int(lane), [tuple(key) for key in keys], row, tuple(lineage), queued, is_prefix, active_key))


def decode_task(data: bytes) -> tuple[Task, str]:
    """Read what `encode_task` wrote."""
    lane, keys, row, lineage, queued, is_prefix, active_key = marshal.loads(data)  # noqa: S302 - the engine's own memory
    names = tuple(BlockKey(*key) for key in keys)
    return Task(Lane(lane), names, row, Lineage(*lineage), queued, is_prefix), active_key


def encode_answer(answer: Answer | None) -> tuple[int, int]:
    """Return a code and a number; None is a task that was withdrawn."""
    if isinstance(answer, Hit):
        return _HIT, answer.bytes_read
    if isinstance(answer, Stored):
        return _STORED, answer.bytes_written
    if isinstance(answer, Fault | StoreFault):
        return _CODES[answer], 0
    if isinstance(answer, Looked):
        return _LOOKED, sum(is_there << place for place, is_there in enumerate((*answer.present, True)))
    return {Miss: _MISS, Present: _PRESENT}.get(type(answer), _NONE), 0


def decode_answer(code: int, number: int) -> Answer | None:
    """Read what `encode_answer` returned."""
    if code == _HIT:
        return Hit(number)
    if code == _STORED:
        return Stored(number)
    if code >= _FIRST_FAULT:
        return _FAULTS[code - _FIRST_FAULT]
    if code == _LOOKED:
        # The highest bit marks the end.
        return Looked(tuple(bool(number >> place & 1) for place in range(number.bit_length() - 1)))
    return _OTHERS.get(code)
