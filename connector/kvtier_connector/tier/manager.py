# SPDX-License-Identifier: Apache-2.0
"""The disk tier as vLLM sees it: translation between its jobs and the block store, nothing else.

vLLM calls every method of `SharedVolumeTier` on the scheduler's thread, where a system call on a network mount could
stop the engine. So each method only reads and writes memory, and hands what blocks to the pool.

What happens to a block is an outcome and is counted; whatever goes wrong, the engine computes instead of loading.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.store.breaker import Breaker, Direction
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey
from kvtier_connector.tier import gauges, metrics
from kvtier_connector.tier.budget import Admission, PromotionBudget
from kvtier_connector.tier.chains import Chains
from kvtier_connector.tier.facts import engine_facts
from kvtier_connector.tier.gate import Choice, Gate
from kvtier_connector.tier.jobs import Block, Job, abandon_late
from kvtier_connector.tier.lookups import Lookups, Verdict
from kvtier_connector.tier.obstacles import why_not_loading, why_not_storing
from kvtier_connector.tier.offers import Offers, admit, is_new
from kvtier_connector.tier.settings import read_config
from kvtier_connector.tier.slots import Slots
from kvtier_connector.tier.transfers import Transfers, count_loaded, count_stored
from kvtier_connector.tier.transports import make_transport
from kvtier_connector.tier.volume import Volume
from kvtier_connector.tier.workers import Lane, WorkerPool, default_limits

logger = init_logger("vllm.kvtier.tier")

PROBE_DEADLINE_SECONDS = 2.0
"""A probe is one system call; a volume that needs longer for it is slower than computing."""
OPEN_WAIT_SECONDS = 10.0
"""How long the start of an engine waits for the volume at most; it goes on being opened in the background."""
CLOSE_WAIT_SECONDS = 5.0
COPY_POLL_SECONDS = 0.001
STORE_QUEUE_SHARE = 0.5
"""Blocks that wait to be written hold their slots. While more than this share of the CPU tier waits, more is not
written."""


class SharedVolumeTier(SecondaryTierManager):
    """Keeps chunks as block files on a volume that other engines share.

    Fields are the scheduler's alone, except `_completed`, which the pool's threads fill, and the objects that say
    otherwise themselves. Memory beyond vLLM's own: one chunk per I/O thread.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.DISK
    fs: ClassVar[FileSystem] = LOCAL
    """The system calls; tests derive a class with others."""
    stats_seconds: ClassVar[float] = 0.2
    """How often what changes without an event is reported, at most: vLLM asks in each step of a few milliseconds."""

    def __init__(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        config_file: str,
        enable_kv_events: bool = False,  # noqa: FBT002 - vLLM's signature
        locality: str | None = None,
        backpressure_detector: BackpressureDetector | None = None,
        generation: str = "",
        **unknown: Any,
    ) -> None:
        """Build the tier and start its threads; the engine starts even if the volume cannot be used.

        Args:
            offloading_spec: vLLM's settings of the engine.
            primary_kv_view: The rows of the CPU tier.
            tier_type: The name under which vLLM knows this tier.
            config_file: Path of the document that the operator wrote, see `contract`.
            enable_kv_events: Publish a BlockStored event for each block written, if the engine publishes events.
            locality: LOCAL or REMOTE, for requests that ask for tiers by locality.
            backpressure_detector: vLLM's, if configured; it sees how long stores take.
            generation: Digest of the blocks that this engine is started for, if the document may have moved on.
            unknown: Anything else in the tier's configuration, which is refused.

        Raises:
            ConfigInvalid: an option or the document cannot be used.
        """
        if unknown:
            raise ConfigInvalid(
                f"secondary_tiers: {tier_type} does not know {', '.join(sorted(unknown))}; "
                "it takes config_file, generation, enable_kv_events, locality and backpressure"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        config = read_config(config_file)
        self._deadline_seconds = config.load_deadline_seconds
        self._slots = Slots(primary_kv_view)
        self._stats = metrics.Stats()
        self._next_stats = 0.0
        self._budget = PromotionBudget(self._slots.count)
        self._chains = Chains(offloading_spec, config.tenant_from)
        self._gate = Gate(
            is_cost_aware=config.cost_aware,
            min_tokens=config.min_tokens,
            tokens_per_chunk=self._chains.tokens[0],
            is_prompt_only=offloading_spec.offload_prompt_only,
            on_verdict=lambda verdict: self._stats.count(metrics.VERDICTS, cause=verdict.value),
        )
        self._offers = Offers(config.min_reuse)
        self._jobs: dict[int, Job] = {}
        self._completed: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._finished: list[Job] = []
        self._orphans: set[int] = set()
        self._missed: dict[str, set[bytes]] = {}
        self._undecided: set[str] = set()
        self._is_publishing = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] = []
        self._is_loading_stuck = False
        self._why_not_loading: str | None = metrics.INERT
        self._is_storing_stuck = False
        self._is_closed = False
        revision = str(config.identity.get("model_revision", "main"))
        facts = engine_facts(offloading_spec, bytes_per_chunk=self._slots.row_bytes, revision=revision)
        self._volume = Volume(config, {**config.identity, **facts}, self.fs, generation=generation)
        probe_seconds = min(PROBE_DEADLINE_SECONDS, config.load_deadline_seconds)
        self._pool = WorkerPool(
            config.io_threads,
            default_limits(
                config.io_threads, probe_seconds=probe_seconds, transfer_seconds=config.load_deadline_seconds
            ),
            staging_bytes=self._slots.row_bytes,
        )
        self._breaker = Breaker()
        transfers = Transfers(self._slots, self._volume.store, self._breaker)
        self._transport = make_transport(config, primary_kv_view, transfers, self._pool, self.fs)
        self._queued_store_blocks = 0
        self._lookups = Lookups(self._volume.store.state, self._contains, self._pool, deadline_seconds=probe_seconds)
        self._pool.start()
        self._volume.start(OPEN_WAIT_SECONDS)

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # What is in the CPU tier already is offered again only if asked for, and would never count as used again.
        policy = OffloadPolicy.REQUEST_LEVEL if self._offers.is_gated else OffloadPolicy.CHUNK_LEVEL
        return RequestOffloadingContext(policy)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = req_context.req_id
        if cause := self._why_not_loading:
            return self._miss(key, request, cause)
        chain = self._chains.of(req_context)
        if chain.is_refused:
            return self._miss(key, request, metrics.NO_TENANT)
        verdict = self._lookups.ask(chain.name(key), request)
        if verdict is Verdict.WAITING:
            self._undecided.add(request)
            return LookupResult.RETRY
        if verdict is not Verdict.THERE:
            return self._miss(key, request, _CAUSES[verdict])
        if request in self._undecided:
            # Fetching it could use up the budget before the head of the prefix, which is worth more, is known.
            return LookupResult.RETRY
        is_certain = self._volume.store.is_complete
        choice = self._gate.ask(request, req_context.get_offload_key_position(key), is_certain=is_certain)
        if choice is Choice.WAIT:
            return LookupResult.RETRY
        if choice is not Choice.LOAD:
            return self._miss(key, request, choice.value)
        admission = self._budget.admit(key, request)
        if admission is Admission.COMPUTE:
            return self._miss(key, request, metrics.BUDGET)
        return LookupResult.HIT if admission is Admission.FETCH else LookupResult.RETRY

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        job = self._open_job(job_metadata, is_load=True)
        self._budget.charge((block.key for block in job.blocks), job.request)
        self._gate.begin_load(job.job_id, len(job.blocks))
        if self._is_loading_stuck:
            job.abandon(metrics.STUCK)
            return
        self._transport.load(job)

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        job = self._open_job(job_metadata, is_load=False)
        cause = self._why_not_storing(job_metadata.req_context)
        self._queued_store_blocks += len(job.blocks)
        ends = [job_metadata.req_context.get_offload_key_position(block.key) for block in job.blocks]
        self._gate.end_compute(job.request, ends, measures=is_new(job, self._offers, self._volume.store.state))
        wanted = admit(job, self._offers, self._volume.store.state)
        if cause is not None:
            job.abandon(cause)
            return
        self._transport.save(job, wanted)

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        # vLLM calls this once in each step, before any lookup of the step.
        self._lookups.collect()
        self._transport.collect()
        self._is_loading_stuck = self._transport.is_stuck(Lane.LOAD) or self._pool.is_stuck(Lane.PROBE)
        self._is_storing_stuck = self._transport.is_stuck(Lane.STORE)
        self._why_not_loading = why_not_loading(self._volume, self._breaker, is_stuck=self._is_loading_stuck)
        abandon_late(self._jobs.values(), metrics.DEADLINE, self._transport.abandon)
        if self._volume.refused_field:
            # The directory is somebody else's by now: what waits does not belong there.
            for job in self._jobs.values():
                self._transport.abandon(job, metrics.INERT)
        while not self._completed.empty():
            self._finished.append(self._completed.get_nowait())
        jobs, self._finished = self._finished, []
        return [self._close_job(job) for job in jobs]

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.send()
        self._gate.end_step(self._undecided)
        self._budget.end_step()
        self._undecided.clear()
        for request in context.new_req_ids:
            self._gate.begin_compute(request)
            self._budget.release(request)
        for request in context.preempted_req_ids:
            self._gate.interrupt(request)
            self._budget.preempt(request)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._chains.of(req_context).note_used(self._volume.store, self._slots.row_bytes)
        self._orphans.update(job.job_id for job in self._jobs.values() if job.request == req_context.req_id)
        self._lookups.forget(req_context.req_id)
        self._gate.forget(req_context.req_id)
        self._budget.release(req_context.req_id)
        self._missed.pop(req_context.req_id, None)

    @override
    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events, []
        return events

    @override
    def drain_jobs(self) -> None:
        """Wait for every job, for as long as its deadline at most; then no thread touches the primary tier."""
        while len(self._finished) < len(self._jobs):
            with contextlib.suppress(queue.Empty):
                self._finished.append(self._completed.get(timeout=COPY_POLL_SECONDS))
            self._transport.collect()
            abandon_late(self._jobs.values(), metrics.DEADLINE, self._transport.abandon)

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        now = time.monotonic()
        # At once, too, when the last transfer has ended: vLLM may not ask again before the next request.
        if now < self._next_stats and (self._jobs or not self._stats.has_counted):
            return None
        self._next_stats = now + self.stats_seconds
        gauges.observe(self._stats, self._volume, self._breaker)
        gauges.observe_workers(self._stats, self._pool, self._transport)
        gauges.observe_requests(self._stats, self._gate, waiting=self._budget.waiting)
        gauges.observe_jobs(
            self._stats,
            self._jobs.values(),
            storing=self._queued_store_blocks,
            block_bytes=self._slots.row_bytes,
            job_seconds=self._deadline_seconds,
        )
        return self._stats.take()

    @override
    def shutdown(self) -> None:
        """Stop within seconds, whatever the volume does: a thread that hangs is left behind and touches nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        while sum(self._transport.abandon(job, metrics.SHUTDOWN) for job in self._jobs.values()):
            time.sleep(COPY_POLL_SECONDS)
        self._volume.close(CLOSE_WAIT_SECONDS)
        are_closed = (self._pool.close(CLOSE_WAIT_SECONDS), self._transport.close(CLOSE_WAIT_SECONDS))
        if not all(are_closed):
            logger.warning("Some I/O threads or processes still wait for the volume and are left behind")
        self._slots.release()

    def _open_job(self, transfer: TransferJob, *, is_load: bool) -> Job:
        chain = self._chains.of(transfer.req_context)
        blocks = [
            Block(key, int(slot), chain.name(key), NO_LINEAGE if is_load else chain.lineage(key))
            for key, slot in zip(transfer.keys, transfer.chunk_ids, strict=True)
        ]
        job = Job(
            transfer.job_id,
            is_load=is_load,
            request=transfer.req_context.req_id,
            blocks=blocks,
            deadline=time.monotonic() + self._deadline_seconds,
            on_complete=self._completed.put,
        )
        self._jobs[job.job_id] = job
        if not blocks:
            self._completed.put(job)
        return job

    def _close_job(self, job: Job) -> JobResult:
        del self._jobs[job.job_id]
        is_orphan = job.job_id in self._orphans
        self._orphans.discard(job.job_id)
        done = count_loaded(job, self._stats) if job.is_load else count_stored(job, self._stats)
        if job.hung and job.cause == metrics.DEADLINE:
            self._breaker.record_timeout(Direction.LOAD if job.is_load else Direction.STORE)
        is_success = len(done) == len(job.blocks)
        if job.is_load:
            # A load that ran into its deadline says how slow the volume is, if anything came; a fault says nothing.
            landed = len(done) if is_success or job.cause == metrics.DEADLINE else 0
            self._gate.end_load(job.job_id, len(job.blocks), landed=landed)
            is_done = frozenset(done)
            if not is_orphan:
                self._lookups.add_failed([block.name for block in job.blocks if block.key not in is_done], job.request)
            for block in job.hung:
                self._volume.store.forget(block.name)
        else:
            self._queued_store_blocks -= len(job.blocks)
            if done and self._is_publishing:
                self._events.append(
                    OffloadingEvent(keys=done, medium=self.medium, removed=False, locality=self.locality)
                )
        return JobResult(
            job_id=job.job_id,
            success=is_success,
            successful_keys=tuple(done) if job.is_load and done and not is_success else None,
            transfer_time=job.elapsed_seconds,
            transfer_bytes=len(job.blocks) * self._slots.row_bytes,
        )

    def _miss(self, key: OffloadKey, request: str, cause: str | None) -> LookupResult:
        """Count a miss once: vLLM asks again in each step while an earlier block of the request is on its way."""
        missed = self._missed.setdefault(request, set())
        if cause is not None and key not in missed:
            missed.add(key)
            self._stats.count(metrics.MISSES, cause=cause)
            self._stats.count(metrics.REFUSED_PROMOTIONS, int(cause == metrics.BUDGET))
        return LookupResult.MISS

    def _why_not_storing(self, context: ReqContext) -> str | None:
        if self._chains.of(context).is_refused:
            return metrics.NO_TENANT
        if cause := why_not_storing(self._volume, self._breaker, is_stuck=self._is_storing_stuck):
            return cause
        is_full = self._queued_store_blocks > self._slots.count * STORE_QUEUE_SHARE
        return metrics.QUEUE_FULL if is_full else None

    # What follows runs on the pool.

    def _contains(self, name: BlockKey) -> bool:
        self._volume.store.probe((name,))
        return self._volume.store.state(name) is Presence.PRESENT


_CAUSES = {Verdict.ABSENT: metrics.ABSENT, Verdict.LATE: metrics.LATE_PROBE, Verdict.FAILED: None}
"""A failed load was counted with its own cause already."""
