# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads by name, built as vLLM builds it, and every name of vLLM's that kvtier uses."""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import os
import pkgutil
import random
import textwrap
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rig import ROW_BYTES, Rigs, offloading_config
from vllm.lora.model_manager import LoRAModelManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_surface import USES, Use, names_of

import kvtier_connector.vllm_adapter
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.vllm_adapter import spec
from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker, locate
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier
from kvtier_connector.vllm_adapter.spec import KVTierSpec
from kvtier_connector.vllm_adapter.worker import KVTierMetadata, KVTierWorkerMetadata


def extra_config(rigs: Rigs) -> dict[str, object]:
    return {
        "cpu_bytes_to_use": 8 * ROW_BYTES,
        "secondary_tiers": [
            {
                "type": "SharedVolumeTier",
                "module_path": "kvtier_connector.vllm_adapter.secondary_tier",
                "config_file": str(rigs.config_file()),
            }
        ],
    }


def one_tensor() -> CanonicalKVCaches:
    tensor = torch.zeros((4, ROW_BYTES), dtype=torch.int8)
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, ROW_BYTES)], [[CanonicalKVCacheRef(0, ROW_BYTES)]])


def test_worker_and_manager_of_one_engine_share_one_region(rigs: Rigs) -> None:
    config = offloading_config(extra_config=extra_config(rigs))
    # The worker first, as in an engine; the scheduler's clearing must leave its region alone.
    worker = KVTierSpec(config).get_worker(one_tensor())
    manager = KVTierSpec(config).get_manager()
    assert isinstance(worker, CpuCopyWorker)
    (tier,) = manager.secondary_tiers
    assert isinstance(tier, SharedVolumeTier)
    assert Path(f"/dev/shm/vllm_offload_{config.engine_id}.mmap").exists()
    manager.shutdown()
    worker.shutdown()
    assert not Path(f"/dev/shm/vllm_offload_{config.engine_id}.mmap").exists()


def test_a_region_that_a_dead_engine_left_is_removed_before_the_new_one_is_made(rigs: Rigs) -> None:
    stale = Path(f"/dev/shm/vllm_offload_test-stale-{uuid.uuid4().hex}.mmap")
    stale.write_bytes(bytes(4096))
    worker = KVTierSpec(offloading_config(extra_config=extra_config(rigs))).get_worker(one_tensor())
    assert not stale.exists()
    worker.shutdown()


NEW_MOUNTS = 0x00020000
PRIVATE_AND_BELOW = 0x00044000


def with_little_shared_memory(action: Callable[[], None]) -> None:
    """Run it on a thread that sees a /dev/shm of 1 MiB; nobody else does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def run() -> None:
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(b"none", b"/", None, PRIVATE_AND_BELOW, None) == 0
        assert libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
        action()

    if os.geteuid() != 0:
        pytest.skip("only root can mount here")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


REMEDY = (
    r"^/dev/shm is too small: the CPU tier needs 2 MiB there and [01] of 1 MiB are free .*\. Lower spec.cpu.size of "
    "the KVCacheTier. In a pod of your own, lower cpu_bytes_to_use or mount a larger emptyDir"
)


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_cpu_tier_that_does_not_fit_into_shared_memory_names_the_setting_to_change(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, *, is_noticed: bool
) -> None:
    if not is_noticed:
        # vLLM looks at what is free before it takes it, and so does the other engine of a pod.
        monkeypatch.setattr("vllm.v1.kv_offload.cpu.shared_offload_region.check_shm_free_space", lambda *_, **__: None)

    def start() -> None:
        config = offloading_config(extra_config={**extra_config(rigs), "cpu_bytes_to_use": 2 << 20})
        with pytest.raises(ConfigInvalid, match=REMEDY):
            KVTierSpec(config).get_worker(one_tensor())
        assert not is_noticed or list(Path("/dev/shm").iterdir()) == []

    with_little_shared_memory(start)


ENGINE_BLOCKS = 24
CHUNKS = 12
PAGES = (96, 160)


def region_of(chunk_bytes: int = 4096, *, name: str = "", rank: int = 0) -> SharedOffloadRegion:
    name = name or f"test-{uuid.uuid4().hex}"
    return SharedOffloadRegion(
        engine_id=name, num_chunks=CHUNKS, rank=rank, kv_bytes_per_chunk=4096, cpu_page_size=chunk_bytes
    )


@dataclass
class Bench:
    """A worker between an engine's tensors and a region, and a plain copy of both to compare with."""

    worker: CpuCopyWorker
    tensors: list[torch.Tensor]
    rows: torch.Tensor
    blocks_per_chunk: int
    refs: list[list[CanonicalKVCacheRef]]

    def chunk_bytes(self, tensor: int) -> slice:
        start = sum(PAGES[:tensor]) * self.blocks_per_chunk
        return slice(start, start + PAGES[tensor] * self.blocks_per_chunk)


@pytest.fixture(params=[1, 2, 3])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    blocks_per_chunk: int = request.param
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randint(-128, 128, (ENGINE_BLOCKS, page), dtype=torch.int8, generator=generator) for page in PAGES]
    # Group 0 has both tensors, the second with a padded page; group 1 shares the second tensor.
    refs = [
        [CanonicalKVCacheRef(0, PAGES[0]), CanonicalKVCacheRef(1, PAGES[1] - 32)],
        [CanonicalKVCacheRef(1, PAGES[1])],
    ]
    region = region_of(sum(PAGES) * blocks_per_chunk)
    worker = CpuCopyWorker(
        CanonicalKVCaches([CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, PAGES, strict=True)], refs),
        blocks_per_chunk=blocks_per_chunk,
        region=region,
    )
    rows = region.base_tensor.view(CHUNKS, 4096)
    made = Bench(worker, tensors, rows, blocks_per_chunk, refs)
    yield made
    made.rows = made.tensors[0]
    del rows
    worker.shutdown()


def plan(rng: random.Random, blocks_per_chunk: int) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec, list[tuple[int, ...]]]:
    """Return a transfer of random runs of blocks, and its meaning block by block: group, engine block, chunk, place."""
    engine_blocks = rng.sample(range(ENGINE_BLOCKS), ENGINE_BLOCKS)
    free_chunks = rng.sample(range(CHUNKS), CHUNKS)
    sizes, starts, blocks, chunks, meaning = [], [], [], [], []
    for group in range(2):
        size = rng.choice([0, 1, 2, 3, 4, 5])
        start = rng.randrange(10)
        sizes.append(size)
        starts.append(start)
        own_chunks: dict[int, int] = {}
        for number in range(start, start + size):
            logical_chunk, inner = divmod(number, blocks_per_chunk)
            if logical_chunk not in own_chunks:
                own_chunks[logical_chunk] = free_chunks.pop()
            block = engine_blocks.pop()
            blocks.append(block)
            meaning.append((group, block, own_chunks[logical_chunk], inner))
        chunks.extend(own_chunks.values())
    return GPULoadStoreSpec(blocks, sizes, starts), CPULoadStoreSpec(chunks), meaning


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
def test_a_transfer_copies_what_a_plain_loop_copies(bench: Bench, seed: int, *, is_store: bool) -> None:
    gpu, cpu, meaning = plan(random.Random(seed), bench.blocks_per_chunk)
    bench.rows.copy_(torch.randint(-128, 128, bench.rows.shape, dtype=torch.int8))
    rows, tensors = bench.rows.clone(), [tensor.clone() for tensor in bench.tensors]
    for group, block, chunk, inner in meaning:
        for ref in bench.refs[group]:
            start = bench.chunk_bytes(ref.tensor_idx).start + inner * PAGES[ref.tensor_idx]
            page = ref.page_size_bytes
            in_row, in_tensor = rows[chunk, start : start + page], tensors[ref.tensor_idx][block, :page]
            (in_row if is_store else in_tensor).copy_(in_tensor if is_store else in_row)
    assert bench.worker.submit_store(1, gpu, cpu) if is_store else bench.worker.submit_load(2, cpu, gpu)
    assert torch.equal(bench.rows, rows)
    assert all(map(torch.equal, bench.tensors, tensors))


def test_each_transfer_is_reported_once_with_its_bytes(bench: Bench) -> None:
    gpu = GPULoadStoreSpec([1], [1, 0], [0, 0])
    bench.worker.submit_store(7, gpu, CPULoadStoreSpec([0]))
    bench.worker.submit_load(8, CPULoadStoreSpec([0]), gpu)
    bench.worker.wait({7, 8})
    results = bench.worker.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(7, True), (8, True)]
    assert {result.transfer_size for result in results} == {PAGES[0] + PAGES[1] - 32}
    assert all(result.transfer_time is not None for result in results)
    assert bench.worker.get_finished() == []


HEADS, TOKENS, ROW = 4, 2, 8
"""Of the canonical page: keys and values of a head are 8 bytes a token."""


def page_of_rank(rank: int, ranks: int) -> CanonicalPageMapping:
    """Return the place of one rank's heads in pages that are ordered by token, then by head."""
    holders = max(1, ranks // HEADS)
    mine = HEADS // (ranks // holders) * ROW
    run = CopyRun(0, rank // holders * mine, mine, TOKENS, mine, HEADS * ROW)
    size = HEADS * ROW * TOKENS
    return CanonicalPageMapping(size, mine * TOKENS, (run,), holders, rank % holders, parallelism_agnostic=True)


def engine(ranks: int, name: str) -> list[tuple[CpuCopyWorker, torch.Tensor]]:
    """Return the workers of an engine and their memory, over one region."""
    made = []
    for rank in range(ranks):
        mapping = page_of_rank(rank, ranks)
        size = mapping.local_page_size_bytes
        region = region_of(4096 // ranks, name=name, rank=rank)
        memory = torch.zeros((ENGINE_BLOCKS, size), dtype=torch.int8)
        refs = [[CanonicalKVCacheRef(0, size, mapping)]]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(memory, size)], refs)
        made.append((CpuCopyWorker(caches, blocks_per_chunk=2, region=region, is_canonical=True), memory))
    return made


def heads_of_rank(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what a rank holds of blocks that were computed without parallelism."""
    holders = max(1, ranks // HEADS)
    shards, shard = ranks // holders, rank // holders
    return whole.view(-1, TOKENS, shards, HEADS // shards * ROW)[:, :, shard].reshape(len(whole), -1)


@pytest.mark.parametrize("before", [1, 2, 4, 8])
@pytest.mark.parametrize("after", [1, 2, 4, 8])
def test_what_some_ranks_store_in_the_canonical_layout_any_other_number_of_ranks_loads(before: int, after: int) -> None:
    name = f"test-{uuid.uuid4().hex}"
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(-128, 128, (ENGINE_BLOCKS, HEADS * TOKENS * ROW), dtype=torch.int8, generator=generator)
    writers = engine(before, name)
    readers = engine(after, name)
    where = GPULoadStoreSpec(list(range(5)), group_sizes=[5], block_indices=[1])
    chunks = CPULoadStoreSpec(np.array([7, 3, 9], dtype=np.int32))
    for rank, (worker, memory) in enumerate(writers):
        memory[:] = heads_of_rank(whole, rank, before)
        assert worker.submit_store(1, where, chunks)
    for rank, (worker, memory) in enumerate(readers):
        assert worker.submit_load(2, chunks, where)
        assert torch.equal(memory[:5], heads_of_rank(whole, rank, after)[:5])
        assert not memory[5:].any()
    for worker, _ in (*readers, *writers):
        worker.shutdown()


def test_a_layer_without_a_canonical_page_and_a_transfer_of_other_chunks_are_refused() -> None:
    memory = torch.zeros((2, 64), dtype=torch.int8)
    for mapping in (None, CanonicalPageMapping(64, 64, (), 1, 0, parallelism_agnostic=False)):
        region = region_of()
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(memory, 64)], [[CanonicalKVCacheRef(0, 64, mapping)]])
        with pytest.raises(ConfigInvalid, match="canonicalLayout"):
            CpuCopyWorker(caches, blocks_per_chunk=1, region=region, is_canonical=True, must_be_portable=True)
        region.cleanup()
    gpu = GPULoadStoreSpec([1, 2, 3], [3], [1])
    for chunks in ([0], [0, 1, 2]):
        with pytest.raises((ValueError, IndexError)):
            locate(gpu, np.array(chunks, dtype=np.int32), 2)


def test_all_copies_of_a_direction_go_by_one_stream_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: made.append(priority) or len(made))
    worker = SimpleNamespace(_store_handler=SimpleNamespace(), _load_handler=SimpleNamespace())
    spec._use_one_stream(worker)
    assert not made
    monkeypatch.setattr(spec.current_platform, "is_cuda", lambda: True)
    spec._use_one_stream(worker)
    # Streams of another priority share no queue with the one that computes.
    assert made == [-1, -1]
    for number, handler in enumerate((worker._store_handler, worker._load_handler), 1):
        handler._stream_pool.append(9)
        assert [handler._stream_pool and handler._stream_pool.pop() for _ in range(2)] == [number, number]


def test_an_error_that_is_not_of_shared_memory_passes(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("vllm.v1.kv_offload.cpu.shared_offload_region.check_shm_free_space", refuse)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        KVTierSpec(offloading_config(extra_config=extra_config(rigs))).get_worker(one_tensor())


def derived_classes() -> Iterator[type]:
    """Yield the classes of kvtier that derive from one of vLLM's."""
    for module in pkgutil.iter_modules(kvtier_connector.vllm_adapter.__path__):
        loaded = importlib.import_module(f"kvtier_connector.vllm_adapter.{module.name}")
        for found in vars(loaded).values():
            if isinstance(found, type) and found.__module__ == loaded.__name__ and bases_of(found):
                yield found


def bases_of(ours: type) -> list[type]:
    return [base for base in ours.__mro__ if base.__module__.startswith("vllm")]


def uses_of(ours: type) -> list[Use]:
    owners = {f"{base.__module__}:{base.__name__}" for base in bases_of(ours)}
    return [use for use in USES if use.owner in owners]


def overridden_by(ours: type) -> set[str]:
    theirs = {name for base in bases_of(ours) for name, value in vars(base).items() if callable(getattr(base, name))}
    return (set(vars(ours)) & theirs) - {name for name in theirs if name.startswith("__") and name != "__init__"}


def names_used_by(ours: type) -> set[str]:
    """Return the attributes of vLLM that the class reads of itself or of its parents."""
    theirs = {name for base in bases_of(ours) for name in names_of(base)}
    tree = ast.parse(textwrap.dedent(inspect.getsource(ours)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr != "__new__"
        and (
            (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"})
            or (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "super"
            )
        )
    } & theirs


OURS = list(derived_classes())
MADE_BY_US = (CpuCopyWorker, KVTierManager, KVTierMetadata, KVTierWorkerMetadata, Declared)
OVERRIDDEN = [
    (ours, name)
    for ours in OURS
    for name in sorted(overridden_by(ours))
    if name != "__init__" or ours not in MADE_BY_US
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.owner.rpartition(".")[2])
def test_vllm_has_every_name_and_parameter_that_kvtier_uses(use: Use) -> None:
    assert list(use.differences()) == []


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_method_that_says_so_overrides_one_of_vllm_and_no_other_does(ours: type) -> None:
    marked = {name for name in vars(ours) if getattr(getattr(ours, name), "__override__", False)}
    assert marked - {"__init__"} == overridden_by(ours) - {"__init__"}


@pytest.mark.parametrize("ours", OURS, ids=lambda ours: ours.__name__)
def test_every_name_of_vllm_that_a_derived_class_uses_is_listed(ours: type) -> None:
    uses = uses_of(ours)
    calls = {call.partition("(")[0] for use in uses for call in use.called}
    names = {name.rstrip("?") for use in uses for name in use.read}
    own = {name for each in ours.__mro__ if each in OURS for name in overridden_by(each)}
    assert names_used_by(ours) - own <= calls | names


@pytest.mark.parametrize(("ours", "name"), OVERRIDDEN, ids=[f"{ours.__name__}.{name}" for ours, name in OVERRIDDEN])
def test_an_overriding_method_takes_every_argument_of_vllm(ours: type, name: str) -> None:
    (theirs, *_) = (getattr(base, name) for base in bases_of(ours) if name in vars(base))
    mine = inspect.signature(inspect.unwrap(getattr(ours, name))).parameters
    wanted = [each for each, value in inspect.signature(theirs).parameters.items() if value.kind not in REST]
    if not any(each.kind is each.VAR_KEYWORD for each in mine.values()):
        assert [each for each in mine if each in wanted] == wanted
    added = [each for each in mine.values() if each.name not in wanted and each.kind not in REST]
    # vLLM passes the configuration of a tier to its constructor.
    assert name == "__init__" or all(each.default is not each.empty for each in added)


REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def test_vllm_makes_and_asks_its_objects_in_the_order_that_the_adapter_needs() -> None:
    assert ".register_kv_caches(" in inspect.getsource(GPUModelRunner.initialize_kv_cache)
    assert "self.model.lora_manager = self" in inspect.getsource(LoRAModelManager.__init__)
    source = inspect.getsource(Scheduler.__init__)
    assert source.index("create_connector(") < source.index(".kv_load_failure_policy")
    assert Request.__subclasses__() == []


def test_every_abstract_method_of_vllm_is_implemented() -> None:
    assert [ours for ours in OURS if inspect.isabstract(ours)] == []
    assert {SharedVolumeTier, CpuCopyWorker} <= set(OURS)
