# SPDX-License-Identifier: Apache-2.0
"""Our scheduler stores and flushes the same, whether or not complete requests are left out of its walks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Rigs, offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventGroupSpec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvtier_connector.contract.engine import encode_live
from kvtier_connector.vllm_adapter.scheduler import KVTierScheduler
from kvtier_connector.vllm_adapter.spec import KVTierSpec

BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
STEPS = 400
MOST_RUNNING = 6
BLOCKS = 600


def group(index: int, spec: KVCacheSpec, window: int | None) -> offloading.GroupOffloadConfig:
    manager = FullAttentionManager if window is None else SlidingWindowManager
    return offloading.GroupOffloadConfig(
        group_idx=index,
        tokens_per_block=BLOCK_TOKENS,
        tokens_per_chunk=CHUNK_TOKENS,
        hashes_per_chunk=BLOCKS_PER_CHUNK,
        kv_event_group_spec=OffloadingEventGroupSpec(None, None),
        sliding_window_size_in_chunks=window,
        kv_cache_spec=spec,
        manager_cls=manager,
    )


FULL = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=2 * CHUNK_TOKENS
)
SHAPES = {
    "full attention": (group(0, FULL, None),),
    "full attention and a sliding window": (group(0, FULL, None), group(1, WINDOW, 2)),
}


@dataclass
class Side:
    """One of the two schedulers, with its own requests."""

    scheduler: KVTierScheduler
    requests: dict[str, Request] = field(default_factory=dict)
    under_way: set[int] = field(default_factory=set)
    """Jobs that the worker has not reported yet."""


def make_side(
    monkeypatch: pytest.MonkeyPatch, rigs: Rigs, groups: tuple[Any, ...], *, is_plain: bool, prompt_only: bool = True
) -> Side:
    config = offloading.SchedulerOffloadConfig(
        kv_group_configs=groups,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        tokens_per_hash=BLOCK_TOKENS,
        num_workers=1,
        offload_prompt_only=prompt_only,
        supports_partial_tail=False,
    )
    monkeypatch.setattr(offloading.SchedulerOffloadConfig, "from_spec", lambda *_: config)
    monkeypatch.setattr(offloading, "resolve_mamba_align_size", lambda *_: None)
    # Nothing is written: how quickly the movers are would decide which rows are free.
    manager = rigs.make(chunks=64, live_file=str(bypassed(rigs))).manager
    monkeypatch.setattr(KVTierSpec, "get_manager", lambda _: manager)

    class Config:
        class cache_config:  # noqa: N801  vLLM's name
            enable_prefix_caching = True

    made: Any = KVTierScheduler
    side = Side(
        made(
            KVTierSpec(offloading_config()),
            Config(),
            KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[]),
        )
    )
    if is_plain:
        side.scheduler._complete = None
    return side


def bypassed(rigs: Rigs) -> Path:
    live = rigs.root.parent / "live.json"
    live.parent.mkdir(exist_ok=True)
    live.write_text(encode_live("Bypass"))
    return live


@dataclass
class Traffic:
    """What a scheduler does, drawn at random: it admits, prefills in parts, decodes, preempts, aborts, ends them."""

    sides: list[Side]
    groups: int
    dice: random.Random
    free: list[int] = field(default_factory=lambda: list(range(1, BLOCKS)))
    blocks: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    count: int = 0
    pace: int = 0
    """How many of seven jobs end in this step."""

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def steps(self) -> Iterator[list[Any]]:
        """Yield what each side was told to do in each step."""
        for number in range(STEPS):
            output = SchedulerOutput.make_empty()
            self.pace = self.dice.randrange(3)
            output.finished_req_ids, self.finished = self.finished, set()
            self._preempt(output)
            self._resume(output)
            self._admit(output)
            self._advance(output)
            yield [self._run(side, output) for side in self.sides]
            for name, tokens in output.num_scheduled_tokens.items():
                self._sample(name, tokens)
            if number % 97 == 96:
                for side in self.sides:
                    side.scheduler.reset_cache()

    def _run(self, side: Side, output: SchedulerOutput) -> Any:
        meta: Any = side.scheduler.build_connector_meta(output)
        side.under_way.update(meta.store_jobs)
        done = OffloadingWorkerMetadata()
        for job in {job for job in side.under_way if job % 7 < self.pace} | meta.jobs_to_flush:
            side.under_way.discard(job)
            done.mark_completed(job)
        side.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))
        return [
            (job.req_id, list(job.src_spec.block_ids), list(job.src_spec.group_sizes), list(job.dst_spec.chunk_ids))
            for job in meta.store_jobs.values()
        ], meta.jobs_to_flush

    def _tokens(self, name: str) -> int:
        return self.sides[0].requests[name].num_tokens

    def _grow(self, name: str, tokens: int) -> tuple[list[int], ...] | None:
        """Allocate blocks for so many tokens; every group has blocks of its own."""
        held = self.blocks.setdefault(name, [])
        wanted = -(-tokens // BLOCK_TOKENS) - len(held) // self.groups
        if wanted <= 0:
            return None
        fresh = tuple([self.free.pop() for _ in range(wanted)] for _ in range(self.groups))
        for ids in fresh:
            held.extend(ids)
        return fresh

    def _release(self, name: str) -> None:
        self.free.extend(self.blocks.pop(name))
        del self.computed[name]

    def _admit(self, output: SchedulerOutput) -> None:
        if len(self.computed) >= MOST_RUNNING or self.dice.random() < 0.5:
            return
        name = f"r{self.count}"
        self.count += 1
        prompt = [self.dice.randrange(1000) for _ in range(self.dice.randrange(1, 6 * CHUNK_TOKENS))]
        for side in self.sides:
            request = Request(name, prompt, SamplingParams(max_tokens=99), None, block_hasher=self.hasher)
            request.skip_reading_prefix_cache = True
            if len(prompt) % 3 == 0:
                request.kv_transfer_params = {"max_offload_tokens": len(prompt) // 2}
            side.requests[name] = request
            side.scheduler.on_new_request(request)
            assert side.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            request.status = RequestStatus.RUNNING
        self.computed[name] = 0
        tokens = self.dice.randrange(1, len(prompt) + 1)
        output.num_scheduled_tokens[name] = tokens
        blocks = self._grow(name, tokens) or tuple([] for _ in range(self.groups))
        output.scheduled_new_reqs.append(NewRequestData(name, prompt, [], None, None, blocks, 0, None))

    def _preempt(self, output: SchedulerOutput) -> None:
        if len(self.computed) < 2 or self.dice.random() < 0.9:
            return
        name = self.dice.choice(list(self.computed))
        self._release(name)
        self.preempted.append(name)
        output.preempted_req_ids = {name}
        for side in self.sides:
            side.requests[name].status = RequestStatus.PREEMPTED
            side.requests[name].num_computed_tokens = 0

    def _resume(self, output: SchedulerOutput) -> None:
        if not self.preempted or self.preempted[0] in (output.preempted_req_ids or ()):
            return
        name = self.preempted[0]
        if any(side.scheduler.get_num_new_matched_tokens(side.requests[name], 0) != (0, False) for side in self.sides):
            return
        self.preempted.pop(0)
        self.computed[name] = 0
        if self.dice.random() < 0.5:
            # As when less is loaded again than had been stored: the rest is offered once more.
            for side in self.sides:
                for state in side.scheduler._req_status[name].group_states:
                    state.next_stored_chunk_idx = 0
        tokens = self._tokens(name)
        output.num_scheduled_tokens[name] = tokens
        output.scheduled_cached_reqs.resumed_req_ids.add(name)
        self._append(output.scheduled_cached_reqs, name, self._grow(name, tokens))
        for side in self.sides:
            side.requests[name].status = RequestStatus.RUNNING

    def _advance(self, output: SchedulerOutput) -> None:
        for name in self.computed:
            if name not in output.num_scheduled_tokens:
                left = self._tokens(name) - self.computed[name]
                tokens = self.dice.randrange(1, left + 1)
                output.num_scheduled_tokens[name] = tokens
                blocks = self._grow(name, self.computed[name] + tokens)
                self._append(output.scheduled_cached_reqs, name, blocks)

    @staticmethod
    def _append(cached: CachedRequestData, name: str, blocks: tuple[list[int], ...] | None) -> None:
        cached.req_ids.append(name)
        cached.new_block_ids.append(blocks)
        cached.num_computed_tokens.append(0)
        cached.num_output_tokens.append(0)

    def _sample(self, name: str, tokens: int) -> None:
        self.computed[name] += tokens
        for side in self.sides:
            side.requests[name].num_computed_tokens = self.computed[name]
        if self.computed[name] < self._tokens(name):
            return
        is_over = self.dice.random() < 0.05
        token = self.dice.randrange(1000)
        for side in self.sides:
            request = side.requests[name]
            request.append_output_token_ids(token)
            if is_over:
                aborted = token % 2 == 0
                request.status = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
                side.scheduler.request_finished(request)
        if is_over:
            self.finished.add(name)
            self._release(name)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES)
def test_leaving_complete_requests_out_changes_no_store_and_no_flush(
    monkeypatch: pytest.MonkeyPatch, rigs: Rigs, shape: str, seed: int
) -> None:
    groups = SHAPES[shape]
    sides = [make_side(monkeypatch, rigs, groups, is_plain=is_plain) for is_plain in (False, True)]
    traffic = Traffic(sides, len(groups), random.Random(seed))
    stored = flushed = most_complete = 0
    for ours, plain in traffic.steps():
        assert ours == plain
        stored += len(plain[0])
        flushed += len(plain[1])
        most_complete = max(most_complete, len(sides[0].scheduler._complete or ()))
    assert stored > STEPS / 8
    assert flushed > 3
    assert most_complete > 1
    assert (sides[0].scheduler._complete or set()) <= set(traffic.computed) | set(traffic.preempted)


def test_an_engine_that_stores_answers_too_leaves_nobody_out(monkeypatch: pytest.MonkeyPatch, rigs: Rigs) -> None:
    groups = SHAPES["full attention"]
    side = make_side(monkeypatch, rigs, groups, is_plain=False, prompt_only=False)
    assert side.scheduler._complete is None
    stored = sum(len(jobs) for [(jobs, _)] in Traffic([side], 1, random.Random(0)).steps())
    assert stored
