# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading to host memory on vLLM's CPU build, which refuses it by itself: the same, with a memcpy worker.

Named to vLLM by the operator where a tier has no accelerator, so that the connector can be tried on a laptop; there
`KVTierSpec` has the same worker. Imported in the scheduler, in every worker and in the API server, so importing it
starts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.pod_tools.shm import clear_stale_regions, explaining_shortage

_Indices = npt.NDArray[np.int64]


class _Tensor(NamedTuple):
    """One canonical KV tensor of the engine and its part of the chunk rows, as bytes."""

    engine: npt.NDArray[np.uint8]
    """[block, byte]"""
    chunks: npt.NDArray[np.uint8]
    """[chunk, block in the chunk, byte]"""


class _Ref(NamedTuple):
    """A layer, or several that share their bytes."""

    tensor: int
    runs: tuple[tuple[slice, slice], ...]
    """Bytes that lie together on both sides: in the page of this worker, and in its place in the chunk."""
    size: int
    writers: int
    """Ranks that hold these bytes; they take turns to write them, block by block."""
    turn: int


def locate(
    gpu_spec: GPULoadStoreSpec, chunk_ids: npt.NDArray[np.int32], blocks_per_chunk: int
) -> list[tuple[_Indices, _Indices, _Indices]]:
    """Match the engine's blocks with their places in the chunks, group by group.

    The first chunk of a group may be entered in the middle and the last one left early; `block_indices` says at which
    block of the request each group starts.

    Returns:
        For each group, the engine's blocks, the chunk of each, and its number in the chunk.
    """
    groups = []
    first_block = first_chunk = 0
    for size, index in zip(gpu_spec.group_sizes, gpu_spec.block_indices, strict=True):
        places = index % blocks_per_chunk + np.arange(size, dtype=np.int64)
        numbers = first_chunk + places // blocks_per_chunk
        blocks = gpu_spec.block_ids[first_block : first_block + size].astype(np.int64)
        groups.append((blocks, chunk_ids[numbers].astype(np.int64), places % blocks_per_chunk))
        first_block += size
        first_chunk = int(numbers[-1]) + 1 if size else first_chunk
    if first_chunk != len(chunk_ids):
        raise ValueError(f"the transfer names {len(chunk_ids)} chunks, but its blocks fill {first_chunk}")
    return groups


class CpuCopyWorker(OffloadingWorker):
    """vLLM's offloading worker for KV caches in ordinary memory. Called from one thread, the engine worker's.

    Upstream's worker needs a device with streams. Here a copy is a memcpy on the cores that also compute, so a thread
    would gain nothing: a transfer is done when `submit_store` or `submit_load` returns, and is reported at the next
    `get_finished`. That also keeps the order that upstream promises: transfers happen in the order of submission, after
    all that the engine wrote before.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        *,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        is_canonical: bool = False,
        must_be_portable: bool = False,
    ) -> None:
        """Carve this rank's part of the rows, one view for each tensor; the region is ours to release from here on.

        Args:
            kv_caches: The engine's.
            blocks_per_chunk: Blocks of the engine in a chunk.
            region: The chunks.
            is_canonical: Whether all ranks share one page for each block, laid out as without parallelism.
            must_be_portable: Whether that page must be the same for any number of ranks.

        Raises:
            ConfigInvalid: vLLM has no such page for some layer.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._tensors: list[_Tensor] = []
        refs = kv_caches.group_data_refs
        shared_bytes = _canonical_bytes(refs, must_be_portable=must_be_portable) if is_canonical else {}
        for index, tensor in enumerate(kv_caches.tensors):
            page_bytes = tensor.page_size_bytes
            chunk_bytes = shared_bytes[index] if is_canonical else page_bytes
            carve = region.create_next_canonical_view if is_canonical else region.create_next_worker_view
            rows = carve(chunk_bytes * blocks_per_chunk).view(torch.uint8).numpy()
            engine = tensor.tensor.view(torch.uint8).view((-1, page_bytes)).numpy()
            # A view: each row is split where it is.
            self._tensors.append(_Tensor(engine, rows.reshape(len(rows), blocks_per_chunk, chunk_bytes)))
        self._groups = [[_plan(ref, is_canonical=is_canonical) for ref in group] for group in refs]
        self._finished: list[TransferResult] = []

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, is_store=True)

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Copy at once; nothing could be more `expedited`."""
        return self._transfer(job_id, dst_spec, src_spec, is_store=False)

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: what was submitted is done."""

    @override
    def shutdown(self) -> None:
        self._finished.clear()
        # The region cannot be unmapped while an array still points into it.
        self._tensors.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None

    def _transfer(
        self, job_id: int, engine: GPULoadStoreSpec, primary: BlockIDsLoadStoreSpec, *, is_store: bool
    ) -> bool:
        started = time.perf_counter()
        groups = locate(engine, primary.block_ids, self._blocks_per_chunk)
        transfer_bytes = 0
        for place, refs in zip(groups, self._groups, strict=True):
            for ref in refs:
                blocks, chunks, inner = place
                if is_store and ref.writers > 1:
                    mine = (chunks * self._blocks_per_chunk + inner) % ref.writers == ref.turn
                    blocks, chunks, inner = blocks[mine], chunks[mine], inner[mine]
                held = self._tensors[ref.tensor]
                # Bytes past the page are padding, which upstream does not copy either.
                for in_page, in_chunk in ref.runs:
                    if is_store:
                        held.chunks[chunks, inner, in_chunk] = held.engine[blocks, in_page]
                    else:
                        held.engine[blocks, in_page] = held.chunks[chunks, inner, in_chunk]
                transfer_bytes += len(blocks) * ref.size
        seconds = time.perf_counter() - started
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=transfer_bytes, transfer_time=seconds)
        )
        return True


class CpuBuildOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec of the same settings; each rank has its part of one region in /dev/shm."""

    _cpu_worker: CpuCopyWorker | None = None

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._cpu_worker is None:
            clear_stale_regions()
            with explaining_shortage(self.num_chunks * self.kv_bytes_per_chunk):
                self._cpu_worker = make_worker(self, kv_caches)
        return self._cpu_worker


def make_region(spec: CPUOffloadingSpec, *, rank: int | None) -> SharedOffloadRegion:
    """Return the CPU tier in /dev/shm as a rank of the engine has it, or, for None, as its scheduler does."""
    return SharedOffloadRegion(
        engine_id=spec.config.engine_id,
        num_chunks=spec.num_chunks,
        rank=rank,
        kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
        cpu_page_size=spec.cpu_page_size_per_worker,
    )


def make_worker(spec: CPUOffloadingSpec, kv_caches: CanonicalKVCaches) -> CpuCopyWorker:
    """Return the worker of a rank, with the region in /dev/shm that all of them share."""
    config = spec.config
    region = make_region(spec, rank=0 if spec.replicated_layout else config.parallel.rank)
    try:
        return CpuCopyWorker(
            kv_caches,
            blocks_per_chunk=spec.blocks_per_chunk,
            region=region,
            is_canonical=config.canonical_layout,
            # The directory is the same for every number of ranks.
            must_be_portable=config.parallel.is_parallelism_agnostic,
        )
    except Exception:
        region.cleanup()
        raise


def _canonical_bytes(refs: Sequence[Sequence[CanonicalKVCacheRef]], *, must_be_portable: bool) -> dict[int, int]:
    """Return, by tensor, the bytes of a block as without parallelism."""
    sizes: dict[int, int] = {}
    for ref in (each for group in refs for each in group):
        if ref.mapping is None or (must_be_portable and not ref.mapping.parallelism_agnostic):
            raise ConfigInvalid(
                "canonical_layout: vLLM does not certify every layer of this model as independent of the number of "
                "ranks; remove it (spec.disk.canonicalLayout), and each tensorParallel keeps blocks of its own"
            )
        sizes[ref.tensor_idx] = max(sizes.get(ref.tensor_idx, 0), ref.mapping.canonical_page_size_bytes)
    return sizes


def _plan(ref: CanonicalKVCacheRef, *, is_canonical: bool) -> _Ref:
    if not is_canonical or ref.mapping is None:
        whole = slice(0, ref.page_size_bytes)
        return _Ref(ref.tensor_idx, ((whole, whole),), ref.page_size_bytes, writers=1, turn=0)
    mapping = ref.mapping
    runs = []
    for run in mapping.runs:
        for number in range(run.num_fragments):
            in_page = run.local_offset + number * run.local_stride
            in_chunk = run.canonical_offset + number * run.canonical_stride
            size = run.fragment_size
            runs.append((slice(in_page, in_page + size), slice(in_chunk, in_chunk + size)))
    return _Ref(ref.tensor_idx, tuple(runs), mapping.local_page_size_bytes, mapping.num_writers, mapping.writer_index)
