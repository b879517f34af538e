# SPDX-License-Identifier: Apache-2.0
"""What copies between GPU and host memory cost, page by page and in whole chunks: ``python -m e2e.bench.gpu_copies``.

Needs an NVIDIA GPU and 7 GiB of its memory. Chunks of 8 MiB: 32 tensors, pages of 64 KiB, 4 blocks; as in a Llama of
8 billion parameters. The last table shows what stores do to matrix products that run at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier_connector.tier.gpu_copies import gather_copies

TENSORS = 32
PAGE_BYTES = 64 << 10
BLOCKS_PER_CHUNK = 4
CHUNK_BYTES = TENSORS * PAGE_BYTES * BLOCKS_PER_CHUNK
BLOCKS = 1024
CHUNKS = 256
PRODUCTS = 200
STORE_EVERY = 10
"""Products from one store to the next."""
STORED_CHUNKS = 16


class Copies:
    """One worker with KV caches and a region of its own."""

    def __init__(self, *, are_gathered: bool) -> None:
        """Allocate and pin."""
        caches = [torch.randint(0, 127, (BLOCKS, PAGE_BYTES), dtype=torch.int8, device="cuda") for _ in range(TENSORS)]
        region = SharedOffloadRegion(
            engine_id=f"bench-{uuid.uuid4().hex}",
            num_chunks=CHUNKS,
            rank=0,
            kv_bytes_per_chunk=CHUNK_BYTES,
            cpu_page_size=CHUNK_BYTES,
        )
        self.worker = CPUOffloadingWorker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(cache, PAGE_BYTES) for cache in caches],
                [[CanonicalKVCacheRef(number, PAGE_BYTES) for number in range(TENSORS)]],
            ),
            BLOCKS_PER_CHUNK,
            CHUNKS,
            region,
        )
        if are_gathered and (reason := gather_copies(self.worker)):
            sys.exit(f"whole chunks cannot be copied: {reason}")
        self._random = np.random.default_rng(0)
        self._jobs = 0

    def submit(self, chunks: int, *, is_store: bool) -> Callable[[], None]:
        """Return what submits one transfer of random blocks; making its lists is not part of it."""
        blocks = self._random.permutation(BLOCKS)[: chunks * BLOCKS_PER_CHUNK].tolist()
        gpu = GPULoadStoreSpec(blocks, [len(blocks)], [0])
        host = CPULoadStoreSpec(self._random.permutation(CHUNKS)[:chunks].tolist())

        def act() -> None:
            self._jobs += 1
            if is_store:
                self.worker.submit_store(self._jobs, gpu, host)
            else:
                self.worker.submit_load(self._jobs, host, gpu)

        return act

    def measure(self, chunks: int, *, is_store: bool, repetitions: int) -> tuple[float, float]:
        """Return the medians of the seconds until a transfer is submitted, and until it is done."""
        submitted, done = [], []
        for number in range(repetitions + 3):
            act = self.submit(chunks, is_store=is_store)
            torch.cuda.synchronize()
            began = time.perf_counter()
            act()
            submitted_at = time.perf_counter()
            torch.cuda.synchronize()
            done_at = time.perf_counter()
            self.worker.get_finished()
            if number >= 3:  # noqa: PLR2004 - the first ones allocate
                submitted.append(submitted_at - began)
                done.append(done_at - began)
        return statistics.median(submitted), statistics.median(done)


def products(beside: Callable[[], Any] | None, operands: tuple[torch.Tensor, ...]) -> float:
    """Return the seconds that the products take on the current stream, with something enqueued between them."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in range(PRODUCTS):
        torch.mm(operands[0], operands[1], out=operands[2])
        if beside is not None and number % STORE_EVERY == 0:
            beside()
    torch.cuda.current_stream().synchronize()
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    return seconds


def print_copies(workers: dict[str, Copies], repetitions: int) -> None:
    """Print a line for each size, direction and worker."""
    print("| copies | direction | chunks | CPU ms | total ms | GB/s |\n|---|---|---|---|---|---|")
    for is_store in (True, False):
        for chunks in (1, 16, 128):
            for name, copies in workers.items():
                submitted, done = copies.measure(chunks, is_store=is_store, repetitions=repetitions)
                direction = "store" if is_store else "load"
                rate = chunks * CHUNK_BYTES / done / 1e9
                print(f"| {name} | {direction} | {chunks} | {submitted * 1e3:.3f} | {done * 1e3:.3f} | {rate:.1f} |")


def print_products(workers: dict[str, Copies]) -> None:
    """Print how long the products take alone and beside the stores of each worker."""
    operands = tuple(
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((8192, 4096), (4096, 14336), (8192, 14336))
    )
    stores = PRODUCTS // STORE_EVERY
    print(f"\n| {PRODUCTS} matrix products beside {stores} stores of {STORED_CHUNKS} chunks | ms |\n|---|---|")
    for name, copies in (("alone", None), *workers.items(), ("alone again", None)):
        seconds = []
        for _ in range(6):
            act = None if copies is None else copies.submit(STORED_CHUNKS, is_store=True)
            seconds.append(products(act, operands))
            if copies is not None:
                copies.worker.get_finished()
        print(f"| {name} | {statistics.median(seconds[1:]) * 1e3:.1f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    workers = {"pages": Copies(are_gathered=False), "chunks": Copies(are_gathered=True)}
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n")
    print_copies(workers, options.repetitions)
    print_products(workers)
    for copies in workers.values():
        copies.worker.shutdown()


if __name__ == "__main__":
    main()
