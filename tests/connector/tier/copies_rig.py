# SPDX-License-Identifier: Apache-2.0
"""KV caches and a shared region between which vLLM's handlers and ours copy: on a GPU, or on what passes for one here.

Without a GPU, tensors in ordinary memory claim to be on one, streams and events do nothing, and copies happen at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

ENGINE_BLOCKS = 96
CHUNKS = 24


class OnGpu(torch.Tensor):
    """A tensor in ordinary memory that says it is on a GPU."""

    is_cuda = True


class Event:
    """An event that has happened when it was recorded, unless it is told to wait."""

    held = False

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return not Event.held

    def synchronize(self) -> None:
        Event.held = False

    def elapsed_time(self, end: Event) -> float:
        return 2.0 if end.enable_timing else 0.0


class Stream:
    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class Platform:
    """What the handlers ask of vLLM's current platform."""

    Stream = Stream

    def current_stream(self) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_xpu(self) -> bool:
        return False

    def is_rocm(self) -> bool:
        return False


@dataclass
class Bus:
    """Copies between GPU and host memory, and what was asked of it."""

    descriptors: list[int] = field(default_factory=list)
    """How many each call had."""

    def copy(self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, *, is_src_access_order_any: bool) -> None:
        self.descriptors.append(len(sizes))
        for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


def move_pages(  # noqa: PLR0913 - as the kernel's
    table: torch.Tensor,
    moves: torch.Tensor,
    *,
    span: slice,
    staging: torch.Tensor,
    cell_bytes: int,
    blocks_per_chunk: int,
    to_staging: bool,
) -> None:
    """What the kernel does, page by page."""
    for move in moves[span].tolist():
        slot, inner = divmod(move >> 32, blocks_per_chunk)
        for address, stride, page_bytes, offset in table.tolist():
            page = address + (move & 0xFFFFFFFF) * stride
            staged = staging.data_ptr() + slot * cell_bytes + offset + inner * page_bytes
            assert staged + page_bytes <= staging.data_ptr() + staging.nbytes
            ctypes.memmove(*((staged, page) if to_staging else (page, staged)), page_bytes)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Bus:
    """Let vLLM's handlers run without a GPU."""
    bus = Bus()
    monkeypatch.setattr(gpu_worker, "current_platform", Platform())
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(ops, "swap_blocks_batch", bus.copy)
    monkeypatch.setattr(Event, "held", False)
    return bus


class Shape(NamedTuple):
    """What the KV caches of an engine look like."""

    pages: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    blocks_per_chunk: int
    padding: int = 0
    """Bytes between the pages of a tensor."""
    rank: int = 0
    ranks: int = 1

    @property
    def cell_bytes(self) -> int:
        return sum(self.pages) * self.blocks_per_chunk


SHAPES = {
    "one group": Shape((4096,) * 4, ((0, 1, 2, 3),), 4),
    "one block in a chunk": Shape((2048,) * 3, ((2, 0, 1),), 1),
    "pages of several sizes": Shape((16, 12304, 8192), ((0, 1, 2),), 3),
    "groups that share tensors": Shape((1024,) * 5, ((0, 1, 2, 3, 4), (4, 0, 2), (1, 2)), 2),
    "packed": Shape((640, 1280), ((0, 1),), 2, padding=4096),
    "second of two ranks": Shape((4096,) * 2, ((0, 1), (0, 1)), 4, rank=1, ranks=2),
}


class Transfer(NamedTuple):
    gpu: GPULoadStoreSpec
    host: CPULoadStoreSpec
    blocks: int


@dataclass
class Side:
    """The KV caches of an engine and its region: one for vLLM's handlers, an equal one for ours."""

    shape: Shape
    tensors: list[torch.Tensor]
    region: SharedOffloadRegion

    @property
    def rows(self) -> torch.Tensor:
        """[chunk, byte], of all ranks."""
        return self.region.base_tensor.view(CHUNKS, -1)

    def caches(self) -> CanonicalKVCaches:
        return CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, p) for t, p in zip(self.tensors, self.shape.pages, strict=True)],
            [[CanonicalKVCacheRef(t, self.shape.pages[t]) for t in group] for group in self.shape.groups],
        )

    def handler(self, views: list[torch.Tensor], *, gpu_to_cpu: bool) -> gpu_worker.SingleDirectionOffloadingHandler:
        return gpu_worker.SingleDirectionOffloadingHandler(
            gpu_tensors=list(self.tensors),
            cpu_tensors=list(views),
            blocks_per_chunk=self.shape.blocks_per_chunk,
            layer_refs_per_group=self.caches().group_data_refs,
            gpu_to_cpu=gpu_to_cpu,
        )

    def handlers(self) -> tuple[Any, Any]:
        """Return vLLM's handlers of stores and loads."""
        views = [self.region.create_next_worker_view(page * self.shape.blocks_per_chunk) for page in self.shape.pages]
        return self.handler(views, gpu_to_cpu=True), self.handler(views, gpu_to_cpu=False)


@contextlib.contextmanager
def open_side(shape: Shape, device: str, *, is_pinned: bool = True) -> Iterator[Side]:
    """Make an engine's memory, filled with the same bytes each time; a region is pinned only where there is a GPU."""
    generator = torch.Generator().manual_seed(1)
    tensors = []
    for page in shape.pages:
        storage = torch.randint(
            -128, 128, (ENGINE_BLOCKS, page + shape.padding), dtype=torch.int8, generator=generator
        ).to(device)
        tensor = storage[:, :page]
        tensors.append(tensor if device == "cuda" else tensor.as_subclass(OnGpu))
    region = SharedOffloadRegion(
        engine_id=f"test-{uuid.uuid4().hex}",
        num_chunks=CHUNKS,
        rank=shape.rank,
        kv_bytes_per_chunk=-(-shape.cell_bytes * shape.ranks // 4096) * 4096,
        cpu_page_size=shape.cell_bytes,
    )
    try:
        if device == "cuda" and is_pinned:
            gpu_worker.pin_mmap_region(region)
        side = Side(shape, tensors, region)
        side.rows.copy_(torch.randint(-128, 128, side.rows.shape, dtype=torch.int8, generator=generator))
        yield side
    finally:
        region.cleanup()


def make_transfer(shape: Shape, rng: random.Random, *, is_whole: bool, most_chunks: int = 5) -> Transfer:
    """Return a transfer of random blocks, with as many chunks for each group, the first and last partial or not."""
    length = shape.blocks_per_chunk
    free_blocks = rng.sample(range(ENGINE_BLOCKS), ENGINE_BLOCKS)
    free_chunks = rng.sample(range(CHUNKS), CHUNKS)
    sizes, starts, blocks, chunks = [], [], [], []
    for _ in shape.groups:
        count = rng.randrange(most_chunks + 1)
        first = rng.randrange(4) * length
        skipped, left = (0, 0) if is_whole or count < 2 else (rng.randrange(length), rng.randrange(length))
        size = count * length - skipped - left
        sizes.append(size)
        starts.append(first + skipped)
        blocks += [free_blocks.pop() for _ in range(size)]
        chunks += [free_chunks.pop() for _ in range(count)]
    return Transfer(GPULoadStoreSpec(blocks, sizes, starts), CPULoadStoreSpec(chunks), len(blocks))


def bytes_of(shape: Shape, sizes: Sequence[int]) -> int:
    return sum(size * sum(shape.pages[t] for t in members) for size, members in zip(sizes, shape.groups, strict=True))
