# SPDX-License-Identifier: Apache-2.0
"""Reads the state of the tier's parts into its gauges, each time vLLM asks. Scheduler thread only."""

from __future__ import annotations

import time
from collections.abc import Collection

from kvtier_connector.store.breaker import Breaker, Direction, State
from kvtier_connector.store.mode import Mode
from kvtier_connector.tier import metrics
from kvtier_connector.tier.gate import Gate
from kvtier_connector.tier.jobs import Job
from kvtier_connector.tier.transports import Transport
from kvtier_connector.tier.volume import Volume
from kvtier_connector.tier.workers import WorkerPool

_STATES = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
_MODES = {Mode.READ_WRITE: 0, Mode.READ_ONLY: 1, Mode.BYPASS: 2}


def observe(stats: metrics.Stats, volume: Volume, breaker: Breaker) -> None:
    """Set what says how the volume does."""
    stats.set(metrics.ACTIVE, int(volume.is_readable))
    if volume.refused_field:
        stats.set(metrics.REFUSED, 1, label=volume.refused_field)
    stats.set(metrics.KEY_MISSING, int(not volume.has_key))
    stats.set(metrics.LOAD_BREAKER, _STATES[breaker.view(Direction.LOAD).state])
    stats.set(metrics.STORE_BREAKER, _STATES[breaker.view(Direction.STORE).state])
    stats.set(metrics.MODE, _MODES[volume.mode])
    stats.set(metrics.KNOWN_BLOCKS, volume.store.known_blocks)
    if volume.is_counted:
        stats.set(metrics.USED_BYTES, volume.store.usage_bytes())


def observe_workers(stats: metrics.Stats, pool: WorkerPool, transport: Transport) -> None:
    """Set what says who moves blocks, and how many threads and processes the volume holds up."""
    stats.set(metrics.STUCK_THREADS, pool.count_stuck() + transport.count_stuck())
    stats.set(metrics.IO_PROCESSES, transport.count_processes())


def observe_jobs(
    stats: metrics.Stats, jobs: Collection[Job], *, storing: int, block_bytes: int, job_seconds: float
) -> None:
    """Set what says how much is under way: `storing` blocks, and jobs with so many seconds from begin to deadline."""
    loading = sum(len(job.blocks) for job in jobs if job.is_load)
    stats.set(metrics.QUEUED_LOAD_BYTES, loading * block_bytes)
    stats.set(metrics.QUEUED_STORE_BYTES, storing * block_bytes)
    stats.set(metrics.QUEUED_JOBS, len(jobs))
    begun = time.monotonic() + job_seconds
    stats.set(metrics.OLDEST_JOB_SECONDS, max(0.0, begun - min((job.deadline for job in jobs), default=begun)))


def observe_requests(stats: metrics.Stats, gate: Gate, *, waiting: int) -> None:
    """Set what says whether loading pays, and how many requests wait for room."""
    stats.set(metrics.WAITING_REQUESTS, waiting)
    stats.set(metrics.LOAD_PACE, gate.load_tokens_per_second)
    stats.set(metrics.COMPUTE_PACE, gate.compute_tokens_per_second)
    stats.set(metrics.BREAK_EVEN_TOKENS, gate.break_even_tokens)
