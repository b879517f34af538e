# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the connector: lookups, loads and stores of each request.

It differs from vLLM's own side in three ways. The worker gets a load in pieces: with each step the chunks that have
come into their rows since the last one, in the order of the prompt. The request runs when the last piece is on the GPU;
a chunk that cannot be read ends the load, and vLLM computes from there on. A waiting request costs a step nothing until
its condition is met. Reading begins when a request arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    OffloadingConnectorScheduler,
    RequestOffloadState,
    SchedulerOffloadConfig,
    TransferJobStatus,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingSpec, OffloadKey, ReqContext
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier_connector.cascade.fetch import Load, Piece
from kvtier_connector.cascade.hints import parse_hints
from kvtier_connector.cascade.rates import Way, count_pairs
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.cascade.split import Split, may_be_split
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.metrics import DISK, MEMORY, NOTHING, FirstTokens
from kvtier_connector.vllm_adapter.worker import KVTierMetadata, WorkerQuestion, find_caller


class KeyedRequestState(RequestOffloadState):
    """vLLM's state of a request; a step that adds no hash costs nothing.

    vLLM walks over all hashes of each running request in each step.
    """

    _hashes = 0

    @override
    def update_offload_keys(self) -> None:
        if len(self.req.block_hashes) != self._hashes:
            self._hashes = len(self.req.block_hashes)
            super().update_offload_keys()


def without_handoffs(output: SchedulerOutput, is_wanted: Callable[[str, int], bool]) -> SchedulerOutput:
    """Return the output with the wanted states only, by request and by the token at which a state ends."""
    state = output.kv_connector_block_state
    if state is None or not state.boundary_state_offloads:
        return output
    kept = {
        name: [entry for entry in entries if is_wanted(name, entry[2])]
        for name, entries in state.boundary_state_offloads.items()
    }
    return replace(output, kv_connector_block_state=replace(state, boundary_state_offloads=kept))


def with_exact_windows(config: SchedulerOffloadConfig) -> SchedulerOffloadConfig:
    """Return the configuration with the chunks that a window reaches back over, which are those that vLLM stores.

    vLLM looks for a window of ``sliding_window`` tokens, one more than attention reads before the next token. Where
    that one token begins another chunk (windows of 4,097 tokens, Cohere2) it finds no window that was stored alone.
    """
    return config._replace(
        kv_group_configs=tuple(
            group._replace(
                sliding_window_size_in_chunks=max(
                    1, -(-(window.sliding_window - 1 + window.extra_retained_tokens) // group.tokens_per_chunk)
                )
            )
            if isinstance(window := group.kv_cache_spec, SlidingWindowSpec)
            else group
            for group in config.kv_group_configs
        )
    )


class KVTierScheduler(OffloadingConnectorScheduler):
    """See the module. Scheduler's thread only."""

    manager: KVTierManager
    config: SchedulerOffloadConfig
    _current_batch_jobs_to_flush: set[int]

    @override
    def __init__(self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self.config = with_exact_windows(self.config)
        if hasattr(self.config, "sync_load_budget_bytes"):
            # Steps wait for loads as `AdmittingScheduler` says.
            self.config = self.config._replace(sync_load_budget_bytes=0)
        # vLLM lets others go on when the piece with their chunk is copied; they can share it when the request goes on.
        self._chunks_being_loaded = None
        self._scheduler = find_caller("_preempt_request")
        self._is_zeroing = kv_cache_config.needs_kv_cache_zeroing
        # vLLM keeps some groups from connectors.
        is_one_group = len(kv_cache_config.kv_cache_groups) == len(self.config.kv_group_configs) == 1
        self.is_one_prefix = is_one_group and not self._sliding_window_groups
        self._loading: dict[OffloadKey, Load] = {}
        """Chunks on their way to the GPU, whose blocks other requests share once they are there."""
        self._loads: dict[str, Load] = {}
        """Loads that are not handed over yet."""
        self._ended: dict[str, list[int]] = {}
        """Loads that end with the next step, with the GPU blocks that stay unwritten."""
        self._ending: dict[str, Load] = {}
        """Loads that the workers have not reported as ended."""
        self._waits: dict[str, Callable[[], bool]] = {}
        """By waiting request, the condition that it waits for."""
        self._stale_jobs: dict[int, int] = {}
        """Pieces and stores of before the cache was reset, with the workers that may still read or write their rows."""
        self._first_tokens = FirstTokens(self.manager.tier.stats)
        self._adapters = self.manager.tier.adapters
        self._weights, self._declared = WorkerQuestion(self.config.num_workers), WorkerQuestion(self.config.num_workers)
        self._is_reset = False
        """True from a reset of the caches until a step has the workers compare all weights."""
        self._is_clean = False
        """True if the last reset left nothing of earlier weights on the GPU."""
        self._arriving: dict[str, int] = {}
        """Requests whose prefix is read ahead once it is known what the volume has, with their first chunk."""
        self._splits = self.manager.splits
        self.is_splitting = False
        """Whether hits are split that can be."""
        self.manager.count_work = self._count_work
        self.joined: dict[str, Split] = {}
        """Splits of requests that join in this step, until these have found head and tail in the GPU."""
        self.free_tail: Callable[[Split], None] = lambda _: None
        """Gives back the GPU blocks that were taken for a tail."""
        self.count_local_tokens: Callable[[Request], int] = lambda _: 0
        """How many tokens of a request's prompt the GPU has now."""

    def begin(self, declared: Sequence[Declared]) -> None:
        """Use the volume, with what workers declared before the first step, by rank; ask for it if it is not all."""
        if len(declared) == self.config.num_workers:
            self.manager.tier.open(declared)
        else:
            # MultiConnector passes on what the first of its children declares, which may be another connector.
            self._declared.ask()

    @override
    def on_new_request(self, request: Request) -> None:
        # vLLM logs what it does not understand, reads anything as if it were an object, and a client may send anything.
        hints, request.kv_transfer_params = parse_hints(request.kv_transfer_params, getattr(request, "kv_hints", None))
        super().on_new_request(request)
        made = self._req_status[request.request_id]
        status = KeyedRequestState(made.config, made.req, made.req_context, made.offloading_context)
        self._req_status[request.request_id] = status
        status.req_context.set_state(request)
        status.req_context.set_state(hints)
        self.manager.tier.requests.count(hints)
        status.max_load_tokens = status.max_load_tokens if hints.may_load else 0
        status.max_offload_tokens = status.max_offload_tokens if hints.may_store else 0
        if hints.may_load and not request.skip_reading_prefix_cache:
            self._look_up(status)

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        name = request.request_id
        if self.is_held(name):
            return None, False
        self._waits.pop(name, None)
        status = self._req_status[name]
        if self._scheduler is not None:
            # Of a load that gave nothing, vLLM still reserves the blocks, also against the next load of the request.
            self._scheduler._inflight_prefills.discard(request)  # noqa: SLF001 - vLLM has no other call
        if self._splits.get(name) is not None:
            # There was no room to compute its head when it was asked for before.
            return 0, False
        if request.num_preemptions and name not in self.joined:
            # It gets other blocks: all its chunks are offered again, as later releases of vLLM do.
            for group in status.group_states:
                group.next_stored_chunk_idx = 0
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if tokens and self.manager.request(status.req_context).way is Way.SPLIT:
            self._begin_split(status, self._keys_of(status, tokens))
            return 0, False
        return tokens, is_async

    def request(self, name: str) -> TierRequest | None:
        """Return what the tier keeps of a request; None if it has ended."""
        status = self._req_status.get(name)
        return None if status is None else self.manager.request(status.req_context)

    def end_split(self, name: str, *, has_joined: bool) -> None:
        """End the split of a request: one that joins goes on behind what has come, another computes it."""
        split = self._splits.end(name)
        status = self._req_status.get(name)
        if split is None:
            return
        if has_joined:
            self.joined[name] = split
        else:
            self.free_tail(split)
        split.count(self.manager.tier.stats, has_joined=has_joined)
        self.manager.fetches.end_lease(split.context)
        if status is not None and not has_joined:
            split.offer(status.group_states[0], self.manager.primary_tier, self.manager.request(split.context))

    def forget_joined(self) -> None:
        """Leave the tails of requests that could not run in this step to the prefix cache."""
        for split in self.joined.values():
            self.free_tail(split)
        self.joined.clear()

    def _can_split(self, status: RequestOffloadState) -> bool:
        return self.is_splitting and status.max_load_tokens is None and may_be_split(status.req)

    def _begin_split(self, status: RequestOffloadState, keys: Sequence[OffloadKey]) -> None:
        """Have the head of a hit computed while its tail is read."""
        context, local = status.req_context, status.num_locally_computed_tokens
        size = self.config.kv_group_configs[0].tokens_per_chunk
        self.manager.request(context).way = None
        self._splits.begin(context.req_id, Split(context, keys, local // size * size, size, local))
        # The volume has these chunks.
        status.group_states[0].next_stored_chunk_idx = local // size + len(keys)

    def _count_work(self) -> tuple[float, int]:
        """Return the seconds that running requests compute before one that waits, besides heads; how many answer."""
        seconds, answering, prefill = 0.0, 0, self.manager.tier.rates.prefill
        for request in (status.req for status in self._req_status.values()):
            if request.status is RequestStatus.RUNNING and self._splits.get(request.request_id) is None:
                missing = request.num_prompt_tokens - request.num_computed_tokens
                seconds += prefill.seconds(missing, request.num_computed_tokens) if missing > 0 else 0.0
                answering += missing <= 0
        return seconds, answering

    @override
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        name = request.request_id
        self._arriving.pop(name, None)
        status = self._req_status[name]
        if (split := self.joined.pop(name, None)) is not None:
            self.free_tail(split)
            split.offer(status.group_states[0], self.manager.primary_tier, self.manager.request(status.req_context))
        is_found = num_external_tokens or status.num_locally_computed_tokens
        source = DISK if self.manager.is_from_volume(name) else MEMORY if is_found else NOTHING
        self._first_tokens.begin(request, source)
        if num_external_tokens == 0:
            if (split := self._splits.get(name)) is not None:
                split.lacks_room = False
            else:
                # The chunks that were read ahead for it came to the GPU by another request.
                self.manager.fetches.end_lease(status.req_context)
            return
        load = self.manager.load_of(name)
        (job_id,) = status.transfer_jobs
        self._adapters.begin(name, request.lora_request)
        job = self._current_batch_load_jobs.pop(job_id)
        del self._jobs[job_id]
        status.transfer_jobs.clear()
        target = job.dst_spec
        assert isinstance(target, GPULoadStoreSpec)
        load.aim(target, self.config.blocks_per_chunk)
        self._loads[name] = load
        self._loading.update(dict.fromkeys(load.keys, load))

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVTierMetadata:
        self._first_tokens.look()
        running = (status.req for status in self._req_status.values() if not status.req.is_finished())
        in_flight = sum(request.num_in_flight_tokens for request in running)
        planned = ((self._req_status[name].req, n) for name, n in scheduler_output.num_scheduled_tokens.items())
        begins = ((req, req.num_computed_tokens, n) for req, n in planned)
        # How long a token of an answer takes says nothing about prompts.
        pairs = sum(count_pairs(begin, n) for req, begin, n in begins if begin < req.num_prompt_tokens)
        self.manager.tier.rates.note_step(scheduler_output.total_num_scheduled_tokens, in_flight, pairs)
        self._read_ahead_of_answered()
        preempted = scheduler_output.preempted_req_ids or ()
        for name in preempted:
            if (status := self._req_status.get(name)) is not None and name not in self.joined:
                self.manager.request(status.req_context).begin_anew()
        if self._loads:
            self.manager.poll()
            for name, load in list(self._loads.items()):
                self.manager.give_up_late(load)
                # After a reset vLLM may have it go on in the step that preempts it, and takes its jobs for stores.
                if name not in preempted:
                    self._hand_over(name, load)
        for new in scheduler_output.scheduled_new_reqs:
            # It comes with all its blocks. vLLM 0.32 adds them to those of the part of a session before this one.
            for state in self._req_status[new.req_id].group_states:
                state.block_ids.clear()
        made = super().build_connector_meta(scheduler_output)
        assert isinstance(made, OffloadingConnectorMetadata)
        self.manager.tier.tokens_under_way = scheduler_output.total_num_scheduled_tokens
        jobs, ended, self._ended = (made.load_jobs, made.store_jobs, made.jobs_to_flush), self._ended, {}
        if self._is_zeroing:
            # vLLM's runner zeroes new blocks before it has workers copy what lay in them.
            flushed = (job.keys for each in jobs[2] if (job := self._jobs.get(each)) and job.is_store)
            self.manager.spoilt.update(*flushed)
        # A step that neither computes nor loads may lie before the update of the weights that all was reset for.
        is_due = scheduler_output.num_scheduled_tokens or jobs[0]
        asked = self._weights.ask() if self._is_reset and is_due else 0
        self._is_reset = self._is_reset and not asked
        orders = self._adapters.give_orders(scheduler_output.num_scheduled_tokens)
        return KVTierMetadata(*jobs, ended, asked, self._is_reset, orders, self._declared.number)

    @override
    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        size = self.config.blocks_per_chunk
        groups = self._sliding_window_groups if size > 1 else ()
        names = (*scheduler_output.num_scheduled_tokens, *scheduler_output.finished_req_ids) if groups else ()
        for status in filter(None, map(self._req_status.get, names)):
            tokens = self._calc_num_offloadable_tokens(status, status.req.num_tokens)
            for state, group in ((status.group_states[n], self.config.kv_group_configs[n]) for n in groups):
                # A Mamba state is one block of a chunk.
                count = 0 if isinstance(group.kv_cache_spec, MambaSpec) else tokens // group.tokens_per_chunk
                blocks = state.block_ids
                for end in range((state.next_stored_chunk_idx + 1) * size, min(len(blocks), count * size) + 1, size):
                    if 0 in blocks[end - size : end]:
                        # vLLM stores a chunk whose last block is in the window. The rest of its row is another's.
                        blocks[end - 1] = 0
        if self.is_one_prefix:
            # vLLM goes through all requests of a step, and that of an answer seldom completes a chunk.
            scheduled = scheduler_output.num_scheduled_tokens.items()
            due = {name: tokens for name, tokens in scheduled if self._completes_chunk(name, tokens)}
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=due)
        return dict(super()._build_store_jobs(scheduler_output))

    def _completes_chunk(self, name: str, tokens: int) -> bool:
        """Say whether a request that computes so many tokens has a chunk then that was not offered."""
        if (status := self._req_status.get(name)) is None:
            return False
        reached = self._calc_num_offloadable_tokens(status, status.req.num_computed_tokens + tokens)
        chunks = reached // self.config.kv_group_configs[0].tokens_per_chunk
        return bool(chunks > status.group_states[0].next_stored_chunk_idx)

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports = connector_output.kv_connector_worker_meta
        # Before what was computed with them counts as stored.
        self._take_weights(getattr(reports, "weights", {}))
        self._adapters.take(getattr(reports, "adapters", {}))
        if getattr(reports, "replaced", ()):
            self._compute_anew(connector_output.invalid_block_ids)
        super().update_connector_output(connector_output)
        for name in connector_output.finished_recving or ():
            self._note_over(name)
        if self._stale_jobs:
            self._forget_stale(getattr(reports, "completed_jobs", {}))
        if (declared := self._declared.take(getattr(reports, "declared", {}))) is not None:
            # Requests wait for this step.
            self.manager.tier.open(declared, 0.0)

    def _compute_anew(self, wrong: set[int]) -> None:
        """Have vLLM preempt running requests that hold wrong blocks: its model runners cannot go back by themselves."""
        if (scheduler := self._scheduler) is not None:
            manager = scheduler.kv_cache_manager
            manager.evict_blocks(wrong)
            for request in reversed(list(scheduler.running)):
                (blocks,) = manager.get_block_ids(request.request_id)
                if found := wrong.intersection(blocks):
                    manager.evict_blocks(set(blocks[min(map(blocks.index, found)) :]))
                    scheduler.running.remove(request)
                    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)  # noqa: SLF001 - vLLM has no other call

    def _note_over(self, name: str) -> None:
        """Let requests go on that wait for the blocks of a load: they share them from now on."""
        if (load := self._ending.pop(name, None)) is not None:
            load.is_over = True
            for key in load.keys:
                if self._loading.get(key) is load:
                    del self._loading[key]

    def _take_weights(self, reports: Mapping[int, tuple[int, bool]]) -> None:
        """Take in comparisons of the weights, by rank."""
        attachment = self.manager.tier.attachment
        for _, is_original in reports.values():
            attachment.note_weights(is_original=is_original)
        if (answers := self._weights.take(reports)) is not None:
            attachment.note_weights(is_original=all(answers), may_return=self._is_clean)

    @override
    def has_pending_push_work(self) -> bool:
        is_telling = self._loads or self._ended or self._stale_jobs or self._adapters.has_orders
        return bool(is_telling) or super().has_pending_push_work()

    @override
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        self.manager.tier.rates.note_gone(request.num_in_flight_tokens)
        self._first_tokens.end(name)
        self.end_split(name, has_joined=False)
        self._arriving.pop(name, None)
        self._adapters.end(name)
        self._waits.pop(name, None)
        if name in self._loads:
            # vLLM frees the blocks when the workers have finished with them.
            self._end(name, unwritten=[])
        elif name in self._ended:
            self._ended[name] = []
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        return finished

    @override
    def reset_cache(self) -> None:
        for name, load in list(self._loads.items()):
            self._end(name, unwritten=load.unwritten)
        self._waits.clear()
        for split in self._splits.clear():
            self.free_tail(split)
        self._stale_jobs.update({job_id: job.pending_count for job_id, job in self._jobs.items() if job.pending_count})
        # vLLM does not expect to be asked again before a step has told the workers what to wait for.
        flushed, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        for state in (each.group_states[n] for each in self._req_status.values() for n in self._sliding_window_groups):
            # vLLM offers all chunks again, and does not know which blocks have left the window and are another's.
            state.block_ids[:] = [0] * len(state.block_ids)
        self._weights.drop()
        self._is_reset = True
        self._is_clean = self.manager.is_gpu_empty()
        self._current_batch_jobs_to_flush |= flushed
        if self._stale_jobs:
            # The worker may still read or write rows that the CPU tier does not know of any more.
            self.manager.fetches.is_held = True

    @override
    def _lookup(self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None) -> int | None:
        name = (context := req_status.req_context).req_id
        if self._waits_for_others(req_status, self._next_keys_of(req_status)):
            return None
        request = self.manager.request(context)
        request.on_volume.clear()
        if name not in self.joined:
            # One that joins goes on in this step, however old the answers are.
            self.manager.tier.lookups.refresh(request)
        tokens: int | None = super()._lookup(req_status, max_num_new_tokens)
        if tokens:
            may_split = self._can_split(req_status)
            if not self.manager.decide(context, self._keys_of(req_status, tokens), may_split=may_split).reads:
                tokens = super()._lookup(req_status, max_num_new_tokens)
        if tokens is not None:
            self._waits.pop(name, None)
        return None if self._waits_for_others(req_status, self._keys_of(req_status, tokens or 0)) else tokens

    @override
    def _maximal_prefix_lookup(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext,
        req: Request,
        group_config: GroupOffloadConfig,
        start_chunk_idx: int,
    ) -> int | None:
        wanted = list(keys)
        count, unknown = self.manager.match_prefix(wanted, req_context)
        if unknown is not None:
            self._waits[req_context.req_id] = lambda: self.manager.is_known(unknown, req_context)
            return None
        if self._events_tracker.self_describing_enabled:
            for number, key in enumerate(wanted[:count], start_chunk_idx):
                self._events_tracker.record_lookup(req, group_config, number, key)
        return count

    @override
    def _build_partial_tail_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        # vLLM asserts that no state ends behind what a request may offload, and takes 0 for no limit.
        return dict(super()._build_partial_tail_store_jobs(without_handoffs(scheduler_output, self._may_store_to)))

    def _look_up(self, status: RequestOffloadState) -> None:
        """Ask the volume for the chunks of a request that has just arrived."""
        status.update_offload_keys()
        self.manager.tier.transfers.note_request([key for state in status.group_states for key in state.offload_keys])
        local_tokens = self.count_local_tokens(status.req)
        if self.is_one_prefix and status.max_load_tokens is None:
            self._read_ahead(status, local_tokens // self.config.kv_group_configs[0].tokens_per_chunk)
            if len(self._req_status) == len(self._arriving) == 1 and self.manager.tier.lookups.wait():
                self.manager.poll()
                self._read_ahead_of_answered()
            return
        for group in self._full_attention_groups:
            first = local_tokens // self.config.kv_group_configs[group].tokens_per_chunk
            self.manager.match_prefix(status.group_states[group].offload_keys[first:], status.req_context)

    def _read_ahead_of_answered(self) -> None:
        """Have the volume read for requests whose lookups have been answered."""
        for name, first in list(self._arriving.items()):
            if (request := self.request(name)) is not None and not request.lookups:
                self._read_ahead(self._req_status[name], first)

    def _read_ahead(self, status: RequestOffloadState, first: int) -> None:
        """Have the volume read for a request, from a chunk on, before vLLM gets to it."""
        context = status.req_context
        if keys := status.group_states[0].offload_keys[first:]:
            self.manager.read_ahead(keys, context, may_split=self._can_split(status))
        if self.manager.request(context).lookups:
            self._arriving[context.req_id] = first
        else:
            self._arriving.pop(context.req_id, None)

    def _next_keys_of(self, status: RequestOffloadState) -> Sequence[OffloadKey]:
        """Return the chunks that the GPU does not have; none where a load need not begin with the first of them."""
        if not (self._loading or self._splits) or not self.is_one_prefix or status.max_load_tokens is not None:
            return ()
        first = status.num_locally_computed_tokens // self.config.kv_group_configs[0].tokens_per_chunk
        keys: Sequence[OffloadKey] = status.group_states[0].offload_keys[first:]
        return keys

    def is_held(self, name: str) -> bool:
        """Say whether a request waits for a condition that is not met."""
        is_there = self._waits.get(name)
        return is_there is not None and not is_there()

    def waits_for_others(self, request: Request) -> bool:
        """Say whether a request cannot compute yet: its blocks are being loaded or computed, or looked for."""
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS or self.is_held(request.request_id):
            return True
        if request.status is not RequestStatus.WAITING:
            return False
        # It has just arrived, or what it waited for has come: it may wait for a head next.
        status = self._req_status[request.request_id]
        keys = status.group_states[0].offload_keys if status.max_load_tokens is None else ()
        return self._splits.wait_for(keys, status.req_context) is not None

    def _waits_for_others(self, status: RequestOffloadState, keys: Sequence[OffloadKey]) -> bool:
        """Have a request wait until the blocks are there to share that another one loads; False if there are none."""
        load = next((load for key in keys if (load := self._loading.get(key))), None) if self._loading else None
        if load is not None:
            self._waits[status.req_context.req_id] = lambda: load.is_over
        elif self._splits and (is_there := self._splits.wait_for(keys, status.req_context)):
            self._waits[status.req_context.req_id] = is_there
        else:
            return False
        return True

    def _keys_of(self, status: RequestOffloadState, tokens: int) -> Sequence[OffloadKey]:
        """Return the chunks that a load of so many tokens loads, as vLLM chooses them: behind what the GPU has."""
        if not tokens:
            return ()
        begin = status.num_locally_computed_tokens
        end = begin + tokens
        found: list[OffloadKey] = []
        for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
            size = config.tokens_per_chunk
            keys = state.offload_keys[begin // size : -(-end // size)]
            window = config.load_window_size_in_chunks(end)
            found += keys if window is None else keys[-window:]
        return found

    def _hand_over(self, name: str, load: Load) -> None:
        """Give the worker what has become ready of a load, and tell it when that was all."""
        if load.has_piece:
            self._req_status[name].transfer_jobs.add(self._begin_copy(name, load.take_piece()))
        if load.is_handed_over:
            self._end(name, unwritten=load.unwritten)

    def _begin_copy(self, name: str, piece: Piece) -> int:
        """Have workers copy chunks of a request with this step; return the number of the job."""
        keys, source, target = piece
        job_id = self._generate_job_id()
        self._current_batch_load_jobs[job_id] = TransferJob(req_id=name, src_spec=source, dst_spec=target)
        self._jobs[job_id] = TransferJobStatus(
            req_id=name, pending_count=self.config.num_workers, keys=keys, is_store=False
        )
        self.manager.copying += len(keys)
        return int(job_id)

    def _end(self, name: str, *, unwritten: list[int]) -> None:
        """Hand over no more of a load; the GPU blocks `unwritten` are computed."""
        load = self._loads.pop(name)
        self.manager.release_load(name)
        self._ended[name] = unwritten
        self._ending[name] = load
        if unwritten:
            # vLLM takes the whole hit for offered already; what is computed of it is offered like anything else.
            is_whole = len(self.config.kv_group_configs) > 1
            for state, reached in zip(self._req_status[name].group_states, load.reached, strict=True):
                state.next_stored_chunk_idx = 0 if is_whole else min(state.next_stored_chunk_idx, reached)

    def _forget_stale(self, completed: Mapping[int, int]) -> None:
        """Take in which pieces and stores of before a reset the workers have finished with."""
        for job_id, workers in completed.items():
            if job_id in self._stale_jobs:
                self._stale_jobs[job_id] -= workers
                if self._stale_jobs[job_id] <= 0:
                    del self._stale_jobs[job_id]
        if not self._stale_jobs:
            self.manager.go_on()

    def _may_store_to(self, name: str, token: int) -> bool:
        status = self._req_status.get(name)
        return status is not None and (status.max_offload_tokens is None or token <= status.max_offload_tokens)
