# SPDX-License-Identifier: Apache-2.0
"""A scheduler for vLLM that splits hits of the volume: ``--scheduler-cls`` names `SplitScheduler`.

Chunks of the tail are copied to blocks of the GPU as they come, while the head is computed. When both meet, these
blocks enter the prefix cache, and the request is put back to waiting by vLLM's own preemption. It finds head and tail
in the same step, and goes on behind them. Heads get the tokens of a step that no other request wants.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.diffusion_scheduler import DiffusionAsyncScheduler, DiffusionScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier_connector.cascade.fetch import Piece
from kvtier_connector.cascade.rates import Rate
from kvtier_connector.cascade.split import Split, Splits
from kvtier_connector.vllm_adapter.scheduler import KVTierScheduler
from kvtier_connector.vllm_adapter.worker import KVTierMetadata


class AdmittingScheduler(KVTierScheduler):
    """The scheduler's side of the connector, which may have a request compute before its load is reported.

    A worker reports a load when it begins a later step, and the report arrives with that step's end. So under traffic a
    request waits several steps after its last piece was copied. Here it computes in the step that copies, if that takes
    little time. Otherwise it computes in the first step that is expected to begin after the copies. The workers wait.
    Only for models of one group of layers, and for requests without an adapter.
    """

    may_admit = False
    """Whether requests may compute before their loads are reported; `SyncSplitScheduler` says so."""
    most_wait_seconds = 0.008
    """A step waits so long for copies that begin with it."""
    least_store_seconds = 0.002
    """Stores are copied for so long in each step, which hardly a step of an answer is shorter than."""

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_replicated: bool = args[0].replicated_layout
        self._admitted: set[str] = set()
        """Requests that compute already, whose loads are not reported."""
        self._waited: dict[str, list[int] | None] = {}
        """Requests whose copies the next step waits for, see `KVTierMetadata.waited`."""
        self._at_once: dict[str, float] = {}
        """Requests that compute in the step that copies their chunks, with the seconds of that."""
        self._copies: dict[int, str] = {}
        """Unreported copies of admitted requests: vLLM wants no store of a request beside a load of it."""
        self.copying, self._chunk_tokens = self.manager.tier.rates.copying, self.manager.tier.requests.tokens[0]
        self._copied_at: dict[str, float] = {}
        """By request whose load was handed over whole, when its copies are expected to end."""
        self._copies_end = 0.0
        """When all copies are expected to end that were begun."""
        self._storing = Rate()
        """Bytes a second that a worker copies from the GPU to the CPU tier."""
        self._is_urgent = False

    @property
    def is_urgent(self) -> bool:
        """Whether the last step handed over the end of a load, which may compute in the next ones."""
        return self._is_urgent and self.may_admit

    def take_copied(self) -> list[str]:
        """Return requests whose copies will have ended when the steps under way have; call `admit` for them then."""
        found, rates = [], self.manager.tier.rates
        for name, end in list(self._copied_at.items()):
            status = self._req_status.get(name)
            if name not in self._ending or status is None or status.req.is_finished():
                # It was reported, or its user has gone: then the report frees its blocks.
                del self._copied_at[name]
            elif self.may_admit and end <= rates.now() + rates.busy_seconds:
                del self._copied_at[name]
                found.append(name)
        return self._let_compute(found)

    def admit(self, names: Collection[str]) -> None:
        """Note that requests may compute from now on."""
        self._admitted.update(names)
        for name in names:
            self._waited[name] = self._waited.get(name) or []

    def copy_tail(self, split: Split, blocks: list[int], keys: set[OffloadKey], rows: list[int]) -> None:
        """Have workers copy chunks of a split from their rows to GPU blocks, both in the order of the prompt."""
        name = split.context.req_id
        first = split.end // split.chunk_tokens * self.config.blocks_per_chunk - len(split.blocks)
        target = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])
        # A store may still read what a request had in them that has ended.
        self._current_batch_allocated_block_ids.update(blocks)
        self._copies[self._begin_copy(name, Piece(keys, CPULoadStoreSpec(rows), target))] = name

    def is_copied_soon(self, split: Split) -> bool:
        """Say whether the next step may wait for the copies of a tail, as far as they are not reported."""
        name, jobs, rates = split.context.req_id, self._current_batch_load_jobs, self.manager.tier.rates
        if name not in self._copies.values():
            return True
        if all(job.req_id != name for job in jobs.values()):
            return split.copied_at - rates.now() - rates.busy_seconds <= self.most_wait_seconds
        chunks = sum(len(self._jobs[job_id].keys) for job_id in jobs)
        return self._seconds_until_copied(chunks) <= self.most_wait_seconds

    def join(self, split: Split, blocks: list[int]) -> None:
        """Have a request go on behind these blocks, with its tail, whose copies the next step waits for."""
        name = split.context.req_id
        self.manager.count_saved(split.context, split.keys[len(split.keys) - split.handed :])
        self.end_split(name, has_joined=True)
        self._adapters.begin(name, None)
        self._waited[name] = blocks

    def wait_for_copies(self, name: str) -> None:
        """Have the next step wait for copies to blocks that are given back: it may compute in them."""
        self._waited.setdefault(name, None)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        name = request.request_id
        self._at_once.pop(name, None)
        if name in self._admitted:
            # It was preempted, and vLLM begins no load of a request before the last one is reported.
            return None, False
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        # vLLM computes a token at least with the step that loads.
        is_whole = num_computed_tokens + (tokens or 0) >= request.num_tokens
        if tokens and is_async and self.may_admit and not is_whole and request.lora_request is None:
            status = self._req_status[name]
            chunks = -(-tokens // self.config.kv_group_configs[0].tokens_per_chunk)
            seconds = self._seconds_to_copy(chunks)
            wait = self._seconds_until_copied(chunks) + sum(self._at_once.values())
            # The chunks of a long hit are not walked over to find that it takes too long.
            if wait <= self.most_wait_seconds and self.manager.are_ready(self._keys_of(status, tokens)):
                self._at_once[name] = seconds
                return tokens, False
        return tokens, is_async

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if request.request_id in self._at_once:
            # vLLM has hashed the blocks already, and 0.32 loads blocks without a hash only.
            unhashed = ([b if b.is_null else KVCacheBlock(b.block_id) for b in group] for group in blocks.blocks)
            blocks = KVCacheBlocks(tuple(unhashed))
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVTierMetadata:
        rates = self.manager.tier.rates
        begin = rates.now() + rates.busy_seconds
        for name in self._at_once:
            if (load := self._loads.get(name)) is not None:
                self._hand_over(name, load)
                self.admit(self._let_compute([name]))
        self._at_once.clear()
        made = super().build_connector_meta(scheduler_output)
        made.waited, self._waited = self._waited, {}
        self._expect_copies(made, begin)
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens and self._storing.value:
            seconds = max(self.least_store_seconds, rates.prefill.seconds(tokens))
            made.store_chunks = max(1.0, seconds * self._storing.value / self._worker_bytes)
        return made

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        if (stats := getattr(reports, "transfer_stats", None)) is not None:
            self.copying.observe(stats.load.bytes / self._worker_bytes * self._chunk_tokens, stats.load.time)
            self._storing.observe(stats.store.bytes, stats.store.time)
        for job_id, count in getattr(reports, "completed_jobs", {}).items():
            if job_id in self._copies and job_id in self._jobs and self._jobs[job_id].pending_count <= count:
                self._req_status[self._copies.pop(job_id)].transfer_jobs.add(job_id)
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            # vLLM takes a report about a request that computes for one about a request that has ended.
            reported = connector_output.finished_recving & self._admitted
            connector_output.finished_recving -= reported
            self._admitted -= reported

    def end_split(self, name: str, *, has_joined: bool) -> None:
        """End a split, without the copies of this step where their blocks are given back."""
        split = None if has_joined else self._splits.get(name)
        if split is not None:
            # vLLM may take a request back in the step that copies for it, and have another one compute in its blocks.
            for job_id in [each for each, job in self._current_batch_load_jobs.items() if job.req_id == name]:
                del self._current_batch_load_jobs[job_id], self._copies[job_id]
                self.manager.complete_load(self._jobs.pop(job_id).keys, split.context)
        super().end_split(name, has_joined=has_joined)

    @override
    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        made: dict[int, TransferJob] = super()._build_store_jobs(scheduler_output)
        # Behind its last store, and before vLLM forgets a request without transfers.
        for job_id, name in list(self._copies.items()):
            if name in scheduler_output.finished_req_ids:
                del self._copies[job_id]
                self._req_status[name].transfer_jobs.add(job_id)
        return made

    @override
    def reset_cache(self) -> None:
        self._at_once.clear()
        self._copied_at.clear()
        self._copies.clear()
        super().reset_cache()

    def _let_compute(self, names: list[str]) -> list[str]:
        """Take what is left of loads for copies that only the next step waits for; return the names."""
        for name in names:
            jobs = self._req_status[name].transfer_jobs
            self._copies.update(dict.fromkeys(jobs, name))
            jobs.clear()
            self._note_over(name)
        return names

    def _expect_copies(self, made: KVTierMetadata, begin: float) -> None:
        """Note when the copies of a step will have ended that begin at a time, and which loads end with them."""
        if not (self.may_admit and self.copying.value):
            return
        ended = [name for name, unwritten in made.ended_loads.items() if not unwritten]
        if chunks := sum(len(self._jobs[job_id].keys) for job_id in made.load_jobs):
            self._copies_end = max(begin, self._copies_end) + self._seconds_to_copy(chunks)
            for job in made.load_jobs.values():
                if (split := self._splits.get(job.req_id)) is not None:
                    split.copied_at = self._copies_end
        for name in ended:
            status, load = self._req_status.get(name), self._ending.get(name)
            if status is None or load is None or load.failed or status.req.is_finished():
                continue
            if status.req.lora_request is None:
                self._copied_at[name] = self._copies_end
        self._is_urgent = not self._copied_at.keys().isdisjoint(ended)

    def _seconds_until_copied(self, chunks: int) -> float:
        """Return how long a step waits for so many chunks behind the copies that were begun in earlier ones."""
        rates = self.manager.tier.rates
        return max(0.0, self._copies_end - rates.now() - rates.busy_seconds) + self._seconds_to_copy(chunks)

    def _seconds_to_copy(self, chunks: int) -> float:
        return self.copying.seconds(chunks * self._chunk_tokens)

    @property
    def _worker_bytes(self) -> float:
        """Bytes of a chunk that one worker copies: a part of its row, or all where ranks have the same KV."""
        return self.manager.tier.row_bytes / (1 if self._is_replicated else self.config.num_workers)


class SyncSplitScheduler(Scheduler):
    """vLLM's scheduler, with split hits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make vLLM's scheduler, and have the connector split hits if it can."""
        super().__init__(*args, **kwargs)
        scheduler = getattr(self.connector, "connector_scheduler", None)
        self._tier = scheduler if isinstance(scheduler, AdmittingScheduler) else None
        self._splits: Splits | None = None
        if self._tier is not None and self._tier.is_one_prefix and _can_split(self.vllm_config):
            self._tier.is_splitting = True
            self._splits = self._tier.manager.splits
        if self._tier is not None:
            is_staged = self.vllm_config.parallel_config.pipeline_parallel_size > 1
            self._tier.may_admit = self._tier.is_one_prefix and not is_staged
            self._tier.free_tail = self._free_tail
        self._limits: dict[str, int] = {}
        """By request whose head is computed, the tokens that it may compute in this step."""
        self._room = 0
        """Tokens that heads may still compute in this step."""
        self._loading_needs: dict[tuple[str, int], int] = {}
        """Blocks that requests still need whose loads are under way, in this step."""

    @override
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Have requests join that may, say how much of each head is computed, and schedule as vLLM does."""
        self._loading_needs.clear()
        if (splits := self._splits) is not None:
            self._limits, self._room = {}, splits.head_tokens
            if len(splits):
                self._join_and_plan(splits)
        if self._tier is not None and (names := self._tier.take_copied()):
            # vLLM's own way to hear that loads have ended.
            self._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=set(names)))
            self._tier.admit(names)
        state, is_joining = self.pause_state, self._tier is not None and bool(self._tier.joined)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._pause_state = state
        if self._tier is not None:
            if self._tier.is_urgent or is_joining:
                # Copies begin before this step computes, and not after it.
                output.has_sync_kv_loads = True
            self._tier.forget_joined()
        return output

    def _join_and_plan(self, splits: Splits) -> None:
        assert self._tier is not None
        self._tier.manager.poll()
        splits.advance({request.request_id for request in self.running})
        heads: list[tuple[Request, Split]] = []
        has_room, held = self._spare_blocks >= 0, []
        for request in list(self.running):
            split = splits.get(request.request_id)
            if split is None:
                continue
            split.computed = request.num_computed_tokens
            if split.computed >= split.end or self._is_lost(split) or not splits.is_worth_joining(split):
                self._tier.end_split(request.request_id, has_joined=False)
                if request.num_prompt_tokens - split.computed <= splits.head_tokens:
                    self._room = splits.least_head_tokens
                continue
            if has_room:
                self._copy_tail(split)
            if has_room and split.has_met and self.pause_state is PauseState.UNPAUSED:
                if self._tier.is_copied_soon(split) or self._is_alone(request):
                    self._join(request, split)
                else:
                    held.append(request.request_id)
            else:
                heads.append((request, split))
        if self._tier.joined:
            # Their first tokens come with this step. The shortest one takes as long as so many tokens of a head.
            depth = heads[0][1].computed if heads else 0
            short = int(splits.rates.least_seconds / splits.rates.prefill.seconds(1, depth))
            self._room = max(self._room // 2, min(self._room, short))
        if heads:
            self._limits = self._share_out(splits, heads)
        # Others compute while they are copied.
        self._limits.update(dict.fromkeys(held, 0))

    def _is_alone(self, request: Request) -> bool:
        """Say whether a step could compute nothing but this request, for all others wait for it or for their blocks."""
        assert self._tier is not None
        others = (each for each in itertools.chain(self.running, self.waiting) if each is not request)
        return all(map(self._tier.waits_for_others, others))

    def _is_awaited(self, request: Request) -> bool:
        """Say whether there are others, and all of them wait: then steps may take long, but should be few."""
        # One whose load ends would have to wait for the end of the step.
        is_loading = any(each.status is not RequestStatus.WAITING_FOR_STREAMING_REQ for each in self.kv_holding_waiting)
        return not is_loading and len(self.running) + len(self.waiting) > 1 and self._is_alone(request)

    def _copy_tail(self, split: Split) -> None:
        """Have the chunks that have come copied to the GPU, into blocks that are kept for the prompt anyway."""
        assert self._tier is not None
        pool, size = self.kv_cache_manager.block_pool, self._tier.config.blocks_per_chunk
        if split.uncopied > 0 and pool.get_num_free_blocks() >= split.uncopied * size:
            keys, rows = self._tier.manager.take_tail(split)
            blocks = pool.get_new_blocks(len(rows) * size)
            split.blocks += reversed(blocks)
            if keys:
                self._tier.copy_tail(split, [block.block_id for block in blocks], keys, rows)

    def _free_tail(self, split: Split) -> None:
        if split.blocks:
            self.kv_cache_manager.block_pool.free_blocks(split.blocks)
            split.blocks = []
            assert self._tier is not None
            self._tier.wait_for_copies(split.context.req_id)

    def _is_lost(self, split: Split) -> bool:
        """Say whether a split is of no use: a chunk could not be read, the volume hangs, or the weights changed."""
        assert self._tier is not None
        manager = self._tier.manager
        is_usable = manager.tier.attachment.is_current and not manager.tier.rates.is_hanging
        return bool(not is_usable or manager.request(split.context).missing)

    def _may_find(self, request: Request) -> bool:
        """Say whether a request that waits may have a hit, as far as that is known."""
        assert self._tier is not None
        found = self._tier.request(request.request_id)
        return found is not None and bool(found.found or found.lookups or found.on_volume)

    def _share_out(self, splits: Splits, heads: list[tuple[Request, Split]]) -> dict[str, int]:
        """Return the tokens of this step for each head: those that other requests leave."""
        left = self.max_num_scheduled_tokens
        for request in self.running:
            if splits.get(request.request_id) is None:
                left -= max(1, request.num_tokens_with_spec - request.num_computed_tokens)
        for request in self.waiting:
            if left <= 0:
                break
            if not request.num_computed_tokens and not self._may_find(request):
                left -= request.num_tokens
        limits: dict[str, int] = {}
        # One after the other, in the order of their arrival: shared out equally, all would be late.
        for request, split in heads:
            is_awaited = self._is_awaited(request)
            tokens = splits.next_tokens(split, in_flight=request.num_in_flight_tokens, is_awaited=is_awaited)
            # Less than up to the end of a chunk is of no use to a join.
            least = split.chunk_tokens - split.computed % split.chunk_tokens
            # However many tokens a head takes, vLLM looks at the requests that wait.
            most = max(least, min(tokens, self.max_num_scheduled_tokens - split.chunk_tokens)) if is_awaited else least
            room = max(self._room, most) if not limits else self._room
            room = min(room, max(0, left)) if splits.is_patient(split) else room
            if tokens > room:
                tokens = room - (split.computed + room) % split.chunk_tokens if room >= least else 0
            limits[request.request_id] = tokens
            self._room -= tokens
            left -= tokens
            if split.computed + tokens == split.end and request.num_tokens - split.end <= split.chunk_tokens:
                # Heads behind it would hold up its first token.
                self._room = min(self._room, splits.least_head_tokens)
        return limits

    @override
    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Pass over a request that waits for another one: first, vLLM would find what the GPU has of its prompt."""
        is_held = self._tier is not None and self._tier.is_held(request.request_id)
        return not is_held and bool(super()._handle_blocked_waiting_request(request))

    @override
    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Let a head compute no more than its share of the step; vLLM asks this of each request that it schedules."""
        splits = self._splits
        split = None if splits is None else splits.get(request.request_id)
        if (split or self._limits) and not self._fits_beside_heads(request, num_computed_tokens):
            # vLLM 0.32 stops at a request with 0 tokens. vLLM 0.33 continues, and later requests would take the blocks
            # that this one waits for. So no new request is admitted until `schedule` ends.
            self._pause_state = PauseState.PAUSED_NEW
            # As vLLM does without room: others may need the places of its images.
            self.encoder_cache_manager.free(request)
            return 0
        if splits and split:
            limit = self._limits.get(request.request_id)
            if limit is None:
                # It is scheduled for the first time, and 0 tokens would keep requests behind it from this step.
                # While it waited for room, the GPU may have given away what it had of the prompt.
                split.local_tokens = split.computed = num_computed_tokens
                limit = num_new_tokens
                if splits.is_worth_joining(split):
                    is_awaited = self._is_awaited(request)
                    limit = splits.next_tokens(split, is_awaited=is_awaited)
                    limit = min(num_new_tokens, limit) if is_awaited else min(limit, self._room)
                    limit = max(split.chunk_tokens, limit)
                    limit -= (num_computed_tokens + limit) % split.chunk_tokens
                self._room -= limit
                self._limits[request.request_id] = limit
            # A head that reaches the end of the hit goes on to the end of the prompt, if that is near.
            rest = request.num_tokens - split.end
            if not (num_computed_tokens + limit == split.end and rest <= split.chunk_tokens):
                num_new_tokens = min(num_new_tokens, limit)
        elif num_new_tokens > 1 and self._tier is not None and self._tier.joined and not request.has_encoder_inputs:
            # With a full step, vLLM would not let a request that has joined go on. Images are not cut.
            num_new_tokens -= num_computed_tokens + num_new_tokens < request.num_tokens
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))

    @override
    def _inflight_prefill_reserved_blocks(self) -> int:
        """Return the blocks that prompts in computation still need, without those that were taken for their tails."""
        taken = 0 if self._splits is None else self._splits.count_blocks()
        return max(0, int(super()._inflight_prefill_reserved_blocks()) - taken)

    @override
    def _request_remaining_blocks(self, request: Request) -> int:
        """Return the blocks that a prompt still needs; vLLM asks it of all of them for each load that begins."""
        if request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
            return int(super()._request_remaining_blocks(request))
        # A load that failed may begin again in the same step, with other blocks.
        load = request.request_id, request.num_computed_tokens
        if (needed := self._loading_needs.get(load)) is None:
            needed = self._loading_needs[load] = int(super()._request_remaining_blocks(request))
        return needed

    @override
    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """End the split of a request that vLLM preempts; one that joins has none any more."""
        if self._tier is not None:
            self._tier.end_split(request.request_id, has_joined=False)
        super()._preempt_request(request, *args, **kwargs)

    @property
    def _spare_blocks(self) -> float:
        """Blocks of the GPU beside all that prompts in computation need until their ends; may be negative."""
        reserved = self._inflight_prefill_reserved_blocks()
        return self.kv_cache_manager.block_pool.get_num_free_blocks() - reserved if reserved else math.inf

    def _fits_beside_heads(self, request: Request, num_computed_tokens: int) -> bool:
        """Say whether a request may begin beside heads, which take few tokens of a step: vLLM would begin too many."""
        assert self._tier is not None
        has_begun = request.num_computed_tokens > 0 or request in self._inflight_prefills
        goes_first = self.policy is SchedulingPolicy.PRIORITY and request < max(self.running, default=request)
        if has_begun or goes_first or request.request_id in self._tier.joined:
            return True
        needed, found = -(-request.num_tokens // self.block_size), num_computed_tokens // self.block_size
        if needed - found <= (spare := self._spare_blocks) < needed:
            # Blocks that it found take up room, too, except for those that other requests hold.
            find = self.kv_cache_manager.block_pool.get_cached_block
            cached = itertools.takewhile(bool, (find(each, [0]) for each in request.block_hashes[:found]))
            needed -= sum(block.ref_cnt > 0 for (block,) in cached)
        return bool(needed <= spare)

    def _join(self, request: Request, split: Split) -> None:
        """Put a request back to waiting; in the same step it finds head and tail in the GPU."""
        assert self._tier is not None
        computed, block_tokens = request.num_computed_tokens, split.chunk_tokens // self._tier.config.blocks_per_chunk
        end = split.end // block_tokens
        first = max(computed // block_tokens, end - len(split.blocks))
        pool = self.kv_cache_manager.block_pool
        tail = split.blocks[end - first - 1 :: -1]
        pool.cache_full_blocks(request, [pool.null_block] * first + tail, first, end, block_tokens, 0)
        head = self.kv_cache_manager.get_block_ids(request.request_id)[0][:first]
        self._tier.join(split, [*head, *(block.block_id for block in tail)])
        self.running.remove(request)
        # A step under way samples nothing for it: its prefill is unfinished.
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        if request.events and request.events[-1].type is EngineCoreEventType.PREEMPTED:
            # Users count preemptions to see whether the GPU's memory is too small.
            request.events.pop()
        loaded = split.end - computed
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=split.local_tokens,
                num_external_cached_tokens=loaded,
            )
        if (stats := self.connector_prefix_cache_stats) is not None:
            # vLLM counted the queries when the head began, and does not count what a preempted request finds.
            stats.hits += loaded
            stats.hits_by_source[CacheHitSource.DISK] = stats.hits_by_source.get(CacheHitSource.DISK, 0) + loaded


class AsyncSplitScheduler(SyncSplitScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler, with split hits."""


def _can_split(config: VllmConfig) -> bool:
    """Say whether an engine computes prompts in parts, each on one worker, and nothing but prompts."""
    is_chunking = config.scheduler_config.enable_chunked_prefill
    return is_chunking and config.speculative_config is None and config.parallel_config.pipeline_parallel_size == 1


def SplitScheduler(*args: Any, **kwargs: Any) -> Scheduler:  # noqa: N802 - vLLM expects a class
    """Make the scheduler that vLLM would have made, with split hits."""
    config = kwargs["vllm_config"]
    is_async = config.scheduler_config.async_scheduling
    if config.diffusion_config is not None:
        return (DiffusionAsyncScheduler if is_async else DiffusionScheduler)(*args, **kwargs)
    return (AsyncSplitScheduler if is_async else SyncSplitScheduler)(*args, **kwargs)
