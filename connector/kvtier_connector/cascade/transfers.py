# SPDX-License-Identifier: Apache-2.0
"""The loads and stores under way between the CPU tier and the volume, and how each of their chunks ended.

vLLM orders transfers of many chunks; the movers know single ones. Each chunk ends once, with an outcome that is
counted, and its transfer is reported with the last. A chunk that was not written is remembered, and is offered again
while the CPU tier has it. The scheduler's thread only.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvtier_connector.cascade.admission import Admission
from kvtier_connector.cascade.drain import Drain
from kvtier_connector.cascade.offers import Offers
from kvtier_connector.cascade.requests import TierRequest, TierRequests
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.tasks import Done, Ending, Lane, Refused, Task
from kvtier_connector.store.blockstore import Hit, Present, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.health import Breaker
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey, Lineage
from kvtier_connector.store.shared import SharedStore
from kvtier_connector.vllm_adapter import metrics

POLL_SECONDS = 0.001
MOST_SHED = 1 << 16
"""Chunks that are remembered to be offered again; the oldest go."""
AGAIN_SECONDS = 1.0
LONGEST_AGAIN_SECONDS = 60.0
"""After how long chunks are offered again, doubled each time that it was in vain."""
_KEPT_OFF = frozenset({metrics.UNREUSED, metrics.NO_TENANT, metrics.NO_ADAPTER, metrics.NO_MEDIA})
_NEVER_AGAIN = _KEPT_OFF | {metrics.NEW_WEIGHTS, metrics.SHUTDOWN}
"""Why a chunk was not written where offering it again would change nothing."""
_UNWANTED = _KEPT_OFF | {metrics.BYPASSED, metrics.INERT}
"""Why a chunk was not written that was not to be: the end of the engine loses nothing by it."""

_Counters = tuple[metrics.Metric, metrics.Metric, metrics.Metric, metrics.Metric]
"""Of seconds, blocks, bytes of their files, and bytes of what they hold."""
_READ: _Counters = (metrics.READ_SECONDS, metrics.READ_BLOCKS, metrics.READ_BYTES, metrics.LOADED_BLOCK_BYTES)
_WRITTEN: _Counters = (
    metrics.WRITE_SECONDS,
    metrics.WRITTEN_BLOCKS,
    metrics.WRITTEN_BYTES,
    metrics.STORED_BLOCK_BYTES,
)


class Landed(NamedTuple):
    """One chunk of a load has ended."""

    key: OffloadKey
    is_read: bool
    """Whether its row holds it now, verified."""


class _Shed(NamedTuple):
    """A chunk that was not written, or not yet."""

    name: BlockKey
    lineage: Lineage
    since: float
    """When it was computed, in seconds of `time.monotonic`: a purge since then keeps it from being written."""


@dataclass(slots=True)
class _Transfer:
    """What vLLM ordered."""

    order: TransferJob
    began: float
    tasks: dict[int, OffloadKey] = field(default_factory=dict)
    """Those that have not ended."""
    done: list[OffloadKey] = field(default_factory=list)
    was_late: bool = False
    is_again: bool = False
    """Whether its chunks were not written when they were offered first."""


@dataclass(slots=True)
class _Moved:
    """What was moved in one direction since it was counted last: one count for many chunks."""

    seconds: float = 0.0
    blocks: int = 0
    file_bytes: int = 0

    def count(self, stats: metrics.Stats, counters: _Counters, row_bytes: int) -> None:
        """Add it to the counters of its direction."""
        amounts = (self.seconds, self.blocks, self.file_bytes, self.blocks * row_bytes)
        for counter, amount in zip(counters, amounts, strict=True):
            stats.count(counter, amount)


class Rows(NamedTuple):
    """The CPU tier."""

    view: memoryview
    """A table of one row a chunk: the bytes of all ranks side by side."""
    number: int
    length: int
    """Of one, in bytes."""
    fd: int | None
    """The file behind them, if other processes can map it."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an engine takes along to the next directory."""

    rows: Rows
    breaker: Breaker
    requests: TierRequests
    admission: Admission
    offers: Offers
    stats: metrics.Stats
    drain: Drain


class Transfers:
    """See the module."""

    def __init__(self, movers: WorkerPool, store: SharedStore, parts: Parts) -> None:
        """Store what it works with."""
        self._movers, self._store, self._requests = movers, store, parts.requests
        self._admission, self._offers = parts.admission, parts.offers
        self._stats, self._drain, self._row_bytes = parts.stats, parts.drain, parts.rows.length
        self._transfers: dict[int, _Transfer] = {}
        self._tasks: dict[int, _Transfer] = {}
        self._stores_of: Counter[str] = Counter()
        """By request, how many of the transfers are stores of it."""
        self._next_task = 0
        self._landed: list[Landed] = []
        self._read, self._written = _Moved(), _Moved()
        self._finished: list[JobResult] = []
        self._stored: list[OffloadKey] = []
        self._shed: OrderedDict[OffloadKey, _Shed] = OrderedDict()
        self._cause = metrics.SHUTDOWN
        """Why what is under way was taken back."""
        self._again_at, self._again_seconds = 0.0, AGAIN_SECONDS
        self.loading = 0
        """Chunks of loads that have not ended."""
        self.storing = 0

    def __len__(self) -> int:
        """Return how many transfers have not ended."""
        return len(self._transfers)

    @property
    def oldest_began(self) -> float | None:
        """When the oldest transfer that has not ended was ordered, on `time.monotonic`."""
        return min((transfer.began for transfer in self._transfers.values()), default=None)

    def is_storing(self, context: ReqContext) -> bool:
        """Say whether chunks of a request are being written."""
        return context.req_id in self._stores_of

    def number(self) -> int:
        """Return a number for a task that nobody else has."""
        self._next_task += 1
        return self._next_task

    def load(self, order: TransferJob, *, is_urgent: bool) -> None:
        """Read chunks into their rows; `take_landed` tells of each as it comes, `hasten` makes them urgent."""
        transfer = self._open(order)
        request = self._requests.of(order.req_context)
        self._admission.begin_load(order.job_id, len(transfer.tasks), queued=self.loading)
        self.loading += len(transfer.tasks)
        lane = Lane.LOAD if is_urgent else Lane.PREFETCH
        self._movers.submit(
            [
                (number, Task(lane, (request.block_key(key),), row))
                for (number, key), row in zip(transfer.tasks.items(), order.chunk_ids.tolist(), strict=True)
            ]
        )

    def hasten(self, keys: Collection[OffloadKey]) -> None:
        """Make chunks that are being loaded urgent: a request that was scheduled waits for them."""
        wanted = frozenset(keys)
        loads = [transfer for transfer in self._transfers.values() if transfer.order.is_promotion]
        self._movers.promote([number for each in loads for number, key in each.tasks.items() if key in wanted])

    def store(self, order: TransferJob, *, refusal: str | None, is_again: bool = False) -> None:
        """Write chunks that are wanted on the volume.

        Args:
            order: What vLLM ordered.
            refusal: Why nothing is written at present; None if chunks are.
            is_again: Whether `peek_shed` named the chunks, and nothing was computed.
        """
        transfer = self._open(order)
        transfer.is_again = is_again
        request = self._requests.of(order.req_context)
        self.storing += len(transfer.tasks)
        if not is_again:
            self._note_computed(order, request)
            refusal = request.refusal or refusal
        tasks = []
        for (number, key), row in zip(list(transfer.tasks.items()), order.chunk_ids.tolist(), strict=True):
            shed = self._shed.get(key) or _Shed(request.block_key(key), request.lineage(key), time.monotonic())
            is_due = is_again or self._offers.add(key)
            if self._offers.is_gated and self._store.state(shed.name) is Presence.PRESENT:
                # Every request offers its whole prefix: what the volume has is not even copied.
                self.end(Done(number, Present(), 0.0))
                continue
            self._shed[key] = shed
            if refusal is None and is_due:
                tasks.append((number, Task(Lane.STORE, (shed.name,), row, shed.lineage, shed.since)))
            else:
                self.end(Done(number, Refused(refusal or metrics.UNREUSED), 0.0))
        while len(self._shed) > MOST_SHED:
            self._shed.popitem(last=False)
        self._movers.submit(tasks)

    def peek_shed(self, most: int) -> list[OffloadKey]:
        """Return chunks that were not written and that no transfer is writing; the oldest first."""
        if not self._shed or self.storing or time.monotonic() < self._again_at:
            return []
        return list(islice(self._shed, most))

    def forget_shed(self, keys: Iterable[OffloadKey]) -> None:
        """Drop chunks that the CPU tier no longer has."""
        for key in keys:
            self._shed.pop(key, None)

    def end(self, done: Done) -> None:
        """Count how a chunk ended, and its transfer with the last one."""
        transfer = self._tasks.pop(done.task)
        key = transfer.tasks.pop(done.task)
        if transfer.order.is_promotion:
            self._end_load(transfer, key, done)
        else:
            self._end_store(transfer, key, done)
        if not transfer.tasks:
            self._close(transfer)

    def take_landed(self) -> Sequence[Landed]:
        """Return the chunks of loads that ended since the last call, and count them."""
        landed, self._landed = self._landed, []
        if landed:
            read, self._read = self._read, _Moved()
            read.count(self._stats, _READ, self._row_bytes)
        return landed

    def take_finished(self) -> Sequence[JobResult]:
        """Return the transfers that ended since the last call, and count what was written."""
        written, self._written = self._written, _Moved()
        written.count(self._stats, _WRITTEN, self._row_bytes)
        finished, self._finished = self._finished, []
        return finished

    def take_stored(self) -> list[OffloadKey]:
        """Return the chunks that came to lie on the volume since the last call."""
        stored, self._stored = self._stored, []
        return stored

    def drain(self) -> None:
        """If the engine was told to end, write what can be written before it does, and then nothing more."""
        drain = self._drain
        if not drain.is_begun:
            return
        if drain.announce(self.storing):
            # What was not written is offered again at once: there is no later.
            self._again_at = 0.0
        if not drain.is_over:
            return
        if self.storing:
            self._cause = metrics.SHUTDOWN
            self._movers.cancel([number for number, each in self._tasks.items() if not each.order.is_promotion])
        else:
            drain.tell()

    def withdraw(self, cause: str) -> None:
        """Take everything back that is under way: each still ends, once the movers do not touch its row."""
        self._cause = cause
        self._movers.cancel(list(self._tasks))

    def _open(self, order: TransferJob) -> _Transfer:
        transfer = self._transfers[order.job_id] = _Transfer(order, time.monotonic())
        if not order.is_promotion:
            self._stores_of[order.req_context.req_id] += 1
        for key in order.keys:
            number = self.number()
            transfer.tasks[number] = key
            self._tasks[number] = transfer
        if not transfer.tasks:
            self._close(transfer)
        return transfer

    def _note_computed(self, order: TransferJob, request: TierRequest) -> None:
        """Take in how long the chunks took to compute, unless they were only offered again."""
        measures = not self._offers.is_gated or not any(
            self._offers.is_known(key) or self._store.state(request.block_key(key)) is Presence.PRESENT
            for key in order.keys
        )
        ends = [order.req_context.get_offload_key_position(key) for key in order.keys]
        self._admission.end_compute(request.name, ends, measures=measures)

    def _end_load(self, transfer: _Transfer, key: OffloadKey, done: Done) -> None:
        outcome = done.outcome
        self.loading -= 1
        self._read.seconds += done.seconds
        if isinstance(outcome, Hit):
            transfer.done.append(key)
            self._read.blocks += 1
            self._read.file_bytes += outcome.bytes_read
        else:
            self._stats.count(metrics.MISSES, cause=self._load_cause(done))
            if outcome is Ending.LATE:
                transfer.was_late = True
                self._store.forget(self._requests.of(transfer.order.req_context).block_key(key))
        self._landed.append(Landed(key, isinstance(outcome, Hit)))

    def _end_store(self, transfer: _Transfer, key: OffloadKey, done: Done) -> None:
        outcome = done.outcome
        self.storing -= 1
        self._written.seconds += done.seconds
        if isinstance(outcome, Stored | Present):
            transfer.done.append(key)
            self._stored.append(key)
            self._shed.pop(key, None)
            self._drain.note(key, is_written=True)
            if isinstance(outcome, Stored):
                self._written.blocks += 1
                self._written.file_bytes += outcome.bytes_written
            else:
                self._stats.count(metrics.PRESENT_BLOCKS)
            return
        cause = self._store_cause(done)
        if cause not in _UNWANTED:
            self._drain.note(key, is_written=False)
        if cause in _NEVER_AGAIN:
            self._shed.pop(key, None)
        if not transfer.is_again:
            # Once for each chunk, however often it is offered.
            self._stats.count(metrics.SHED_STORES, cause=cause)
            self._again_at = max(self._again_at, time.monotonic() + AGAIN_SECONDS)

    def _close(self, transfer: _Transfer) -> None:
        """Have a transfer reported to vLLM."""
        order = transfer.order
        del self._transfers[order.job_id]
        if not order.is_promotion:
            name = order.req_context.req_id
            self._stores_of[name] -= 1
            if not self._stores_of[name]:
                del self._stores_of[name]
        count, done = len(order.keys), transfer.done
        is_success = len(done) == count
        if order.is_promotion:
            # A load that was late says how slow the volume is, if anything came; a fault says nothing.
            self._admission.end_load(order.job_id, count, landed=len(done) if is_success or transfer.was_late else 0)
        elif transfer.is_again:
            self._again_seconds = AGAIN_SECONDS if done else min(2 * self._again_seconds, LONGEST_AGAIN_SECONDS)
            self._again_at = 0.0 if is_success else time.monotonic() + self._again_seconds
        self._finished.append(
            JobResult(
                job_id=order.job_id,
                success=is_success,
                successful_keys=tuple(done) if order.is_promotion and done and not is_success else None,
                transfer_time=time.monotonic() - transfer.began,
                transfer_bytes=count * self._row_bytes,
            )
        )

    def _load_cause(self, done: Done) -> str:
        outcome = done.outcome
        if isinstance(outcome, Fault):
            return outcome.value
        return self._cause_of(done) if isinstance(outcome, Refused | Ending) else metrics.ABSENT

    def _store_cause(self, done: Done) -> str:
        outcome = done.outcome
        return outcome.value if isinstance(outcome, StoreFault) else self._cause_of(done)

    def _cause_of(self, done: Done) -> str:
        """Return why a chunk was not moved that nobody asked the volume for."""
        if isinstance(done.outcome, Refused):
            return done.outcome.cause
        return metrics.DEADLINE if done.outcome is Ending.LATE else self._cause
