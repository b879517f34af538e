# SPDX-License-Identifier: Apache-2.0
"""The shared volume as a tier of vLLM: translation between its calls and the block files, nothing else.

vLLM calls every method of `SharedVolumeTier` on the scheduler's thread, where a system call on a network mount could
stop the engine. So each method only reads and writes memory, and hands system calls to the I/O workers. Whatever goes
wrong, the engine computes instead of loading.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_connector.cascade.attach import read_config
from kvtier_connector.cascade.drain import Drain
from kvtier_connector.cascade.lookup import Lookups
from kvtier_connector.cascade.memory import Presence
from kvtier_connector.cascade.rates import Rates
from kvtier_connector.cascade.releases import ReleasedAttachment, attachment_class
from kvtier_connector.cascade.requests import TierRequest, TierRequests
from kvtier_connector.cascade.transfers import LEAST_CHUNKS, POLL_SECONDS, ReuseFilter, Transfers
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.io_workers.buffers import shape_of_rows
from kvtier_connector.io_workers.tasks import Lane
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.health import Breaker, Direction
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.lora import Adapters

logger = init_logger("vllm.kvtier.tier")

OPEN_WAIT_SECONDS = 10.0
"""How long the start of an engine waits for the volume at most; it goes on being opened in the background."""
STORE_QUEUE_SHARE = 0.5
"""Chunks that wait to be written hold their rows: while more than this share of the CPU tier waits, no more are."""
_FOUND = {Presence.PRESENT: LookupResult.HIT, Presence.ABSENT: LookupResult.MISS, Presence.UNKNOWN: LookupResult.RETRY}


class SharedVolumeTier(SecondaryTierManager):
    """Keeps chunks as block files on a volume that other engines share.

    Fields are the scheduler's alone, except the objects that say otherwise themselves.
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
        image: str = "",
        **unknown: Any,
    ) -> None:
        """Build the tier; `open` begins to use the volume, and the engine starts even if that cannot be used.

        Args:
            offloading_spec: vLLM's settings of the engine; a `KVTierSpec` also knows the file behind the rows.
            primary_kv_view: The rows of the CPU tier.
            tier_type: The name under which vLLM knows this tier.
            config_file: Path of the document that the operator wrote, see `contract`.
            enable_kv_events: Publish a BlockStored event for each chunk written, if the engine publishes events.
            locality: LOCAL or REMOTE, for requests that ask for tiers by locality.
            backpressure_detector: vLLM's, if configured; it sees how long stores take.
            generation: Digest of the blocks that this engine is started for, if the document may have moved on.
            image: Name of the engine's image, which tells releases of vLLM apart.
            unknown: Anything else in the tier's configuration, which is refused.

        Raises:
            ConfigInvalid: an option or the document cannot be used.
        """
        if unknown:
            raise ConfigInvalid(
                f"secondary_tiers: {tier_type} does not know {', '.join(sorted(unknown))}; "
                "it takes config_file, generation, image, enable_kv_events, locality and backpressure"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._spec = offloading_spec
        self.locality = None if locality is None else Locality(locality)
        config = read_config(config_file)
        self.row_count, self.row_bytes = shape_of_rows(primary_kv_view)
        self._most_storing = int(self.row_count * STORE_QUEUE_SHARE)
        self.stats = metrics.Stats()
        self._next_stats, self._was_idle = 0.0, False
        self.adapters = Adapters(offloading_spec.config.parallel.world_size, groups=len(offloading_spec.config.groups))
        self.requests = TierRequests(
            offloading_spec,
            tenant_source=config.tenant_from,
            locality=self.locality,
            adapters=self.adapters,
            stats=self.stats,
        )
        self._is_publishing = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self.waiting = 0
        """Requests that wait for room in the CPU tier."""
        self.tokens_under_way = 0
        """Tokens that the last step computes."""
        self._is_closed = False
        self._why_not_loading: str | None = metrics.INERT
        engine = getattr(offloading_spec, "engine_config", None)
        steps = {} if engine is None else {"most_step_tokens": engine.scheduler_config.max_num_batched_tokens}
        self.rates = Rates(now=time.monotonic, min_tokens=config.min_tokens, **steps)
        self.drain = Drain(0 if engine is None else engine.shutdown_timeout, self.stats, name=config.tier)
        self.drain.watch()
        self.attachment = attachment_class(config)(
            config,
            rows=primary_kv_view,
            rows_fd=getattr(offloading_spec, "region_fd", None),
            breaker=Breaker(),
            stats=self.stats,
            fs=self.fs,
            generation=generation,
            image=image,
        )
        self.lookups = Lookups(
            self.attachment,
            is_exact=len(self.requests.tokens) > 1,
            seconds_to_compute=lambda chunks: self.rates.prefill.seconds(chunks * self.requests.tokens[0]),
        )
        self.transfers = Transfers(
            self.attachment,
            requests=self.requests,
            reuse=ReuseFilter(config.min_reuse),
            stats=self.stats,
            drain=self.drain,
            row_bytes=self.row_bytes,
        )

    def open(self, declared: Sequence[Declared], wait_seconds: float = OPEN_WAIT_SECONDS) -> None:
        """Begin to use the volume, with what the workers declare of themselves, in the order of their ranks."""
        self.attachment.open(self._spec, declared, wait_seconds)

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metrics.definitions()

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return _FOUND[self.presence(key, self.requests.of(req_context))]

    def presence(self, key: OffloadKey, request: TierRequest) -> Presence:
        """Say whether the volume has a chunk, for this request; UNKNOWN while the volume has to be asked."""
        if key in request.missing:
            return Presence.ABSENT
        if cause := self._why_not_loading_now or request.read_refusal:
            return self._miss(request, cause)
        presence = self.lookups.presence(key, request)
        if presence is Presence.UNKNOWN and request.is_asking(key) and not self.must_wait(request):
            return Presence.ABSENT
        return self._miss(request, metrics.ABSENT) if presence is Presence.ABSENT else presence

    def must_wait(self, request: TierRequest) -> bool:
        """Say whether a request waits for a lookup, which it does for no longer than computing would take."""
        is_asking = bool(request.lookups)
        must_wait = self.lookups.must_wait(request)
        if is_asking and not must_wait:
            self._miss(request, metrics.LATE_PROBE)
        return must_wait

    def knower(self, request: TierRequest) -> Callable[[OffloadKey], bool]:
        """Return a function that says of a chunk whether the request may read it for sure."""
        if self._why_not_loading_now or request.read_refusal:
            return lambda _: False
        presence, missing = self.lookups.presence, request.missing
        return lambda key: key not in missing and presence(key, request) is Presence.PRESENT

    def ask_prefix(self, keys: Sequence[OffloadKey], request: TierRequest) -> None:
        """Ask the volume which chunks of a prefix it has, in the order of the prompt."""
        if not (request.is_pending or self._why_not_loading_now or request.read_refusal):
            self.lookups.ask_prefix(keys, request)

    @override
    def submit_load(self, job_metadata: TransferJob) -> None:
        self.transfers.load(job_metadata, is_urgent=True)

    @override
    def submit_store(self, job_metadata: TransferJob) -> None:
        if isinstance(self.attachment, ReleasedAttachment):
            self.attachment.offer(self.requests.of(job_metadata.req_context), job_metadata)
        self.transfers.store(job_metadata, refusal=self._why_not_storing())

    def retry(self, order: TransferJob) -> None:
        """Write chunks that `peek_deferred` named and that are still in the CPU tier."""
        self.transfers.store(order, refusal=self._why_not_storing(), is_retry=True)

    def peek_deferred(self, most: int) -> list[OffloadKey]:
        """Return chunks that were not written and could be now."""
        deferred = self.transfers.peek_deferred(most)
        return deferred if deferred and self._why_not_storing() is None else []

    @override
    def get_finished_jobs(self) -> Iterable[JobResult]:
        # vLLM calls this in each step, before any lookup of the step.
        attachment = self.attachment
        attachment.look_after()
        self._collect()
        is_stuck = attachment.workers.is_stuck(Lane.LOAD) or attachment.lookups.is_stuck
        self._why_not_loading = attachment.why_not(Direction.LOAD, is_stuck=is_stuck)
        self.transfers.drain()
        if attachment.refused_field and self.transfers:
            # The directory is of another model by now: these chunks do not belong there.
            self.transfers.withdraw(metrics.INERT)
        return self.transfers.take_finished()

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.lookups.send()
        # The GPU would wait for this step if more was done here than the step before takes.
        is_full = self.waiting or self.transfers.storing > self._most_storing
        is_urgent = is_full or self.drain.is_begun or not self.tokens_under_way
        chunks = sum(self.tokens_under_way // tokens for tokens in self.requests.tokens.values()) + LEAST_CHUNKS
        self.transfers.catch_up(sys.maxsize if is_urgent else chunks)
        self.requests.tell(self.attachment, self.row_bytes, is_storing=self.transfers.is_storing)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self.requests.of(req_context)
        request.note_used(self.attachment, self.row_bytes)
        request.forget_lookups()
        self.requests.end(req_context)

    @override
    def has_pending_work(self) -> bool:
        return bool(
            self.transfers
            or self.lookups.is_open
            or self.requests.is_telling
            or (self.drain.is_begun and self.peek_deferred(1))
        )

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        stored = self.transfers.take_stored()
        if not stored or not self._is_publishing:
            return ()
        return (OffloadingEvent(keys=stored, medium=self.medium, removed=False, locality=self.locality),)

    @override
    def drain_jobs(self) -> None:
        """Wait for every transfer, for as long as its deadline at most; then no worker touches the CPU tier."""
        while self.transfers:
            self._collect()
            self.transfers.catch_up(sys.maxsize)
            time.sleep(POLL_SECONDS)

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        now = time.monotonic()
        is_idle = not self.transfers and not self.waiting
        # At once, too, when the last transfer or wait has ended: vLLM may not ask again before the next request.
        if now < self._next_stats and not (is_idle and (self.stats.has_counted or not self._was_idle)):
            return None
        self._next_stats, self._was_idle = now + self.stats_seconds, is_idle
        self.attachment.observe()
        self.transfers.observe(now)
        self.stats.set(metrics.WAITING_REQUESTS, self.waiting)
        self.stats.set(metrics.VOLUME_RATE, self.rates.volume.value)
        self.stats.set(metrics.PREFILL_RATE, self.rates.prefill.value)
        self.stats.set(metrics.CHUNK_BYTES, self.row_bytes)
        self.stats.set(metrics.TOKEN_BYTES, sum(self.row_bytes / tokens for tokens in self.requests.tokens.values()))
        return self.stats.take()

    @override
    def shutdown(self) -> None:
        """Stop within seconds, whatever the volume does: a worker that hangs is left behind and touches nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.transfers.withdraw(metrics.SHUTDOWN)
        self.drain_jobs()
        self.drain.close()
        self.attachment.close()

    def _why_not_storing(self) -> str | None:
        if self.drain.is_over:
            return metrics.SHUTDOWN
        self.attachment.note_use()
        if cause := self.attachment.why_not(Direction.STORE, is_stuck=self.attachment.workers.is_stuck(Lane.STORE)):
            return cause
        return metrics.QUEUE_FULL if self.transfers.storing > self._most_storing else None

    @property
    def _why_not_loading_now(self) -> str | None:
        return self._why_not_loading if self.attachment.is_current else metrics.NEW_WEIGHTS

    def _miss(self, request: TierRequest, cause: str) -> Presence:
        """Count a chunk that ends the prefix of a request: once, since vLLM asks again while an earlier one comes."""
        if cause not in request.causes:
            request.causes.add(cause)
            self.stats.count(metrics.MISSES, cause=cause)
        return Presence.ABSENT

    def _collect(self) -> None:
        """Take in what the workers did."""
        self.transfers.take(self.attachment.workers.collect())
        for request in self.lookups.collect():
            self._miss(request, metrics.LATE_PROBE)
