# SPDX-License-Identifier: Apache-2.0
"""The copy worker of vLLM's CPU build against a loop that copies one block at a time."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier_connector.tier.cpu_worker import CpuCopyWorker, locate

ENGINE_BLOCKS = 24
CHUNKS = 12
PAGES = (96, 160)
"""Bytes of a block in each of the two tensors."""


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
    region = SharedOffloadRegion(
        engine_id=f"test-{uuid.uuid4().hex}",
        num_chunks=CHUNKS,
        rank=0,
        kv_bytes_per_chunk=4096,
        cpu_page_size=sum(PAGES) * blocks_per_chunk,
    )
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
def test_a_store_copies_what_a_plain_loop_copies_and_nothing_else(bench: Bench, seed: int) -> None:
    gpu, cpu, meaning = plan(random.Random(seed), bench.blocks_per_chunk)
    bench.rows.fill_(7)
    expected = bench.rows.clone()
    for group, block, chunk, inner in meaning:
        for ref in bench.refs[group]:
            start = bench.chunk_bytes(ref.tensor_idx).start + inner * PAGES[ref.tensor_idx]
            page = ref.page_size_bytes
            expected[chunk, start : start + page] = bench.tensors[ref.tensor_idx][block, :page]
    assert bench.worker.submit_store(1, gpu, cpu)

    assert torch.equal(bench.rows, expected)


@pytest.mark.parametrize("seed", range(8))
def test_a_load_copies_what_a_plain_loop_copies_and_nothing_else(bench: Bench, seed: int) -> None:
    gpu, cpu, meaning = plan(random.Random(seed), bench.blocks_per_chunk)
    bench.rows.copy_(torch.randint(-128, 128, bench.rows.shape, dtype=torch.int8))
    expected = [tensor.clone() for tensor in bench.tensors]
    for group, block, chunk, inner in meaning:
        for ref in bench.refs[group]:
            start = bench.chunk_bytes(ref.tensor_idx).start + inner * PAGES[ref.tensor_idx]
            page = ref.page_size_bytes
            expected[ref.tensor_idx][block, :page] = bench.rows[chunk, start : start + page]
    assert bench.worker.submit_load(2, cpu, gpu)

    for tensor, wanted in zip(bench.tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)


def test_what_was_stored_comes_back_into_other_blocks(bench: Bench) -> None:
    count = 2 * bench.blocks_per_chunk
    source = GPULoadStoreSpec(list(range(count)), [count, 0], [0, 0])
    target = GPULoadStoreSpec(list(range(20, 20 - count, -1)), [count, 0], [0, 0])
    before = bench.tensors[0].clone()
    bench.worker.submit_store(1, source, CPULoadStoreSpec([5, 2]))
    bench.worker.submit_load(2, CPULoadStoreSpec([5, 2]), target)

    for number in range(count):
        assert torch.equal(bench.tensors[0][20 - number], before[number])


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


def test_a_transfer_that_names_too_few_or_too_many_chunks_is_refused() -> None:
    gpu = GPULoadStoreSpec([1, 2, 3], [3], [1])
    for chunks in ([0], [0, 1, 2]):
        with pytest.raises(ValueError, match="chunks"):
            locate(gpu, np.array(chunks, dtype=np.int32), 2)
