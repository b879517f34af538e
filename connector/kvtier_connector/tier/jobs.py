# SPDX-License-Identifier: Apache-2.0
"""One record per transfer that vLLM asked for: which blocks are done, and whether memory of the engine is in use.

A read or write that hangs must not keep its slot: vLLM gives the slot to another block as soon as the job is reported,
and a late read would then overwrite that block. So the volume is read into, and written from, a buffer of the thread's
own. The slot is touched by a memory copy only, between `claim` and the next call, and only while the job is open. A job
is reported when no block of it is being copied; what the volume does later lands in the thread's own buffer.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier_connector.store.blockstore import Outcome, StoreOutcome
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage

BlockOutcome = Outcome | StoreOutcome


class _State(enum.Enum):
    OPEN = "open"
    """Queued, or at the volume; the slot is not in use and the block can be abandoned at any time."""
    COPYING = "copying"
    """The slot is in use, for as long as a memory copy takes."""
    DONE = "done"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a job: vLLM's key and the row of the primary tier that it is copied to or from."""

    key: bytes
    slot: int
    name: BlockKey
    """What the store calls it."""
    lineage: Lineage = NO_LINEAGE


class Job:
    """A transfer of several blocks, one task a block.

    `job_id`, `is_load`, `request`, `blocks` and `deadline` never change. `_lock` guards the rest. The thread that
    settles the last block, or the scheduler when it abandons, calls `on_complete` once, outside the lock. Properties
    are read after that, when nobody writes them any more.
    """

    def __init__(  # noqa: PLR0913 - one record, built in one place
        self,
        job_id: int,
        *,
        is_load: bool,
        request: str,
        blocks: Sequence[Block],
        deadline: float,
        on_complete: Callable[[Job], None],
    ) -> None:
        """Make an open job; `deadline` is on `time.monotonic`."""
        self.job_id = job_id
        self.is_load = is_load
        self.request = request
        self.blocks = tuple(blocks)
        self.deadline = deadline
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._states = [_State.OPEN] * len(self.blocks)
        self._outcomes: list[BlockOutcome | None] = [None] * len(self.blocks)
        self._begun = [False] * len(self.blocks)
        self._unsettled = len(self.blocks)
        self._started: float | None = None
        self._busy_seconds = 0.0
        self._elapsed_seconds = 0.0
        self._cause = ""

    def start(self) -> None:
        """Note that the transfer begins, where nobody asks `is_open` of its first block."""
        with self._lock:
            self._start_clock()

    def is_open(self, index: int) -> bool:
        """Say whether the block is still wanted."""
        with self._lock:
            self._start_clock()
            self._begun[index] = True
            return self._states[index] is _State.OPEN

    def claim(self, index: int) -> bool:
        """Take the slot for a memory copy; False means that it belongs to somebody else by now."""
        with self._lock:
            self._start_clock()
            is_ours = self._states[index] is _State.OPEN
            if is_ours:
                self._states[index] = _State.COPYING
            return is_ours

    def release(self, index: int) -> None:
        """Give the slot back; the block is not settled yet."""
        with self._lock:
            self._states[index] = _State.OPEN

    def settle(self, index: int, outcome: BlockOutcome, *, seconds: float) -> None:
        """Record how the block ended, unless it was abandoned before; the slot is not in use any more."""
        with self._lock:
            if self._states[index] in {_State.DONE, _State.ABANDONED}:
                return
            self._states[index] = _State.DONE
            self._outcomes[index] = outcome
            self._busy_seconds += seconds
            is_last = self._count_down(1)
        if is_last:
            self._on_complete(self)

    def refuse(self, index: int, cause: str) -> None:
        """Give up on one block that was not begun."""
        with self._lock:
            if self._states[index] is not _State.OPEN:
                return
            self._cause = cause
            self._states[index] = _State.ABANDONED
            self._begun[index] = False
            is_last = self._count_down(1)
        if is_last:
            self._on_complete(self)

    def abandon(self, cause: str) -> int:
        """Give up on the blocks that are not settled; return how many are left, because their slot is being copied.

        A memory copy takes milliseconds; call again until nothing is left.
        """
        with self._lock:
            self._cause = cause
            abandoned = [index for index, state in enumerate(self._states) if state is _State.OPEN]
            for index in abandoned:
                self._states[index] = _State.ABANDONED
            is_last = bool(abandoned) and self._count_down(len(abandoned))
            remaining = self._unsettled
        if is_last:
            self._on_complete(self)
        return remaining

    @property
    def outcomes(self) -> list[BlockOutcome | None]:
        """How each block ended, None if it was abandoned; read it of a completed job only."""
        return self._outcomes

    @property
    def hung(self) -> list[Block]:
        """The blocks that were at the volume when they were abandoned."""
        return [
            block
            for block, begun, outcome in zip(self.blocks, self._begun, self._outcomes, strict=True)
            if begun and outcome is None
        ]

    @property
    def cause(self) -> str:
        """Why blocks were abandoned; empty if none was."""
        return self._cause

    @property
    def busy_seconds(self) -> float:
        """The time that threads spent on the settled blocks, summed."""
        return self._busy_seconds

    @property
    def elapsed_seconds(self) -> float:
        """The time from the first block's start to the last one's end, as a clock on the wall shows it."""
        return self._elapsed_seconds

    def _start_clock(self) -> None:
        if self._started is None:
            self._started = time.monotonic()

    def _count_down(self, count: int) -> bool:
        self._unsettled -= count
        if self._unsettled == 0 and self._started is not None:
            self._elapsed_seconds = time.monotonic() - self._started
        return self._unsettled == 0


def abandon_late(jobs: Iterable[Job], cause: str, abandon: Callable[[Job, str], int]) -> None:
    """Give up on what is left of the jobs whose deadline has passed, with what gives up on one."""
    now = time.monotonic()
    for job in jobs:
        if job.deadline <= now:
            abandon(job, cause)
