# SPDX-License-Identifier: Apache-2.0
"""Moves one block between the CPU tier and the volume, on a thread of the pool, and counts how blocks of a job ended.

The system reads into, and writes from, the thread's own buffer; the slot is copied while the job has claimed it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey

from kvtier_connector.store.blockstore import Hit, Present, Stored, StoreFault
from kvtier_connector.store.breaker import Breaker, Direction
from kvtier_connector.store.format import Fault
from kvtier_connector.store.shared import SharedStore
from kvtier_connector.tier import metrics
from kvtier_connector.tier.jobs import BlockOutcome, Job
from kvtier_connector.tier.slots import Slots
from kvtier_connector.tier.workers import Staging


class Transfers(NamedTuple):
    """What a transfer needs; any thread may call, and may be held up for as long as the volume hangs."""

    slots: Slots
    store: SharedStore
    breaker: Breaker

    def load(self, job: Job, index: int, staging: Staging) -> None:
        """Bring a block into its slot; what the slot holds counts only once the block is settled as a hit."""
        if not job.is_open(index):
            return
        if not self.breaker.admit(Direction.LOAD):
            job.refuse(index, metrics.BREAKER)
            return
        started = time.monotonic()
        block = job.blocks[index]

        def take(offset: int, piece: memoryview) -> bool:
            # The slot may be somebody else's by now.
            if not job.claim(index):
                return False
            try:
                self.slots.copy_in(block.slot, piece, offset)
            finally:
                job.release(index)
            return True

        outcome: BlockOutcome | None = Fault.IO
        try:
            outcome = found = self.store.stream(block.name, staging.array.data, take)
            if found is None:
                self.breaker.record_nothing(Direction.LOAD)
            else:
                self.breaker.record_load(found)
        finally:
            if outcome is not None:
                job.settle(index, outcome, seconds=time.monotonic() - started)

    def save(self, job: Job, index: int, staging: Staging) -> None:
        """Write a block from its slot to the volume."""
        if not job.is_open(index):
            return
        if not self.breaker.admit(Direction.STORE):
            job.refuse(index, metrics.BREAKER)
            return
        if not job.claim(index):
            self.breaker.record_nothing(Direction.STORE)
            return
        started = time.monotonic()
        block = job.blocks[index]
        outcome: BlockOutcome = StoreFault.IO
        try:
            self.slots.copy_out(block.slot, staging.array)
            job.release(index)
            outcome = stored = self.store.put(block.name, staging.array.data, block.lineage, is_scratch=True)
            self.breaker.record_store(stored)
        finally:
            job.settle(index, outcome, seconds=time.monotonic() - started)


def count_loaded(job: Job, stats: metrics.Stats) -> list[OffloadKey]:
    """Count how the blocks of a load ended, and return the keys of those that landed."""
    loaded = []
    for block, outcome in zip(job.blocks, job.outcomes, strict=True):
        if isinstance(outcome, Hit):
            loaded.append(block.key)
            stats.count(metrics.READ_BYTES, outcome.bytes_read)
        elif isinstance(outcome, Fault):
            stats.count(metrics.MISSES, cause=outcome.value)
        else:
            stats.count(metrics.MISSES, cause=job.cause if outcome is None else metrics.ABSENT)
    stats.count(metrics.READ_BLOCKS, len(loaded))
    stats.count(metrics.READ_SECONDS, job.busy_seconds)
    return loaded


def count_stored(job: Job, stats: metrics.Stats) -> list[OffloadKey]:
    """Count how the blocks of a store ended, and return the keys of those that are on the volume."""
    stored = []
    written = written_bytes = 0
    for block, outcome in zip(job.blocks, job.outcomes, strict=True):
        if isinstance(outcome, Stored):
            written += 1
            written_bytes += outcome.bytes_written
        elif not isinstance(outcome, Present):
            cause = outcome.value if isinstance(outcome, StoreFault) else job.cause
            stats.count(metrics.SHED_STORES, cause=cause)
            continue
        stored.append(block.key)
    stats.count(metrics.WRITTEN_BLOCKS, written)
    stats.count(metrics.WRITTEN_BYTES, written_bytes)
    stats.count(metrics.PRESENT_BLOCKS, len(stored) - written)
    stats.count(metrics.WRITE_SECONDS, job.busy_seconds)
    return stored
