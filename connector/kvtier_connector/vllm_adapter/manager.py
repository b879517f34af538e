# SPDX-License-Identifier: Apache-2.0
"""Lookups and loads over the CPU tier and the shared volume together.

A chunk that the volume is known to have counts as found at once. When vLLM orders a load, each such chunk gets a row of
the CPU tier and is read into it. The load knows chunk by chunk which rows are ready, so the worker copies the first
ones to the GPU while the next are being read. A chunk that is being read for one request serves others, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.manager import JobMetadata, TieringOffloadingManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_connector.cascade.fetch import NO_ROW, Fetches, Load
from kvtier_connector.cascade.memory import Presence
from kvtier_connector.cascade.rates import Way
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.cascade.split import Split, Splits
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.cpu_tier import CpuTier
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier

RETRIES = 64
"""Deferred chunks that are tried again in one step, while nothing is loaded."""
URGENT_AHEAD = 256
"""While fewer chunks are being read, those that are read ahead of a request's turn go with the rest."""
AT_ONCE = 64
"""Chunks that are handed to the I/O workers together."""
_VOLUME = 0
"""Number of our tier among vLLM's secondary ones: it is the only one."""


class KVTierManager(TieringOffloadingManager):
    """vLLM's tiering with one tier below the CPU's; loads begin before all has landed. Scheduler's thread only."""

    def __init__(self, primary_tier: CpuTier, tier: SharedVolumeTier) -> None:
        """Put the tier below the CPU's."""
        super().__init__(primary_tier=primary_tier, secondary_tiers=[tier])
        self.tier = tier
        self._chunks = primary_tier.find
        self.fetches = Fetches(primary_tier, self.request, self._read, tier.transfers.give_up)
        """Chunks on their way into the CPU tier."""
        self._loads: dict[str, Load] = {}
        self.copying = 0
        """Chunks that were handed to the worker; `complete_load` tells that they are on the GPU."""
        self._retry_context = ReqContext(req_id="kvtier-retry")
        self.splits = Splits(tier.rates, self._order_backwards)
        """The hits whose heads are computed while they are read."""
        self.is_gpu_empty: Callable[[], bool] = lambda: True
        """Whether the GPU holds no block of any request, and none to share."""
        self.spoilt: set[OffloadKey] = set()
        """Chunks under way to the CPU tier whose blocks may hold something else by now."""
        self.count_work: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        """How many seconds the engine computes before a request that is asked for now, and how many it answers."""

    def request(self, context: ReqContext) -> TierRequest:
        """Return what the tier keeps of a request."""
        return self.tier.requests.of(context)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> LookupResult:
        """Say whether a chunk can be loaded; one that only the volume has is a HIT, too.

        HIT_PENDING is a chunk that the GPU is just writing into the CPU tier, RETRY one that the volume is asked for.
        """
        self._maybe_process_finished_jobs()
        request = self.request(req_context)
        found = self._find(key, request)
        if found is LookupResult.RETRY and not request.is_pending:
            self.tier.lookups.ask(key, request)
        return found

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> tuple[int, OffloadKey | None]:
        """Find how many chunks from the first on can be loaded; ask the volume for those that are unknown.

        Returns:
            How many, and the first of them whose presence is unknown; ask again when `is_known`.
        """
        self._maybe_process_finished_jobs()
        request = self.request(req_context)
        count = 0
        unknown: OffloadKey | None = None
        # Of nearly every chunk of a long prompt it is plain where it is, and a step waits while that is found out.
        is_early = request.is_pending or request.is_mixed or not self.tier.attachment.is_current
        is_plain = not (is_early or (request.way and not request.way.reads))
        fetched, chunks, is_on_volume = self.fetches.under_way, self._chunks, self.tier.knower(request)
        for number, key in enumerate(keys):
            if is_plain:
                chunk = None if key in fetched else chunks(key)
                if chunk is not None and chunk.is_ready:
                    count += 1
                    continue
                if chunk is None and (key not in request.missing if key in fetched else is_on_volume(key)):
                    request.on_volume.add(key)
                    count += 1
                    continue
            found = self._find(key, request)
            if found is LookupResult.MISS:
                break
            if found is not LookupResult.HIT and unknown is None:
                unknown = key
            if found is LookupResult.RETRY:
                self.tier.ask_prefix(keys[number:], request)
                break
            count += 1
        return count, unknown

    def is_known(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Say whether it is known by now whether a request can load a chunk."""
        request = self.request(req_context)
        if request.is_pending or (request.is_asking(key) and self.tier.must_wait(request)):
            return False
        chunk = self._chunks(key)
        return chunk is None or chunk.is_ready or key in self.fetches.under_way

    def decide(self, req_context: ReqContext, hit: Sequence[OffloadKey], *, may_split: bool = False) -> Way:
        """Decide, once until it is ordered, how a request gets the chunks that it found; without reading, look again.

        Args:
            req_context: The request.
            hit: The chunks.
            may_split: Whether the hit may be split, if its first chunk lies on the volume alone.
        """
        request = self.request(req_context)
        on_volume = [key for key in hit if key in request.on_volume]
        if not on_volume:
            if request.way is Way.SPLIT:
                # It waited until another request had loaded them.
                request.way = None
            return Way.LOAD
        if request.way is None:
            request.way = self._choose_way(on_volume, req_context, may_split=may_split and hit[0] in request.on_volume)
            self.tier.stats.count(metrics.VERDICTS, cause=request.way.value)
            if not request.way.reads:
                cause = metrics.SHORT if request.way is Way.SHORT else metrics.SLOWER
                self.tier.stats.count(metrics.MISSES, len(on_volume), cause=cause)
                self.fetches.end_lease(req_context)
        return request.way

    def _choose_way(self, on_volume: Sequence[OffloadKey], req_context: ReqContext, *, may_split: bool) -> Way:
        size = self.tier.requests.tokens
        # In one group they stand in the order of the prompt.
        outer = on_volume if len(size) > 1 else (on_volume[0], on_volume[-1])
        ends = [end for key in outer if (end := req_context.get_offload_key_position(key)) is not None]
        tokens = max(ends) - min(ends) + size[0] if ends else len(on_volume) * size[0]
        under_way = sum(key in self.fetches.under_way for key in on_volume)
        queued = (self.tier.transfers.loading + self.fetches.waiting - under_way) * size[0]
        heads, tails = self.splits.work
        backlog, answering = self.count_work()
        return self.tier.rates.choose(
            tokens,
            unread=len(on_volume) * size[0],
            begin=min(ends) - size[0] if ends else 0,
            queued=max(0, queued) + tails,
            backlog=backlog + heads,
            answering=answering,
            may_split=may_split,
        )

    def are_ready(self, keys: Iterable[OffloadKey]) -> bool:
        """Say whether all of these chunks lie in the CPU tier."""
        return all((chunk := self._chunks(key)) is not None and chunk.is_ready for key in keys)

    def read_ahead(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, may_split: bool = False) -> None:
        """Fetch a prefix that is loaded whole, for a request whose turn has not come; `decide` follows then."""
        fetched, chunks = self.fetches.under_way, self._chunks
        near = next((number for number, key in enumerate(keys) if not (key in fetched or chunks(key))), len(keys))
        count, unknown = self.match_prefix(keys[near:], req_context)
        # Of many requests that share a prefix the first one has it fetched. To find it costs each of the others as
        # much again, and they are asked when their turn comes.
        if unknown is not None or (near and not count):
            return
        shared, unknown = self.match_prefix(keys[:near], req_context)
        on_volume = [key for key in keys[: near + count] if key in self.request(req_context).on_volume]
        if shared < near or unknown is not None or not (on_volume and self.fetches.room):
            return
        if self._choose_way(on_volume, req_context, may_split=may_split and on_volume[0] == keys[0]) is not Way.LOAD:
            return
        # The I/O workers begin with the first ones while the others are still being noted.
        for first in range(0, len(on_volume), AT_ONCE):
            leased = self.fetches.lease(on_volume[first : first + AT_ONCE], req_context)
            self._note_source(leased, req_context)
            if len(leased) < AT_ONCE:
                break

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        request = self.request(req_context)
        if request.is_mixed or not (self.tier.attachment.is_current and request.hints.may_store):
            # Nor whatever vLLM would store of it apart from its chunks: states, and the end of a prompt.
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        return super().prepare_store(keys, req_context)

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        is_right = success and self.spoilt.isdisjoint(keys)
        self.spoilt.difference_update(keys)
        super().complete_store(keys, req_context, is_right)

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin what is in the CPU tier and have the rest fetched; `load_of` tells what is ready.

        Returns:
            The rows; `NO_ROW` for chunks that are not there yet.
        """
        load = self._loads[req_context.req_id] = Load(req_context, list(keys))
        ready: list[OffloadKey] = []
        fetched: list[OffloadKey] = []
        promoted: list[OffloadKey] = []
        for number, key in enumerate(load.keys):
            chunk = self._chunks(key)
            if chunk is not None and chunk.is_ready:
                load.rows[number] = chunk.chunk_id
                ready.append(key)
                continue
            fetched.append(key)
            if self.fetches.ask(key, load, number):
                promoted.append(key)
        if ready:
            self.primary_tier.prepare_load(ready, req_context)
        self._note_source(fetched, req_context)
        self.fetches.end_lease(req_context)
        load.began_at = self.tier.rates.now()
        self.request(req_context).way = None
        if promoted:
            self.tier.transfers.promote(promoted)
        self._serve()
        return CPULoadStoreSpec(load.rows)

    def give_up_late(self, load: Load) -> None:
        """Do without the rest of a load from a volume that hangs, or that became slower than computing."""
        rates, size = self.tier.rates, self.tier.requests.tokens[0]
        left, tokens = load.rows.count(NO_ROW) - len(load.failed), len(load.keys) * size
        end = load.context.get_offload_key_position(load.keys[-1]) or tokens
        tokens = min(tokens, end)
        # Of a load of several groups, vLLM computes everything if a part is missing.
        rest = left * size if len(self.tier.requests.tokens) == 1 else tokens
        computing = rates.prefill.seconds(rest, end - rest)
        is_late = rates.now() - load.began_at > rates.prefill.seconds(tokens, end - tokens)
        is_slower = is_late and rates.volume.seconds(left * size) > computing
        if not left or not (rates.is_hanging or is_slower or rates.is_stalled(computing)):
            return
        missing = self.request(load.context).missing
        for number, key in enumerate(load.keys):
            if load.rows[number] == NO_ROW and number not in load.failed:
                self.fetches.leave(key, load)
                load.failed.add(number)
                missing[key] = metrics.SLOWER

    @property
    def _ordered(self) -> int:
        """Chunks that are read for any request, or wait for a row."""
        return self.tier.transfers.loading + self.fetches.waiting

    def _order_backwards(self, split: Split) -> None:
        """Order the next chunks of a split hit, from its end on, as far as there is room; note which have come."""
        request, under_way, keys = self.request(split.context), self.fetches.under_way, split.keys
        window = self.splits.window_chunks(split, self._ordered)
        if window > split.ordered - split.ready:
            split.meeting = self.splits.expect_meeting(split, self._ordered)
        last = len(keys) - split.ordered
        # Chunks that the head is about to compute are not worth reading.
        overtaken = -(-(max(split.meeting, split.computed) - split.begin) // split.chunk_tokens)
        first = max(last - (window - (split.ordered - split.ready)), overtaken, 0)
        if first < last and not request.missing:
            batch = keys[first:last][::-1]
            wanted = [key for key in batch if key not in under_way and key not in request.leased]
            leased = self.fetches.lease(wanted, split.context)
            split.ordered += len(batch) if len(leased) == len(wanted) else batch.index(wanted[len(leased)])
            self._note_source(leased, split.context)
        while split.ready < split.ordered:
            key = keys[-1 - split.ready]
            chunk = self._chunks(key)
            if chunk is None and key not in under_way:
                # It was read for another request, which has given it up, or its row was needed.
                split.ordered = split.ready
            if chunk is None or not chunk.is_ready or key in under_way:
                break
            split.ready += 1

    def take_tail(self, split: Split) -> tuple[set[OffloadKey], list[int]]:
        """Return the chunks of a split that workers copy to the GPU next, and their rows in the order of the prompt.

        They stay in their rows until `complete_load`.
        """
        end, leased = len(split.keys) - split.handed, self.request(split.context).leased
        keys = split.keys[end - split.uncopied : end]
        rows = [chunk.chunk_id for key in keys if (chunk := self._chunks(key)) is not None and chunk.is_ready]
        if len(rows) < len(keys):
            # A load needed the rows of some. They are ordered anew.
            split.ready = split.ordered = split.handed
            return set(), []
        self.primary_tier.prepare_read([key for key in keys if key not in leased], split.context)
        leased.difference_update(keys)
        split.handed += len(keys)
        return set(keys), rows

    def load_of(self, name: str) -> Load:
        """Return the load of a request, from `prepare_load` to `release_load`."""
        return self._loads[name]

    def release_load(self, name: str) -> None:
        """Forget the load of a request: nothing more of it goes to the GPU. Handed-over chunks stay pinned."""
        load = self._loads.pop(name)
        handed = load.handed
        self.count_saved(load.context, (load.keys[number] for number in handed))
        unpinned = []
        for number, key in enumerate(load.keys):
            if load.rows[number] == NO_ROW:
                self.fetches.leave(key, load)
            elif number not in handed:
                unpinned.append(key)
        if unpinned:
            self.primary_tier.complete_load(unpinned, load.context)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.copying -= len(keys)
        super().complete_load(keys, req_context)
        self._serve()

    def go_on(self) -> None:
        """Give rows away again."""
        self.fetches.is_held = False
        self._serve()

    def poll(self) -> None:
        """Take in what has landed since the step began."""
        self._process_finished_jobs()

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        super().on_schedule_end(context)
        self._serve()
        self._retry_stores()
        self.tier.waiting = self.fetches.count_waiting_requests()

    @override
    def on_request_finished(self, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> None:
        self.fetches.end_lease(req_context)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    @override
    def has_pending_work(self) -> bool:
        return self.fetches.waiting > 0 or super().has_pending_work()

    @override
    def reset_cache(self) -> None:
        """Forget everything in the CPU tier; every load was released before."""
        self.fetches.end_leases()
        super().reset_cache()
        self.fetches.clear()
        self.copying = 0

    @override
    def _process_finished_jobs(self, *args: Any, **kwargs: Any) -> None:
        super()._process_finished_jobs(*args, **kwargs)
        landed = self.tier.transfers.take_landed()
        reads = [(each.done.seconds, each.done.ended) for each in landed if each.cause is None]
        tokens = self.tier.requests.tokens[0] * len(reads)
        self.tier.rates.note_landed(tokens, reads=reads, is_reading=self.tier.transfers.loading > 0)
        if landed:
            self.fetches.take(landed)
            self._serve()

    @override
    def _complete_promotion(self, job_metadata: JobMetadata, completed_job: JobResult) -> None:
        """Do nothing: each chunk is taken in when it lands."""

    def _find(self, key: OffloadKey, request: TierRequest) -> LookupResult:
        if request.is_pending:
            return LookupResult.RETRY
        if request.is_mixed or not self.tier.attachment.is_current:
            # vLLM's key covers neither the contents of the adapter nor the weights, so the chunk may be of others.
            self.tier.presence(key, request)
            return LookupResult.MISS
        if key not in self.fetches.under_way:
            chunk = self._chunks(key)
            # One that was given up is on the volume: a load that asks for it waits for its row.
            if chunk is not None and key not in self.fetches.unread:
                return LookupResult.HIT if chunk.is_ready else LookupResult.HIT_PENDING
            presence = self.tier.presence(key, request)
            if presence is not Presence.PRESENT:
                return LookupResult.RETRY if presence is Presence.UNKNOWN else LookupResult.MISS
        elif key in request.missing:
            return LookupResult.MISS
        if request.way is not None and not request.way.reads:
            return LookupResult.MISS
        request.on_volume.add(key)
        return LookupResult.HIT

    def is_from_volume(self, name: str) -> bool:
        """Say whether chunks of a request were read for it."""
        return name in self._request_load_sources

    def _note_source(self, keys: Sequence[OffloadKey], context: ReqContext) -> None:
        if keys:
            self._request_load_sources.setdefault(context.req_id, {}).update(dict.fromkeys(keys, CacheHitSource.DISK))

    def _read(
        self, context: ReqContext, keys: Sequence[OffloadKey], rows: CPULoadStoreSpec, is_waited_for: bool
    ) -> bool:
        """Have the volume read chunks into their rows; return whether they are urgent.

        While little is read, chunks that are read ahead delay no request, so they are urgent from the start.
        """
        is_urgent = is_waited_for or self.tier.transfers.loading < URGENT_AHEAD
        order = TransferJob(
            job_id=self._next_job_id(),
            keys=list(keys),
            chunk_ids=np.asarray(rows.block_ids, dtype=np.int32),
            is_promotion=True,
            req_context=context,
        )
        self._register_job(order, _VOLUME)
        self.tier.rates.note_ordered()
        self.tier.transfers.load(order, is_urgent=is_urgent)
        return is_urgent

    def _serve(self) -> None:
        self.fetches.serve()
        # By these, rows become free by themselves.
        is_under_way = self._jobs or self.copying or self.primary_tier.is_storing
        is_under_way = is_under_way or any(load.has_piece for load in self._loads.values())
        if self.fetches.waiting and not self.fetches.is_held and not is_under_way:
            # Every row is pinned by those that wait like the first: it does without, and they go on.
            self._metrics.on_promotion_allocation_failure()
            self.tier.stats.count(metrics.MISSES, cause=metrics.BUDGET)
            self.fetches.give_up_first(metrics.BUDGET)

    def count_saved(self, context: ReqContext, keys: Iterable[OffloadKey]) -> None:
        """Count what those of these chunks that came from the volume would have taken to compute."""
        sources, prefill = self._request_load_sources.get(context.req_id) or {}, self.tier.rates.prefill
        if prefill.value and (chunks := sum(get_offload_group_idx(key) == 0 and key in sources for key in keys)):
            seconds = prefill.seconds(chunks * self.tier.requests.tokens[0])
            self.tier.stats.count_saved(self.request(context).tenant, seconds)

    def _retry_stores(self) -> None:
        """Write deferred chunks, as long as nothing is loaded and the CPU tier has them."""
        if self._loads or self.fetches.under_way:
            return
        deferred = self.tier.peek_deferred(RETRIES)
        if not deferred:
            return
        here, gone = [], []
        for key in deferred:
            chunk = self._chunks(key)
            if chunk is None:
                gone.append(key)
            elif chunk.is_ready:
                here.append(key)
        self.tier.transfers.forget_deferred(gone)
        if here:
            self.tier.retry(self.create_store_job(here, self._retry_context, _VOLUME))
