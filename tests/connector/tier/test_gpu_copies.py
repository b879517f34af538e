# SPDX-License-Identifier: Apache-2.0
"""Copies of whole chunks against vLLM's copies of pages, byte for byte: on a GPU, and everywhere on a pretended one."""

from __future__ import annotations

import inspect
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from copies_rig import (
    CHUNKS,
    ENGINE_BLOCKS,
    SHAPES,
    Bus,
    Event,
    Shape,
    Side,
    Stream,
    Transfer,
    bytes_of,
    make_transfer,
    move_pages,
    open_side,
    pretend_gpu,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier_connector.tier.cells import Cells
from kvtier_connector.tier.gpu_copies import SPARE_BYTES, GatheringHandler, OneStream, cells_of, gather_copies
from kvtier_connector.tier.page_kernel import try_kernel

PATIENCE_SECONDS = 60
SLOTS = 2
"""In the staging buffer: fewer than the chunks of most transfers."""


@dataclass
class Pair:
    """The same engine twice: vLLM's handlers copy on one side, ours on the other."""

    stock: Side
    ours: Side
    stores: tuple[Any, Any]
    loads: tuple[Any, Any]
    bus: Bus | None
    """None on a GPU."""
    jobs: int = 0

    def store(self, transfer: Transfer) -> None:
        self.jobs += 1
        for handler in self.stores:
            assert handler.transfer_async(self.jobs, transfer.gpu, transfer.host)

    def load(self, transfer: Transfer) -> None:
        self.jobs += 1
        for handler in self.loads:
            assert handler.transfer_async(self.jobs, transfer.host, transfer.gpu)

    def settle(self) -> None:
        for handler in (*self.stores, *self.loads):
            handler.wait(set(range(self.jobs + 1)))

    def check(self) -> None:
        self.settle()
        assert torch.equal(self.ours.rows, self.stock.rows)
        for mine, theirs in zip(self.ours.tensors, self.stock.tensors, strict=True):
            assert torch.equal(mine, theirs)


def open_pair(shape: Shape, device: str, monkeypatch: pytest.MonkeyPatch, stack: ExitStack, *, free: int) -> Pair:
    bus = pretend_gpu(monkeypatch) if device == "cpu" else None
    stock, ours = (stack.enter_context(open_side(shape, device)) for _ in range(2))
    stores, loads = zip(stock.handlers(), ours.handlers(), strict=True)
    cells = cells_of(stores[1])
    assert isinstance(cells, Cells), cells
    options: dict[str, Any] = {"free": lambda _: free}
    if device == "cpu":
        options.update(moving=move_pages, make_stream=Stream)
    mine = [GatheringHandler(handler, replace(cells, slots=SLOTS), **options) for handler in (stores[1], loads[1])]
    pair = Pair(stock, ours, (stores[0], mine[0]), (loads[0], mine[1]), bus)
    for handler in (*pair.stores, *pair.loads, stores[1], loads[1]):
        stack.callback(handler.shutdown)
    return pair


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def pair(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield open_pair(request.param, device, monkeypatch, stack, free=1 << 40)


@pytest.fixture
def simple(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield open_pair(SHAPES["one group"], device, monkeypatch, stack, free=1 << 40)


def whole_chunks(chunks: list[int], first_block: int = 0, per_chunk: int = 4) -> Transfer:
    count = len(chunks) * per_chunk
    blocks = list(range(first_block, first_block + count))
    return Transfer(GPULoadStoreSpec(blocks, [count], [0]), CPULoadStoreSpec(chunks), count)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "partial"])
def test_a_store_leaves_the_same_bytes_as_vllms(pair: Pair, is_whole: bool) -> None:
    rng = random.Random(1)
    for _ in range(8):
        pair.store(make_transfer(pair.ours.shape, rng, is_whole=is_whole))
        pair.check()


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "partial"])
def test_a_load_leaves_the_same_bytes_as_vllms(pair: Pair, is_whole: bool) -> None:
    rng = random.Random(2)
    for _ in range(8):
        pair.load(make_transfer(pair.ours.shape, rng, is_whole=is_whole))
        pair.check()


def test_many_transfers_in_flight_leave_the_same_bytes_as_vllms(pair: Pair) -> None:
    rng = random.Random(3)
    for _ in range(60):
        pair.store(make_transfer(pair.ours.shape, rng, is_whole=rng.random() < 0.7))
    pair.check()
    for _ in range(60):
        pair.load(make_transfer(pair.ours.shape, rng, is_whole=rng.random() < 0.7))
    pair.check()


def test_a_store_of_blocks_that_were_just_loaded_stores_what_was_loaded(simple: Pair) -> None:
    for _ in range(20):
        simple.load(whole_chunks([3, 1, 2]))
        # The engine waits for loads, and computes, before it offers their blocks.
        simple.settle()
        for side in (simple.stock, simple.ours):
            side.tensors[0].add_(1)
        simple.store(whole_chunks([7, 9, 8]))
        simple.store(whole_chunks([3, 1, 2], first_block=2))
        simple.check()


def test_a_store_waits_for_what_the_engine_is_computing(simple: Pair) -> None:
    for round_ in range(20):
        for side in (simple.stock, simple.ours):
            for tensor in side.tensors:
                for _ in range(10):
                    tensor.add_(round_)
        simple.store(whole_chunks([round_, 20, 21]))
        simple.check()


def test_each_transfer_is_reported_once_with_the_bytes_of_its_blocks(pair: Pair) -> None:
    rng = random.Random(4)
    transfers = [make_transfer(pair.ours.shape, rng, is_whole=number % 2 == 0) for number in range(6)]
    for transfer in transfers:
        pair.store(transfer)
    results: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(results) < len(transfers):
        assert time.monotonic() < deadline
        results += pair.stores[1].get_finished()

    assert [(result.job_id, result.success) for result in results] == [(n + 1, True) for n in range(len(transfers))]
    expected = [bytes_of(pair.ours.shape, transfer.gpu.group_sizes) for transfer in transfers]
    assert [result.transfer_size for result in results] == expected
    assert all(result.transfer_time >= 0 for result in results)
    assert pair.stores[1].get_finished() == []


def test_without_memory_to_spare_pages_are_copied_for_good(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        pair = open_pair(SHAPES["one group"], device, monkeypatch, stack, free=SPARE_BYTES)
        rng = random.Random(5)
        for _ in range(4):
            pair.store(make_transfer(pair.ours.shape, rng, is_whole=True))
            pair.load(make_transfer(pair.ours.shape, rng, is_whole=False))
        pair.check()
        if pair.bus is not None:
            # Each call twice, once for each side, and equal.
            assert pair.bus.descriptors[::2] == pair.bus.descriptors[1::2]


# What follows counts copies, which needs the pretended bus.


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield open_pair(SHAPES["one group"], "cpu", monkeypatch, stack, free=1 << 40)


def descriptors(pair: Pair) -> list[int]:
    """Return how many copies each call had since the last time, vLLM's first."""
    assert pair.bus is not None
    counts, pair.bus.descriptors = pair.bus.descriptors, []
    return counts


def test_a_chunk_is_one_copy_where_vllm_makes_one_of_each_page(pretended: Pair) -> None:
    pretended.store(whole_chunks([5, 2, 4]))
    assert descriptors(pretended) == [48, 2, 1]
    pretended.load(whole_chunks([5, 2, 4]))
    assert descriptors(pretended) == [48, 2, 1]


def test_a_part_of_a_chunk_is_stored_page_by_page(pretended: Pair) -> None:
    pretended.store(Transfer(GPULoadStoreSpec([1, 2, 3], [3], [0]), CPULoadStoreSpec([5]), 3))
    assert descriptors(pretended) == [12, 12]


def test_a_small_part_of_a_chunk_is_loaded_page_by_page_and_a_large_one_whole(pretended: Pair) -> None:
    pretended.load(Transfer(GPULoadStoreSpec([1], [1], [2]), CPULoadStoreSpec([5]), 1))
    assert descriptors(pretended) == [4, 4]
    pretended.load(Transfer(GPULoadStoreSpec([1, 2, 3], [3], [1]), CPULoadStoreSpec([5]), 3))
    assert descriptors(pretended) == [12, 1]
    pretended.check()


def test_a_transfer_that_has_not_ended_is_not_reported_and_waiting_ends_it(pretended: Pair) -> None:
    Event.held = True
    pretended.store(whole_chunks([1, 2]))
    ours = pretended.stores[1]
    assert ours.get_finished() == []
    ours.wait({1})
    assert [result.job_id for result in ours.get_finished()] == [1]


def test_a_transfer_of_nothing_is_reported_too(pretended: Pair) -> None:
    pretended.store(Transfer(GPULoadStoreSpec([], [0], [0]), CPULoadStoreSpec([]), 0))
    assert [(result.job_id, result.transfer_size) for result in pretended.stores[1].get_finished()] == [(1, 0)]


def test_what_we_override_in_vllms_handler_is_what_it_calls() -> None:
    stock = gpu_worker.SingleDirectionOffloadingHandler
    source = inspect.getsource(stock.transfer_async)
    for call in ("self._estimate_max_copy_ops(group_sizes)", "self._fill_group_ops(", "self._swap_blocks_batch("):
        assert source.count(call) == 1
    # The copies are enqueued on the stream of the transfer, between its events.
    assert (
        source.index("start_event.record") < source.index("self._swap_blocks_batch(") < source.index("end_event.record")
    )
    fill = inspect.signature(stock._fill_direct_ops).parameters
    assert list(fill) == list(inspect.signature(GatheringHandler._fill_cells).parameters)
    assert list(inspect.signature(stock._estimate_max_copy_ops).parameters) == ["self", "group_sizes"]


def test_vllms_worker_has_the_handlers_that_are_replaced() -> None:
    source = inspect.getsource(gpu_worker.CPUOffloadingWorker)
    for use in (
        "self._store_handler.transfer_async(",
        "self._load_handler.transfer_async(",
        "self._store_handler.get_finished() + self._load_handler.get_finished()",
        "self._store_handler.wait(",
        "self._load_handler.wait(",
        "self._store_handler.shutdown()",
        "self._load_handler.shutdown()",
        "self._mmap_region = mmap_region",
    ):
        assert use in source


def test_padded_pages_and_the_canonical_layout_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    with open_side(SHAPES["packed"], "cpu") as side:
        store, load = side.handlers()
        store.layer_refs_per_group[0][1].page_size_bytes -= 16
        assert "padded" in str(cells_of(store))
        store._canonical_copy_plans = []
        assert "canonical" in str(cells_of(store))
        for handler in (store, load):
            handler.shutdown()


def test_a_worker_that_is_not_cudas_is_left_as_it_is() -> None:
    worker = object()
    assert gather_copies(worker) == "the GPU is not CUDA's"


def run_the_kernel(how: str, **environment: str) -> str:
    script = Path(__file__).with_name("page_kernel_script.py")
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), how],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_the_kernel_moves_pages_rightly_when_it_is_interpreted() -> None:
    assert run_the_kernel("interpret", TRITON_INTERPRET="1") == "None"


def test_the_kernel_compiles_for_a_gpu_and_reads_and_writes_sixteen_bytes_at_once(tmp_path: Path) -> None:
    ptx = run_the_kernel("compile", TRITON_CACHE_DIR=str(tmp_path))
    assert len(re.findall(r"ld\.global\.v2\.b64", ptx)) == len(re.findall(r"st\.global\.v2\.b64", ptx)) > 0


# What follows needs a GPU altogether.


def test_every_transfer_of_a_direction_runs_on_the_same_stream() -> None:
    made: list[Stream] = []

    def make() -> Stream:
        made.append(Stream())
        return made[-1]

    streams = OneStream(make)
    assert streams
    assert not made
    first, second = streams.pop(), streams.pop()
    streams.append(first)
    streams.append(second)
    assert streams.pop() is first is second
    assert len(made) == 1


@pytest.mark.gpu
def test_the_kernel_compiles_and_moves_pages() -> None:
    assert try_kernel(torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [SHAPES["one group"], SHAPES["groups that share tensors"]], ids=["one", "groups"])
def test_a_worker_of_vllm_that_was_changed_stores_loads_waits_and_shuts_down(shape: Shape) -> None:
    with open_side(shape, "cuda", is_pinned=False) as side:
        worker = gpu_worker.CPUOffloadingWorker(side.caches(), shape.blocks_per_chunk, CHUNKS, side.region)
        assert gather_copies(worker) is None
        before = [tensor.clone() for tensor in side.tensors]
        count = 3 * shape.blocks_per_chunk
        rest = [0] * (len(shape.groups) - 1)
        there = GPULoadStoreSpec(list(range(count)), [count, *rest], [0, *rest])
        back = GPULoadStoreSpec(list(range(ENGINE_BLOCKS - count, ENGINE_BLOCKS)), [count, *rest], [0, *rest])
        worker.submit_store(1, there, CPULoadStoreSpec([4, 0, 6]))
        worker.wait({1})
        worker.submit_load(2, CPULoadStoreSpec([4, 0, 6]), back)
        worker.wait({2})

        assert {result.job_id for result in worker.get_finished()} == {1, 2}
        for tensor, old in zip(side.tensors, before, strict=True):
            assert torch.equal(tensor[ENGINE_BLOCKS - count :], old[:count])
        worker.shutdown()


@pytest.mark.gpu
def test_host_memory_that_is_not_pinned_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_worker, "pin_mmap_region", lambda region: None)
    with open_side(SHAPES["one group"], "cuda", is_pinned=False) as side:
        worker = gpu_worker.CPUOffloadingWorker(side.caches(), 4, CHUNKS, side.region)
        assert gather_copies(worker) == "host memory is not pinned"
        worker.shutdown()
