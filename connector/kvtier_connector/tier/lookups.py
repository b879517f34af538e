# SPDX-License-Identifier: Apache-2.0
"""Which blocks the volume has, answered at once from the index or, where that does not know, by a probe on the pool.

Every method is the scheduler's; probes only put results in a queue. What the index says of a block goes for everybody.
What is kept here goes for one request: "not there", so that it is computed and not asked about in each step, and
"there, but it could not be loaded". So each request fails at most one load per block, and none waits in a loop.
"""

from __future__ import annotations

import enum
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.tier.workers import Lane, Staging, Task, WorkerPool

KEYS_PER_PROBE = 32
"""A prompt of thousands of blocks is spread over the threads, and a call that hangs takes few keys with it."""


class Verdict(enum.Enum):
    """What is known about a block for one request."""

    THERE = "there"
    WAITING = "waiting"
    """A probe has not answered yet."""
    ABSENT = "absent"
    LATE = "late"
    """The probe did not answer in time, which is as good as absent."""
    FAILED = "failed"
    """The request tried to load it in vain."""


@dataclass(slots=True)
class _Probe:
    number: int
    """Tells an answer to this probe from one to an earlier probe of the same key."""
    requests: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Batch:
    deadline: float
    probes: tuple[tuple[BlockKey, int], ...]


class Lookups:
    """The verdicts of one tier. Not thread-safe, but for `_answers`, which the probes fill."""

    def __init__(
        self,
        state: Callable[[BlockKey], Presence],
        contains: Callable[[BlockKey], bool],
        pool: WorkerPool,
        *,
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; `contains` may block and is called on the pool, `state` must not."""
        self._state = state
        self._contains = contains
        self._pool = pool
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._negative: dict[str, dict[BlockKey, Verdict]] = {}
        self._probes: dict[BlockKey, _Probe] = {}
        self._unsent: list[tuple[BlockKey, int]] = []
        self._sent: deque[_Batch] = deque()
        self._answers: queue.SimpleQueue[tuple[BlockKey, int, bool]] = queue.SimpleQueue()
        self._next_number = 0

    def ask(self, key: BlockKey, request: str) -> Verdict:
        """Say whether the volume has the block; WAITING until a probe has answered or its deadline has passed."""
        negative = self._negative.get(request)
        if negative is not None and key in negative:
            return negative[key]
        state = self._state(key)
        if state is Presence.PRESENT:
            return Verdict.THERE
        if state is Presence.ABSENT:
            self._negative.setdefault(request, {})[key] = Verdict.ABSENT
            return Verdict.ABSENT
        probe = self._probes.get(key)
        if probe is None:
            probe = _Probe(self._next_number)
            self._next_number += 1
            self._probes[key] = probe
            self._unsent.append((key, probe.number))
        probe.requests.add(request)
        return Verdict.WAITING

    def send(self) -> None:
        """Hand the questions of this step to the pool, in batches."""
        wanted = []
        for key, number in self._unsent:
            if self._probes[key].requests:
                wanted.append((key, number))
            else:
                # Whoever asked has finished.
                del self._probes[key]
        self._unsent.clear()
        batches = [tuple(wanted[first : first + KEYS_PER_PROBE]) for first in range(0, len(wanted), KEYS_PER_PROBE)]
        deadline = self._clock() + self._deadline_seconds
        self._sent.extend(_Batch(deadline, batch) for batch in batches)
        self._pool.submit(Lane.PROBE, [self._make_task(batch) for batch in batches])

    def collect(self) -> None:
        """Take in the answers that came, and settle those that are late."""
        while not self._answers.empty():
            key, number, is_there = self._answers.get_nowait()
            self._settle(key, number, Verdict.THERE if is_there else Verdict.ABSENT)
        now = self._clock()
        while self._sent and (self._sent[0].deadline <= now or not self._is_waiting(self._sent[0])):
            for key, number in self._sent.popleft().probes:
                self._settle(key, number, Verdict.LATE)

    def add_failed(self, keys: Sequence[BlockKey], request: str) -> None:
        """Note blocks that could not be loaded: this request does without."""
        for key in keys:
            self._negative.setdefault(request, {})[key] = Verdict.FAILED

    def forget(self, request: str) -> None:
        """Drop what only this request was told or waits for."""
        self._negative.pop(request, None)
        for probe in self._probes.values():
            probe.requests.discard(request)

    def _is_wanted(self, key: BlockKey, number: int) -> bool:
        probe = self._probes.get(key)
        return probe is not None and probe.number == number

    def _is_waiting(self, batch: _Batch) -> bool:
        return any(self._is_wanted(key, number) for key, number in batch.probes)

    def _settle(self, key: BlockKey, number: int, verdict: Verdict) -> None:
        """Apply the first answer to a probe; a later one, or one to an earlier probe of the key, changes nothing."""
        if not self._is_wanted(key, number):
            return
        probe = self._probes.pop(key)
        if verdict is Verdict.THERE:
            # The index knows it by now.
            return
        for request in probe.requests:
            self._negative.setdefault(request, {})[key] = verdict

    def _make_task(self, batch: tuple[tuple[BlockKey, int], ...]) -> Task:
        def probe(_: Staging) -> None:
            for key, number in batch:
                self._answers.put((key, number, self._contains(key)))

        return probe
