# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a mover, and what a mover answers, as they lie on the board. Pure.

Both sides run the same release under the same interpreter, so the encoding is Python's own and has no version.
"""

from __future__ import annotations

import marshal
from typing import NamedTuple

from kvtier_connector.store.blockstore import Hit, Miss, Outcome, Present, Stored, StoreFault, StoreOutcome
from kvtier_connector.store.format import Fault
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage

WITHDRAWN = 0
"""The code of a task that its ticket ended: there is no outcome."""
_HIT, _MISS, _STORED, _PRESENT = 1, 2, 3, 4
_FAULTS: tuple[Fault | StoreFault, ...] = (*Fault, *StoreFault)
_FIRST_FAULT = 16
_OTHERS: dict[int, Outcome | StoreOutcome] = {_MISS: Miss(), _PRESENT: Present()}
_CODES = {fault: number for number, fault in enumerate(_FAULTS, start=_FIRST_FAULT)}


class Task(NamedTuple):
    """One block to move."""

    is_load: bool
    key: BlockKey
    slot: int
    """Row of the CPU tier."""
    lineage: Lineage = NO_LINEAGE
    active_key: str = ""
    """Name of the key that encrypts what is saved, if there is a directory of keys."""


def encode_task(task: Task) -> bytes:
    """Return what `decode_task` reads."""
    return marshal.dumps((task.is_load, tuple(task.key), task.slot, tuple(task.lineage), task.active_key))


def decode_task(data: bytes) -> Task:
    """Read what `encode_task` wrote."""
    is_load, key, slot, lineage, active_key = marshal.loads(data)  # noqa: S302 - the engine's own memory
    return Task(is_load, BlockKey(*key), slot, Lineage(*lineage), active_key)


def encode_outcome(outcome: Outcome | StoreOutcome | None) -> tuple[int, int]:
    """Return the code and the bytes moved; None is a task that was withdrawn."""
    if isinstance(outcome, Hit):
        return _HIT, outcome.bytes_read
    if isinstance(outcome, Stored):
        return _STORED, outcome.bytes_written
    if isinstance(outcome, Fault | StoreFault):
        return _CODES[outcome], 0
    return {Miss: _MISS, Present: _PRESENT}.get(type(outcome), WITHDRAWN), 0


def decode_outcome(code: int, moved_bytes: int) -> Outcome | StoreOutcome | None:
    """Read what `encode_outcome` returned."""
    if code == _STORED:
        return Stored(moved_bytes)
    if code == _HIT:
        return Hit(moved_bytes)
    if code >= _FIRST_FAULT:
        return _FAULTS[code - _FIRST_FAULT]
    return _OTHERS.get(code)
