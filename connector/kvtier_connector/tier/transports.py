# SPDX-License-Identifier: Apache-2.0
"""Two ways to carry out a job: on the engine's own threads, or in processes that its interpreter lock does not stop.

Both keep the same promises: each block is settled once, with an outcome that the breaker and the store have heard of,
and after `abandon` returned 0 nothing touches the job's rows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from vllm.logger import init_logger

from kvtier_connector.contract import ConnectorConfig
from kvtier_connector.movers.dispatch import Dispatcher, DispatchSettings, Ended
from kvtier_connector.movers.region import find_region
from kvtier_connector.movers.tasks import Task
from kvtier_connector.store.blockstore import Outcome, StoreOutcome
from kvtier_connector.store.breaker import Direction
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.tier import metrics
from kvtier_connector.tier.jobs import Job
from kvtier_connector.tier.transfers import Transfers
from kvtier_connector.tier.workers import Lane, WorkerPool

logger = init_logger("vllm.kvtier.transports")


class Transport(Protocol):
    """Carries out jobs. Every method is the scheduler's and never waits for the volume."""

    def load(self, job: Job) -> None:
        """Bring the blocks of a job into their rows."""

    def save(self, job: Job, indices: Sequence[int]) -> None:
        """Write these blocks of a job to the volume."""

    def collect(self) -> None:
        """Take in what has ended; call it in each step."""

    def abandon(self, job: Job, cause: str) -> int:
        """Give up on what is left of a job; as `Job.abandon`."""

    def is_stuck(self, lane: Lane) -> bool:
        """Say whether a new job of the lane would not start, because the volume holds up all that could do it."""

    def count_stuck(self) -> int:
        """Return how many processes the volume holds up."""

    def count_processes(self) -> int:
        """Return how many processes move blocks; 0 while threads do."""

    def close(self, timeout_seconds: float) -> bool:
        """Stop; False if something hangs and is left behind. Abandon every job before."""


class ThreadTransport:
    """Carries out jobs on the pool, which somebody else closes."""

    def __init__(self, pool: WorkerPool, transfers: Transfers) -> None:
        """Store the parts."""
        self._pool = pool
        self._transfers = transfers

    def load(self, job: Job, indices: Sequence[int] | None = None) -> None:
        """Queue a task for each block, or for some."""
        wanted = range(len(job.blocks)) if indices is None else indices
        self._pool.submit(Lane.LOAD, [functools.partial(self._transfers.load, job, index) for index in wanted])

    def save(self, job: Job, indices: Sequence[int]) -> None:
        """Queue a task for each of these blocks."""
        self._pool.submit(Lane.STORE, [functools.partial(self._transfers.save, job, index) for index in indices])

    def collect(self) -> None:
        """Do nothing: the threads settle what they did."""

    def abandon(self, job: Job, cause: str) -> int:
        """Give up on what is left of a job."""
        return job.abandon(cause)

    def is_stuck(self, lane: Lane) -> bool:
        """Ask the pool."""
        return self._pool.is_stuck(lane)

    def count_stuck(self) -> int:
        """Return 0: the pool counts its own."""
        return 0

    def count_processes(self) -> int:
        """Return 0."""
        return 0

    def close(self, timeout_seconds: float) -> bool:  # noqa: ARG002 - the protocol's
        """Do nothing: the pool is closed by whoever made it."""
        return True


@dataclass(slots=True)
class _Open:
    """A job that movers work on, and its blocks that are not settled."""

    job: Job
    indices: set[int]


class ProcessTransport:
    """Carries out jobs in movers; where they cannot live, on the threads. Scheduler's thread only."""

    def __init__(self, dispatcher: Dispatcher, threads: ThreadTransport, transfers: Transfers, row_bytes: int) -> None:
        """Store the parts; the dispatcher was started."""
        self._dispatcher = dispatcher
        self._threads = threads
        self._store = transfers.store
        self._breaker = transfers.breaker
        self._row_bytes = row_bytes
        self._open: dict[int, _Open] = {}
        self._returning: set[int] = set()
        """Jobs that are being taken back from movers that were given up."""

    def load(self, job: Job) -> None:
        """Send each block that the breaker lets through."""
        if not self._dispatcher.is_usable:
            self._threads.load(job)
            return
        tasks = []
        for index, block in enumerate(job.blocks):
            if self._breaker.admit(Direction.LOAD):
                tasks.append((index, Task(is_load=True, key=block.name, slot=block.slot)))
            else:
                job.refuse(index, metrics.BREAKER)
        self._send(job, tasks)

    def save(self, job: Job, indices: Sequence[int]) -> None:
        """Send each block that the breaker lets through, has room and is not known to be on the volume."""
        if not self._dispatcher.is_usable:
            self._threads.save(job, indices)
            return
        keyring = self._store.blocks.keyring
        active_key = "" if keyring is None else keyring.active_name
        tasks = []
        for index in indices:
            block = job.blocks[index]
            if not self._breaker.admit(Direction.STORE):
                job.refuse(index, metrics.BREAKER)
                continue
            outcome = self._store.begin_put(block.name, self._row_bytes)
            if outcome is None:
                tasks.append(
                    (
                        index,
                        Task(
                            is_load=False, key=block.name, slot=block.slot, lineage=block.lineage, active_key=active_key
                        ),
                    )
                )
            else:
                self._breaker.record_store(outcome)
                job.settle(index, outcome, seconds=0.0)
        self._send(job, tasks)

    def collect(self) -> None:
        """Settle what the movers did."""
        for ended in self._dispatcher.collect():
            opened = self._open[ended.owner]
            opened.indices.discard(ended.number)
            if not opened.indices:
                del self._open[ended.owner]
            self._settle(opened.job, ended)
        if not self._dispatcher.is_usable:
            self._returning.update(self._open)
        if self._returning:
            self._fall_back()

    def abandon(self, job: Job, cause: str) -> int:
        """Take the job's blocks back from the movers, then give up on them."""
        opened = self._open.get(job.job_id)
        if opened is None:
            return job.abandon(cause)
        for index in self._dispatcher.begun(job.job_id):
            job.is_open(index)
        if not self._dispatcher.withdraw(job.job_id):
            return len(opened.indices)
        self._forget(opened)
        return job.abandon(cause)

    def is_stuck(self, lane: Lane) -> bool:
        """Ask whoever carries out jobs now."""
        return self._dispatcher.is_stuck() if self._dispatcher.is_usable else self._threads.is_stuck(lane)

    def count_stuck(self) -> int:
        """Return how many movers hang."""
        return self._dispatcher.count_stuck()

    def count_processes(self) -> int:
        """Return how many movers there are to use."""
        return self._dispatcher.count_movers()

    def close(self, timeout_seconds: float) -> bool:
        """End the movers."""
        return self._dispatcher.close(timeout_seconds)

    def _send(self, job: Job, tasks: list[tuple[int, Task]]) -> None:
        if tasks:
            job.start()
            self._open[job.job_id] = _Open(job, {index for index, _ in tasks})
            self._dispatcher.submit(job.job_id, tasks)

    def _settle(self, job: Job, ended: Ended) -> None:
        block = job.blocks[ended.number]
        is_telling = ended.is_of_volume
        if job.is_load:
            loaded = cast("Outcome", ended.outcome)
            self._store.record_get(block.name, loaded, seconds=ended.seconds)
            if is_telling:
                self._breaker.record_load(loaded)
        else:
            stored = cast("StoreOutcome", ended.outcome)
            self._store.end_put(block.name, self._row_bytes, stored, seconds=ended.seconds, lineage=block.lineage)
            if is_telling:
                self._breaker.record_store(stored)
        if not is_telling:
            self._breaker.record_nothing(Direction.LOAD if job.is_load else Direction.STORE)
        job.settle(ended.number, ended.outcome, seconds=ended.seconds)

    def _forget(self, opened: _Open) -> None:
        """Undo what was noted when the blocks were sent."""
        del self._open[opened.job.job_id]
        for index in opened.indices:
            self._breaker.record_nothing(Direction.LOAD if opened.job.is_load else Direction.STORE)
            if not opened.job.is_load:
                self._store.cancel_put(opened.job.blocks[index].name, self._row_bytes)

    def _fall_back(self) -> None:
        """Have the threads do what the movers could not; a job that is begun upon is asked for again until it is free.

        The movers may be tried again meanwhile, and then get new jobs only.
        """
        self._returning.intersection_update(self._open)
        for job_id in list(self._returning):
            opened = self._open[job_id]
            if self._dispatcher.withdraw(job_id):
                self._forget(opened)
                self._returning.discard(job_id)
                carry_out = self._threads.load if opened.job.is_load else self._threads.save
                carry_out(opened.job, sorted(opened.indices))


def make_transport(
    config: ConnectorConfig, rows: memoryview, transfers: Transfers, pool: WorkerPool, fs: FileSystem
) -> Transport:
    """Return processes if the settings and this host allow them, threads otherwise."""
    threads = ThreadTransport(pool, transfers)
    processes = config.io_processes
    if processes is None:
        processes = min(config.io_threads, len(os.sched_getaffinity(0)))
    # A process of its own knows the real system calls only.
    if not processes or fs is not LOCAL:
        return threads
    row_bytes = transfers.slots.row_bytes
    try:
        dispatcher = _start_dispatcher(config, rows, processes, row_bytes)
    except OSError as error:
        # Whatever the host has run out of, an engine that serves more slowly is better than none.
        logger.warning(
            "Processes that move blocks cannot be started (%s): threads do it as long as this engine lives; raise the "
            "container's limits of open files and of processes",
            error,
        )
        return threads
    if dispatcher is None:
        logger.warning("The CPU tier is no shared memory that another process can map: threads move the blocks")
        return threads
    return ProcessTransport(dispatcher, threads, transfers, row_bytes)


def _start_dispatcher(config: ConnectorConfig, rows: memoryview, processes: int, row_bytes: int) -> Dispatcher | None:
    """Start the movers; None if they could not map the rows. Raises OSError where the host has no room for them."""
    region = find_region(rows.cast("B"))
    if region is None:
        return None
    try:
        dispatcher = Dispatcher(
            DispatchSettings(
                movers=processes,
                region=region,
                row_bytes=row_bytes,
                root=config.root,
                direct=config.direct_io,
                keys_dir=config.keys_dir,
                stuck_seconds=config.load_deadline_seconds,
            )
        )
    except OSError:
        os.close(region.fd)
        raise
    dispatcher.start()
    return dispatcher
