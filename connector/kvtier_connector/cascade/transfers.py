# SPDX-License-Identifier: Apache-2.0
"""The loads and stores under way between the CPU tier and the volume, and how each of their chunks ended.

vLLM orders transfers of many chunks; the I/O workers know single ones. Each chunk ends once, with an outcome that is
counted, remembered and, where the janitor must know, noted for it; its transfer is reported with the last. The write of
a chunk that failed or was refused is deferred, and is tried again while the CPU tier has the chunk. No request waits
for a store, but each step waits for what is done here. So a few chunks are handled with each step, see `catch_up`.
The scheduler's thread only.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvtier_connector.cascade.attach import Attachment
from kvtier_connector.cascade.drain import Drain
from kvtier_connector.cascade.memory import keep_last
from kvtier_connector.cascade.requests import TierRequests
from kvtier_connector.cascade.reuse_sample import REMEMBERED_CHUNKS, ReuseSample
from kvtier_connector.io_workers.tasks import Answer, Done, Ending, Lane, Refused, Task
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.journal import Op
from kvtier_connector.store.layout import BlockKey, Lineage
from kvtier_connector.vllm_adapter import metrics

POLL_SECONDS = 0.001
LEAST_CHUNKS = 4
"""Chunks of stores that each step handles, beside as many as the step before computes."""
MOST_DEFERRED = 1 << 16
"""Chunks that are remembered to be written later, and as many that too few requests have asked for; the oldest go."""
RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 60.0
"""Chunks are tried again after so long, doubled each time that it was in vain."""
_KEPT_OFF = frozenset({metrics.UNREUSED, metrics.NO_TENANT, metrics.NO_ADAPTER, metrics.NO_MEDIA})
_NEVER_AGAIN = _KEPT_OFF | {metrics.NEW_WEIGHTS, metrics.SHUTDOWN}
"""Causes for which another try would change nothing."""
_UNWANTED = _KEPT_OFF | {metrics.BYPASSED, metrics.INERT}
"""Causes for which the end of the engine loses no chunk."""


class ReuseFilter:
    """Counts the requests that ask for a chunk, so that one that only a single request has is not written.

    A count is worth it where writes or room are scarce, since most chunks are never read again. But a chunk that is not
    written for its first request cannot be read for its second. Pure memory of this engine: after a restart the
    counts begin anew. Not thread-safe.
    """

    def __init__(self, min_reuse: int, *, remembered: int = REMEMBERED_CHUNKS) -> None:
        """Store the settings; chunks are written for their `min_reuse`-th request, 1 writes all and counts nothing.

        The counts of `remembered` chunks are kept, about 40 MB by default.
        """
        self._min_reuse = min_reuse
        self._remembered = remembered
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()
        """The chunk asked for last comes last."""

    def is_due(self, key: OffloadKey) -> bool:
        """Say whether enough requests have asked for the chunk, as far as that is remembered."""
        return self._min_reuse == 1 or self._counts.get(key, 0) >= self._min_reuse

    def note_request(self, keys: Iterable[OffloadKey]) -> Sequence[OffloadKey]:
        """Count a request that asks for these chunks; return those that become due with it."""
        if self._min_reuse == 1:
            return ()
        due = []
        for key in keys:
            count = 1 + self._counts.get(key, 0)
            keep_last(self._counts, key, count, most=self._remembered)
            if count == self._min_reuse:
                due.append(key)
        return due


class Landed(NamedTuple):
    """One chunk of a load has ended."""

    key: OffloadKey
    cause: str | None
    """Why its row does not hold it; None if it does, verified."""
    done: Done
    """When it ended, and how long that took."""


class _Deferred(NamedTuple):
    """A chunk that was not written, or not yet."""

    name: BlockKey
    lineage: Lineage
    since: float
    """When it was computed, in seconds of `time.monotonic`: a purge since then keeps it from being written."""


@dataclass(slots=True)
class _Transfer:
    """An order of vLLM's."""

    order: TransferJob
    began: float
    tasks: dict[int, OffloadKey] = field(default_factory=dict)
    """Those that have not ended."""
    blocks: dict[OffloadKey, _Deferred] = field(default_factory=dict)
    """Of a store: its chunks."""
    done: list[OffloadKey] = field(default_factory=list)
    unneeded: set[OffloadKey] = field(default_factory=set)
    """Of a load: its chunks that were given up."""
    is_retry: bool = False
    """Whether its chunks were not written when vLLM offered them."""


class Transfers:
    """See the module."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        attachment: Attachment,
        *,
        requests: TierRequests,
        reuse: ReuseFilter,
        stats: metrics.Stats,
        drain: Drain,
        row_bytes: int,
    ) -> None:
        """Store the parts; `row_bytes` is the length of a chunk."""
        self._attachment, self._requests = attachment, requests
        self._reuse, self._stats, self._drain, self._row_bytes = reuse, stats, drain, row_bytes
        self._sample = ReuseSample(stats)
        self._transfers: dict[int, _Transfer] = {}
        self._tasks: dict[int, _Transfer] = {}
        self._stores_of: Counter[str] = Counter()
        """By request, how many of the transfers are stores of it."""
        self._ordered: deque[tuple[int, Task]] = deque()
        """Tasks of stores that wait for `catch_up`, with their numbers."""
        self._written: deque[Done] = deque()
        """Ends of chunks of stores, until they are taken in."""
        self._numbers = count(1)
        self._landed: list[Landed] = []
        self._finished: list[JobResult] = []
        self._stored: list[OffloadKey] = []
        self._deferred: OrderedDict[OffloadKey, _Deferred] = OrderedDict()
        self._unreused: OrderedDict[OffloadKey, _Deferred] = OrderedDict()
        """Chunks that not enough requests have asked for."""
        self._cause = metrics.SHUTDOWN
        """Why tasks under way were withdrawn."""
        self._retry_at, self._retry_seconds = 0.0, RETRY_SECONDS
        self.loading = 0
        """Chunks of loads that have not ended."""
        self.storing = 0
        self.on_skipped: Callable[[str, str], None] | None = None
        """Told of each chunk that is not written: its request, and the cause."""

    def __len__(self) -> int:
        """Return how many transfers have not ended."""
        return len(self._transfers)

    def observe(self, now: float) -> None:
        """Set the metrics of what has not ended; `now` is on `time.monotonic`."""
        stats, oldest = self._stats, min((transfer.began for transfer in self._transfers.values()), default=now)
        stats.set(metrics.QUEUED_LOAD_BYTES, self.loading * self._row_bytes)
        stats.set(metrics.QUEUED_STORE_BYTES, self.storing * self._row_bytes)
        stats.set(metrics.QUEUED_JOBS, len(self._transfers))
        stats.set(metrics.OLDEST_JOB_SECONDS, now - oldest)

    def is_storing(self, context: ReqContext) -> bool:
        """Say whether chunks of a request are being written."""
        return context.req_id in self._stores_of

    def load(self, order: TransferJob, *, is_urgent: bool) -> None:
        """Read chunks into their rows; `take_landed` tells of each as it comes, `promote` makes them urgent."""
        transfer = self._open(order)
        request = self._requests.of(order.req_context)
        self.loading += len(transfer.tasks)
        lane = Lane.LOAD if is_urgent else Lane.PREFETCH
        self._attachment.workers.submit(
            [
                (number, Task(lane, request.block_key(key), row))
                for (number, key), row in zip(transfer.tasks.items(), order.chunk_ids.tolist(), strict=True)
            ]
        )

    def promote(self, keys: Collection[OffloadKey]) -> None:
        """Make chunks that are being loaded urgent: a request that was scheduled waits for them."""
        self._attachment.workers.promote(self._loads_of(keys))

    def give_up(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Read chunks no more that no I/O worker has begun with, and return them; `take_landed` tells of each."""
        tasks = self._loads_of(keys)
        return [tasks[number] for number in self._attachment.workers.cancel(tasks, Ending.UNNEEDED)]

    def store(self, order: TransferJob, *, refusal: str | None, is_retry: bool = False) -> None:
        """Write chunks to the volume soon, see `catch_up`.

        Args:
            order: vLLM's.
            refusal: Why nothing is written at present; None if chunks are.
            is_retry: Whether `peek_deferred` named the chunks, and nothing was computed.
        """
        transfer = self._open(order)
        transfer.is_retry = is_retry
        request = self._requests.of(order.req_context)
        self.storing += len(transfer.tasks)
        if not is_retry:
            refusal = request.refusal or refusal
        for (number, key), row in zip(list(transfer.tasks.items()), order.chunk_ids.tolist(), strict=True):
            block = self._deferred.get(key) or _Deferred(request.block_key(key), request.lineage(key), time.monotonic())
            transfer.blocks[key] = block
            if not (is_retry or self._reuse.is_due(key)):
                if refusal in _NEVER_AGAIN:
                    self._unreused.pop(key, None)
                else:
                    keep_last(self._unreused, key, block, most=MOST_DEFERRED)
                self._end(Done(number, Refused(refusal or metrics.UNREUSED), 0.0))
                continue
            # Others behind it are tried before it is again: a tenant over its quota holds up no other.
            keep_last(self._deferred, key, block, most=MOST_DEFERRED)
            if refusal is None:
                since = min(block.since, self._attachment.looked_at)
                self._ordered.append((number, Task(Lane.STORE, block.name, row, block.lineage, since)))
            else:
                self._end(Done(number, Refused(refusal), 0.0))
        # A few may have been written by the next step, which tries deferred chunks only while nothing is stored.
        if 0 < len(self._ordered) <= LEAST_CHUNKS:
            self._begin(LEAST_CHUNKS)

    def take(self, done: Iterable[Done]) -> None:
        """Take in the ends of chunks: of loads at once, of stores with `catch_up`."""
        for each in done:
            if self._tasks[each.task].order.is_promotion:
                self._end(each)
            else:
                self._written.append(each)

    def catch_up(self, chunks: int) -> None:
        """Take in how so many chunks were written, and have I/O workers write as many that wait."""
        for _ in range(min(chunks, len(self._written))):
            self._end(self._written.popleft())
        if self._ordered:
            self._begin(chunks)

    def note_request(self, keys: Collection[OffloadKey]) -> None:
        """Count a request that asks for chunks; those that enough have asked for by now are written soon."""
        self._sample.note_request(keys)
        for key in self._reuse.note_request(keys):
            if (block := self._unreused.pop(key, None)) is not None:
                keep_last(self._deferred, key, block, most=MOST_DEFERRED)

    def peek_deferred(self, most: int) -> list[OffloadKey]:
        """Return chunks that were not written and that no transfer is writing; the oldest first."""
        if not self._deferred or self.storing or time.monotonic() < self._retry_at:
            return []
        return list(islice(self._deferred, most))

    def forget_deferred(self, keys: Iterable[OffloadKey]) -> None:
        """Drop chunks that the CPU tier no longer has."""
        for key in keys:
            self._deferred.pop(key, None)

    def take_landed(self) -> Sequence[Landed]:
        """Return the chunks of loads that ended since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def take_finished(self) -> Sequence[JobResult]:
        """Return the transfers that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_stored(self) -> list[OffloadKey]:
        """Return the chunks that came to lie on the volume since the last call."""
        stored, self._stored = self._stored, []
        return stored

    def drain(self) -> None:
        """If the engine was told to end, write what can be written before it does, and then nothing more."""
        drain = self._drain
        if drain.announce(self.storing):
            # Deferred chunks are tried again at once: there is no later.
            self._retry_at = 0.0
        if not drain.is_over:
            return
        if self.storing:
            self._cause = metrics.SHUTDOWN
            self._cancel([number for number, each in self._tasks.items() if not each.order.is_promotion])
        else:
            drain.tell()

    def withdraw(self, cause: str) -> None:
        """Cancel all tasks: each still ends, once no I/O worker touches its row."""
        self._cause = cause
        self._cancel(list(self._tasks))

    def _begin(self, chunks: int) -> None:
        begun = [self._ordered.popleft() for _ in range(min(chunks, len(self._ordered)))]
        self._attachment.workers.submit(begun)

    def _cancel(self, tasks: Iterable[int]) -> None:
        """Give tasks up that workers have, and all that wait for workers."""
        self._written.extend(Done(number, Ending.CANCELLED) for number, _ in self._ordered)
        self._ordered.clear()
        self._attachment.workers.cancel(tasks)

    def _loads_of(self, keys: Collection[OffloadKey]) -> dict[int, OffloadKey]:
        wanted = frozenset(keys)
        loads = [transfer for transfer in self._transfers.values() if transfer.order.is_promotion]
        return {number: key for each in loads for number, key in each.tasks.items() if key in wanted}

    def _open(self, order: TransferJob) -> _Transfer:
        transfer = self._transfers[order.job_id] = _Transfer(order, time.monotonic())
        if not order.is_promotion:
            self._stores_of[order.req_context.req_id] += 1
        for key, number in zip(order.keys, self._numbers, strict=False):
            transfer.tasks[number] = key
            self._tasks[number] = transfer
        if not transfer.tasks:
            self._close(transfer)
        return transfer

    def _end(self, done: Done) -> None:
        """Count how a chunk ended, and its transfer with the last one."""
        transfer = self._tasks.pop(done.task)
        key = transfer.tasks.pop(done.task)
        if transfer.order.is_promotion:
            self._end_load(transfer, key, done)
        else:
            self._end_store(transfer, key, done)
        if not transfer.tasks:
            self._close(transfer)

    def _end_load(self, transfer: _Transfer, key: OffloadKey, done: Done) -> None:
        outcome = done.outcome
        self.loading -= 1
        if outcome is Ending.UNNEEDED:
            transfer.unneeded.add(key)
            self._landed.append(Landed(key, outcome.value, done))
            return
        self._stats.count(metrics.READ_SECONDS, done.seconds)
        name = self._requests.of(transfer.order.req_context).block_key(key)
        self._remember_load(name, outcome)
        cause = None if isinstance(outcome, Hit) else self._cause_of(done)
        if isinstance(outcome, Hit):
            transfer.done.append(key)
            self._stats.count(metrics.READ_BLOCKS)
            self._stats.count(metrics.READ_BYTES, outcome.bytes_read)
            self._stats.count(metrics.LOADED_BLOCK_BYTES, self._row_bytes)
        else:
            self._stats.count(metrics.MISSES, cause=cause)
        self._landed.append(Landed(key, cause, done))

    def _remember_load(self, name: BlockKey, outcome: Answer | Refused | Ending) -> None:
        memory = self._attachment.memory
        if isinstance(outcome, Hit):
            memory.add(name)
        elif isinstance(outcome, Miss):
            memory.discard(name)
        elif outcome in {Fault.IO, Ending.LATE}:
            # The volume failed, not the file.
            memory.set_aside(name)
        elif isinstance(outcome, Fault):
            memory.set_aside(name, is_damaged=True)
            if outcome.is_damage:
                self._attachment.tell_janitor(Op.GONE, name, 0)

    def _end_store(self, transfer: _Transfer, key: OffloadKey, done: Done) -> None:
        outcome = done.outcome
        self.storing -= 1
        self._stats.count(metrics.WRITE_SECONDS, done.seconds)
        if isinstance(outcome, Stored | Present):
            transfer.done.append(key)
            self._stored.append(key)
            self._deferred.pop(key, None)
            self._drain.note(key, is_written=True)
            block = transfer.blocks[key]
            self._attachment.memory.add(block.name)
            if isinstance(outcome, Stored):
                self._stats.count(metrics.WRITTEN_BLOCKS)
                self._stats.count(metrics.WRITTEN_BYTES, outcome.bytes_written)
                self._stats.count(metrics.STORED_BLOCK_BYTES, self._row_bytes)
                # A compressed block takes less of the volume than its row.
                payload_bytes = outcome.bytes_written - HEADER_BYTES
                self._attachment.tell_janitor(Op.STORED, block.name, payload_bytes, block.lineage)
            else:
                self._stats.count(metrics.PRESENT_BLOCKS)
            return
        cause = self._cause_of(done)
        if cause not in _UNWANTED:
            self._drain.note(key, is_written=False)
        if cause in _NEVER_AGAIN:
            self._deferred.pop(key, None)
        if not transfer.is_retry:
            # Once for each chunk, however often it is tried.
            self._stats.count(metrics.SKIPPED_STORES, cause=cause)
            if self.on_skipped is not None:
                self.on_skipped(transfer.order.req_context.req_id, cause)
            self._retry_at = max(self._retry_at, time.monotonic() + RETRY_SECONDS)

    def _close(self, transfer: _Transfer) -> None:
        """Have a transfer reported to vLLM."""
        order = transfer.order
        del self._transfers[order.job_id]
        if not order.is_promotion:
            name = order.req_context.req_id
            self._stores_of[name] -= 1
            if not self._stores_of[name]:
                del self._stores_of[name]
        if transfer.unneeded:
            # Neither read nor failed; vLLM counts the bytes of all keys of a transfer.
            order.keys[:] = [key for key in order.keys if key not in transfer.unneeded]
        count, done = len(order.keys), transfer.done
        is_success = len(done) == count
        if transfer.is_retry:
            self._retry_seconds = RETRY_SECONDS if done else min(2 * self._retry_seconds, LONGEST_RETRY_SECONDS)
            self._retry_at = 0.0 if is_success else time.monotonic() + self._retry_seconds
        self._finished.append(
            JobResult(
                job_id=order.job_id,
                success=is_success,
                successful_keys=tuple(done) if order.is_promotion and done and not is_success else None,
                transfer_time=time.monotonic() - transfer.began,
                transfer_bytes=count * self._row_bytes,
            )
        )

    def _cause_of(self, done: Done) -> str:
        """Return why a chunk was rejected before any I/O, given up, or neither read nor written."""
        outcome = done.outcome
        if isinstance(outcome, Refused):
            return outcome.cause
        if isinstance(outcome, Fault | StoreFault):
            return str(outcome.value)
        if isinstance(outcome, Miss):
            return metrics.ABSENT
        return metrics.DEADLINE if outcome is Ending.LATE else self._cause
