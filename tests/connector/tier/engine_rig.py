# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's own scheduler and our connector in both roles, over ordinary memory.

`SimulatedEngine.step` does what an engine's step does. Its forward pass writes for each token a value that all tokens
up to it decide, and checks before that what it builds upon: every block of the prefix must hold just those values, and
a block that was given to a request holds rubbish until it is written. The next token follows from the values, too, so
an answer is the one without a cache or it is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_parts import (
    BLOCK_TOKENS,
    LANES,
    PAGE_BYTES,
    RUBBISH,
    Shape,
    SimulatedLoras,
    SlowCopies,
    Words,
    answer_of,
    attention,
    engine_config,
    images_of,
    page_of,
    seen_by_model,
    token_after,
    values_after,
    values_of,
)
from rig import ON_THREADS, PATIENCE_SECONDS, add_up, wait_until
from vllm.config import LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtier_connector.cascade.rates import Way
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.vllm_adapter.connector import KVTierConnector
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier
from kvtier_connector.vllm_adapter.split_scheduler import AdmittingScheduler, SplitScheduler

NOT_OURS = KVConnectorHandshakeMetadata()
"""What MultiConnector passes on where it asks another child first."""


class TierUnderTest(SharedVolumeTier):
    """The tier with the system calls of a test; it reports at once."""

    stats_seconds = 0.0


class _Part(NamedTuple):
    """A request in a step: it is computed up to a token, in these blocks of each group of layers."""

    request: Request
    end: int
    blocks: tuple[list[int], ...]


@dataclass
class _Batch:
    """A step that is scheduled, with the blocks that it gave to requests, and what the worker made of it."""

    output: SchedulerOutput
    parts: dict[str, _Part]
    fresh: list[int]
    made: ModelRunnerOutput | None = None
    replaced: set[int] = field(default_factory=set)
    """Blocks of an adapter or of weights that were replaced: parts of requests that have one count for nothing."""
    wrong: dict[str, str] = field(default_factory=dict)
    """By request that was computed upon other bytes than it wrote or loads, what these were."""


class ZeroedKVCacheConfig(KVCacheConfig):
    needs_kv_cache_zeroing = True


class SimulatedEngine:
    """One engine. `step` may be called at any time; `close` at the end."""

    def __init__(
        self, config_file: Path, shape: Shape, fs: FileSystem = ON_THREADS, *, weights: int = 0, is_child: bool = False
    ) -> None:
        """Start it; the weights are all of this number. A child's declaration is not passed on."""
        self.shape = shape
        self.model = torch.nn.Linear(1, 4, bias=False)
        torch.nn.init.constant_(self.model.weight, weights)
        TierUnderTest.fs = fs
        self.lora_manager = SimulatedLoras(shape.most_loras, self.model)
        config = engine_config(shape, config_file)
        groups = [KVCacheGroupSpec([f"layer.{n}"], attention(window)) for n, window in enumerate(shape.windows)]
        size = shape.gpu_blocks * PAGE_BYTES
        # Groups share the memory, as vLLM has them do: a block belongs to one of them at a time.
        tensors = [KVCacheTensor(size, group.layer_names, layer_stride=0, block_stride=PAGE_BYTES) for group in groups]
        config_class = ZeroedKVCacheConfig if shape.is_zeroing else KVCacheConfig
        kv_config = config_class(shape.gpu_blocks, tensors, groups, hash_block_size=BLOCK_TOKENS)
        self.gpu = np.full((shape.gpu_blocks, BLOCK_TOKENS, LANES), RUBBISH, dtype=np.uint64)
        layers = torch.from_numpy(self.gpu.view(np.float32)).view(shape.gpu_blocks, 2, BLOCK_TOKENS, 1, LANES)
        # The worker first, as in an engine.
        self.worker = KVTierConnector(config, KVConnectorRole.WORKER, kv_config)
        self.worker.register_kv_caches({group.layer_names[0]: layers for group in groups})
        side = self.worker.connector_worker
        assert side.worker is not None
        self.copies = side.worker = SlowCopies(side.worker)
        config.scheduler_config.async_scheduling = shape.is_async
        self.scheduler = (SplitScheduler if shape.is_splitting else (AsyncScheduler if shape.is_async else Scheduler))(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
            log_stats=shape.log_stats,
        )
        self._take_images_and_adapters()
        connector = self.scheduler.connector
        assert isinstance(connector, KVTierConnector)
        assert connector.connector_scheduler is not None
        self.connector = connector
        declared = self.worker.get_handshake_metadata()
        assert declared is not None
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): NOT_OURS if is_child else declared})
        self.side: AdmittingScheduler = connector.connector_scheduler
        self.manager: KVTierManager = self.side.manager
        if shape.is_splitting:
            self._split_all()
        self.tier = self.manager.tier
        self.answers: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        """By request, how many tokens of its prompt were computed, again after each preemption."""
        self.pieces: list[tuple[str, int]] = []
        """Of the loads, in their order: whose it was and how many blocks."""
        self.told: list[EngineCoreOutputs] = []
        self.steps = self.preemptions = 0
        self._fresh: list[int] = []
        self._in_flight: list[_Batch] = []
        self._values: dict[str, tuple[Words, str | None]] = {}
        """By request, with what they were computed with last."""
        self._observed: dict[tuple[str, tuple[str, ...]], float] = {}
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._observe()
        self._note_new_blocks()

    def _note_new_blocks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        take = pool.get_new_blocks

        def take_noting(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            self._fresh += [block.block_id for block in blocks]
            return blocks

        pool.get_new_blocks = take_noting

    def _take_images_and_adapters(self) -> None:
        """Have the scheduler treat the model as one that takes images, and compute few adapters in a step."""
        self.scheduler.max_num_encoder_input_tokens = self.shape.most_tokens
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=self.shape.most_tokens)
        self.scheduler.lora_config = LoRAConfig(max_loras=self.shape.most_loras)
        manager = self.scheduler.kv_cache_manager
        find = manager.get_computed_blocks

        def find_without_adapters(request: Request, *args: Any, **kwargs: Any) -> Any:
            blocks, *counts = find(request, *args, **kwargs)
            is_found = request.lora_request is None or self.shape.is_sharing_adapters
            return (blocks, *counts) if is_found else (manager.empty_kv_cache_blocks, *[0] * len(counts))

        manager.get_computed_blocks = find_without_adapters  # type: ignore[method-assign]  # it calls the real one

    def _split_all(self) -> None:
        """Have each hit split that can be, in heads of a few blocks, whatever the volume gives."""
        splits, ways = self.manager.splits, {True: Way.SPLIT, False: Way.LOAD}
        splits.rates.choose = lambda *_, may_split, **__: ways[may_split]  # type: ignore[method-assign]  # as above
        splits.head_tokens = splits.least_head_tokens = 2 * BLOCK_TOKENS
        splits.join_seconds = 0.0

    def get_model(self) -> torch.nn.Module:
        """Return the model, as vLLM's workers do; the first of its weights decides all values."""
        return self.model

    def add_lora(self, request: LoRARequest) -> bool:
        return self.lora_manager.add_adapter(request)

    def update_weights(self, seed: int, *, resets_connector: bool = True, by_data: bool = False) -> None:
        """Replace the weights in place and reset the caches: all of them first, or the GPU's alone afterwards.

        With `by_data` the write counts no version of the tensor.
        """
        if resets_connector:
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.fill_weights(seed, by_data=by_data)
        if not resets_connector:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self._values.clear()

    def sleep(self, *, is_aborting: bool) -> None:
        """Sleep as vLLM does, when all requests have ended and nothing moves any more, and wake without any KV."""
        if is_aborting:
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.settle()
        while self.scheduler.has_requests():
            self.run(lambda: not self.scheduler.has_requests())
            self.settle()
        assert not self.copies.waiting, "it would copy from or to memory that is gone"
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.gpu[:] = RUBBISH
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def execute(self) -> None:
        """Have the worker do all steps that are scheduled, as it does before it takes a call for itself."""
        for batch in self._in_flight:
            self._execute(batch)

    def fill_weights(self, seed: int, *, by_data: bool = False) -> None:
        self.execute()
        with torch.no_grad():
            (self.model.weight.data if by_data else self.model.weight).fill_(float(seed))

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        salt: str | None = None,
        answer: int = 1,
        lora: LoRARequest | None = None,
        **params: Any,
    ) -> Request:
        """Let a request arrive, or more of one that is `resumable`; ``image`` puts one there; others are parameters."""
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.0)
        request = Request(
            name,
            list(prompt),
            sampling,
            None,
            cache_salt=salt,
            lora_request=lora,
            block_hasher=self._hasher,
            mm_features=images_of(params.pop("image", None)),
            resumable=params.pop("resumable", False),
        )
        if params:
            request.kv_transfer_params = params
        self.computed.setdefault(name, 0)
        self.scheduler.add_request(request)
        return request

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule a step, and take in the output of the one before it (asynchronous scheduling) or its own."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        jobs = output.kv_connector_metadata.load_jobs.values()
        self.pieces += [(job.req_id, len(job.dst_spec.block_ids)) for job in jobs]
        blocks_of = self.scheduler.kv_cache_manager.get_block_ids
        requests = {name: self.scheduler.requests[name] for name in output.num_scheduled_tokens}
        parts = {name: _Part(each, each.num_computed_tokens, blocks_of(name)) for name, each in requests.items()}
        self._in_flight.append(_Batch(output, parts, self._fresh))
        self._fresh = []
        self.settle(int(self.shape.is_async))
        return output

    def settle(self, in_flight: int = 0) -> None:
        """Take in the outputs of all steps but so many."""
        while len(self._in_flight) > in_flight:
            batch = self._in_flight.pop(0)
            self._execute(batch)
            assert batch.made is not None
            self.told += self.scheduler.update_from_output(batch.output, batch.made).values()
            for later in self._in_flight:
                later.replaced |= batch.replaced

    def _execute(self, batch: _Batch) -> None:
        """Do what the worker does with a step."""
        if batch.made is not None:
            return
        output, metadata = batch.output, batch.output.kv_connector_metadata
        self.gpu[batch.fresh if self.shape.is_zeroing else []] = RUBBISH
        self.worker.handle_preemptions(metadata)
        # As vLLM's runner does, before its forward pass and before it tells the connector what to do.
        running = [part.request.lora_request for part in batch.parts.values()]
        self.lora_manager.set_active_adapters({each for each in running if each is not None})
        # What is stored from a block that was given away has been copied by now.
        self.gpu[batch.fresh] = RUBBISH
        self.worker.bind_connector_metadata(metadata)
        is_sync = getattr(output, "has_sync_kv_loads", False)
        if is_sync:
            self.worker.start_load_kv(None)  # type: ignore[arg-type]  # it is not looked at
        counts = output.num_scheduled_tokens
        sampled = {name: self._compute(name, counts[name], part, batch) for name, part in batch.parts.items()}
        if not is_sync:
            self.worker.start_load_kv(None)  # type: ignore[arg-type]  # as above
        self.worker.wait_for_save()
        reported = KVConnectorOutput()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        reported.finished_sending, reported.finished_recving = results.finished_sending, results.finished_recving
        reported.failed_recving = results.failed_recving
        reported.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        reported.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        if getattr(reported.kv_connector_worker_meta, "replaced", ()):
            batch.replaced |= reported.invalid_block_ids
        for name, what in batch.wrong.items():
            assert batch.replaced.intersection(batch.parts[name].blocks[0]), f"{name}: {what}"
        names = list(sampled)
        batch.made = ModelRunnerOutput(
            names,
            {name: number for number, name in enumerate(names)},
            [[] if sampled[name] is None else [sampled[name]] for name in names],
            kv_connector_output=reported,
        )

    def is_loading(self, name: str) -> bool:
        """Say whether the scheduler has not heard yet that the load of a request has ended."""
        return name in {*self.side._loads, *self.side._ended, *self.side._ending}

    def run(self, until: Callable[[], bool] | None = None, *, most_steps: int | None = None) -> None:
        """Step until a condition holds; without one, until nothing is left to do."""
        until = until or self.is_idle
        deadline = time.monotonic() + PATIENCE_SECONDS
        began = self.steps
        while not until():
            self.step()
            assert most_steps is None or self.steps - began <= most_steps, f"not there after {most_steps} steps"
            assert time.monotonic() < deadline, f"not there after {PATIENCE_SECONDS} s: {self.describe()}"
            # A step of an engine takes a millisecond at least.
            threading.Event().wait(0.0005)

    def ask(self, name: str, prompt: Sequence[int], **options: Any) -> int:
        """Serve one request to its end; return how many tokens of it were computed."""
        self.add(name, prompt, **options)
        self.run(lambda: name in self.answers)
        source = self.source_of(options.get("salt"), options.get("lora"))
        assert self.answers[name] == answer_of(prompt, len(self.answers[name]), salt=source), (
            "another answer than without a cache"
        )
        return self.computed[name]

    def source_of(self, salt: str | None, lora: LoRARequest | None) -> str | None:
        """Return what decides values besides the tokens: the salt, and the contents of the adapter that is loaded."""
        if seed := int(self.model.weight[0, 0].item()):
            salt = f"{salt} and weights {seed}"
        return salt if lora is None else f"{salt} with {self.lora_manager.contents(lora)}"

    def hashes_of(self, prompt: Sequence[int], salt: str | None = None) -> list[bytes]:
        request = Request("hashes", list(prompt), SamplingParams(), None, cache_salt=salt, block_hasher=self._hasher)
        size = self.shape.blocks_per_chunk
        return request.block_hashes[size - 1 :: size]

    def wait_until_attached(self) -> None:
        wait_until(lambda: self.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")

    def wait_for_lookup(self) -> None:
        """Wait, without a step, until the volume has answered what was asked; the next step knows it."""
        ours, workers = self.tier.lookups, self.tier.attachment.lookups
        wait_until(lambda: not ours.is_open or workers.wait(0.0), "the volume has answered")

    def take_landed(self) -> float:
        """Take in what was read without a step; return how many blocks that were since the start."""
        self.manager.poll()
        return self.metric("vllm:kvtier_disk_read_blocks")

    def is_idle(self) -> bool:
        is_asked = self.scheduler.has_requests() or self.connector.has_pending_push_work()
        return not (is_asked or any(batch.parts for batch in self._in_flight))

    def status(self, name: str) -> RequestStatus:
        return self.scheduler.requests[name].status

    def describe(self) -> str:
        return ", ".join(f"{name} {request.status.name}" for name, request in self.scheduler.requests.items())

    def assert_nothing_is_left(self) -> None:
        """Check, when it is idle, that every block and row is free and nobody is remembered."""
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.shape.gpu_blocks - 1, "GPU blocks stay taken"
        assert not self.side._req_status
        primary = self.manager.primary_tier
        free = primary._get_num_free_chunks() + primary._num_evictable_cache_chunks
        assert free == self.shape.cpu_chunks, f"{self.shape.cpu_chunks - free} rows of the CPU tier stay pinned"
        assert not self.manager.fetches.under_way
        assert not self.manager.fetches._lessees
        assert not self.manager.fetches._line
        assert not self.manager._loads
        assert self.manager.copying == 0
        assert not self.tier.has_pending_work()
        assert not self.side._first_tokens._waiting
        side = self.side
        for kept in (side._loads, side._loading, side._ending, side._ended, side._waits, side._stale_jobs):
            assert not kept

    def metric(self, name: str, *labels: str) -> float:
        """Return a metric of the disk tier, summed since the start; 0 if it was never observed."""
        self.tier.get_stats()
        return self._observed.get((name, labels), 0)

    def _observe(self) -> None:
        take = self.tier.get_stats

        def take_noting() -> OffloadingConnectorStats | None:
            stats = take()
            add_up(stats, self._observed)
            return stats

        self.tier.get_stats = take_noting  # type: ignore[method-assign]  # it calls the real one

    def _compute(self, name: str, count: int, part: _Part, batch: _Batch) -> int | None:
        """Check what a request builds upon, compute its next tokens, and return the one that follows, if it is time."""
        request, end = part.request, part.end
        begin = end - count
        tokens = list(request.all_token_ids)
        # What was sampled for a request that is taken back meanwhile is dropped.
        tokens += [0] * (end - len(tokens))
        values = self._values_of(request, tokens, begin)
        for group, blocks in enumerate(part.blocks):
            window = self.shape.windows[group]
            first = 0 if window is None else max(0, begin - window + 1)
            if what := self._find_wrong(blocks, page_of(values[first:begin], group), first):
                batch.wrong[name] = what
            places = np.arange(begin, end)
            ids = np.asarray(blocks)[places // BLOCK_TOKENS]
            assert ids.all(), "it would write into the null block"
            self.gpu[ids, places % BLOCK_TOKENS] = page_of(values[begin:end], group)
        self.computed[name] += max(0, min(end, request.num_prompt_tokens) - begin)
        if end < len(tokens):
            return None
        token = token_after(int(values[end - 1]))
        answer = [*request.output_token_ids, token]
        if len(answer) == request.max_tokens:
            self.answers[name] = answer
            del self._values[name]
        return token

    def _values_of(self, request: Request, tokens: Sequence[int], begin: int) -> Words:
        """Return the values of a request that goes on from one token with the weights and the adapter of now."""
        name, seen = request.request_id, seen_by_model(tokens, request.mm_features)
        source = self.source_of(request.cache_salt, request.lora_request)
        values, last = self._values.get(name, (None, None))
        if values is None or begin == 0:
            values = values_of(seen, source)
        elif last != source:
            # As vLLM has it do: what it began with one adapter and ends with another is nobody's else.
            values = np.concatenate([values[:begin], values_of(seen[begin:], f"{source} after {values[begin - 1]}")])
        elif len(values) < len(seen):
            values = np.concatenate([values, values_after(int(values[-1]), seen[len(values) :])])
        self._values[name] = values, source
        return values

    def _find_wrong(self, blocks: Sequence[int], wanted: Words, first: int) -> str:
        places = np.arange(first, first + len(wanted))
        held = self.gpu[np.asarray(blocks)[places // BLOCK_TOKENS], places % BLOCK_TOKENS]
        if np.array_equal(held, wanted):
            return ""
        wrong = int((held != wanted).any(axis=1).argmax())
        kind = "rubbish" if (held[wrong] == RUBBISH).all() else "other bytes"
        return f"token {first + wrong} of {first + len(wanted)} computed holds {kind}"
