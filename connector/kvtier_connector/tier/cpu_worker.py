# SPDX-License-Identifier: Apache-2.0
"""Copies KV blocks between the engine and the primary tier where both are ordinary memory: vLLM's CPU build.

Upstream's worker needs a device with streams. Here a copy is a memcpy on the cores that also compute, so a thread would
gain nothing: a transfer is done when `submit_store` or `submit_load` returns, and is reported at the next
`get_finished`. That also keeps the order that upstream promises: transfers happen in the order of submission, after all
that the engine wrote before.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

_Indices = npt.NDArray[np.int64]


class _Tensor(NamedTuple):
    """One canonical KV tensor of the engine and its part of the chunk rows, as bytes."""

    engine: npt.NDArray[np.uint8]
    """[block, byte]"""
    chunks: npt.NDArray[np.uint8]
    """[chunk, block in the chunk, byte]"""


class _Where(NamedTuple):
    """The blocks of one group in a transfer: engine block `blocks[i]` is block `inner[i]` of chunk `chunks[i]`."""

    blocks: _Indices
    chunks: _Indices
    inner: _Indices


def locate(gpu_spec: GPULoadStoreSpec, chunk_ids: npt.NDArray[np.int32], blocks_per_chunk: int) -> list[_Where]:
    """Match the engine's blocks with their places in the chunks, group by group.

    The first chunk of a group may be entered in the middle and the last one left early; `block_indices` says at which
    block of the request each group starts.
    """
    groups = []
    first_block = first_chunk = 0
    for size, start in zip(gpu_spec.group_sizes, gpu_spec.block_indices, strict=True):
        if size == 0:
            groups.append(_Where(*(np.empty(0, dtype=np.int64) for _ in _Where._fields)))
            continue
        places = start % blocks_per_chunk + np.arange(size, dtype=np.int64)
        chunk_count = int(places[-1]) // blocks_per_chunk + 1
        chunks = chunk_ids[first_chunk : first_chunk + chunk_count].astype(np.int64)
        if len(chunks) != chunk_count:
            raise ValueError(f"the transfer names {len(chunk_ids)} chunks, too few for its blocks")
        groups.append(
            _Where(
                blocks=gpu_spec.block_ids[first_block : first_block + size].astype(np.int64),
                chunks=chunks[places // blocks_per_chunk],
                inner=places % blocks_per_chunk,
            )
        )
        first_block += size
        first_chunk += chunk_count
    if first_chunk != len(chunk_ids):
        raise ValueError(f"the transfer names {len(chunk_ids)} chunks, but its blocks fill {first_chunk}")
    return groups


class CpuCopyWorker(OffloadingWorker):
    """vLLM's offloading worker for KV caches in ordinary memory. Called from one thread, the engine worker's."""

    def __init__(self, kv_caches: CanonicalKVCaches, *, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        """Carve this rank's part of the rows, one view for each tensor; the region is ours to release from here on."""
        self._blocks_per_chunk = blocks_per_chunk
        self._region: SharedOffloadRegion | None = region
        self._tensors: list[_Tensor] = []
        for tensor in kv_caches.tensors:
            page_bytes = tensor.page_size_bytes
            row = region.create_next_worker_view(page_bytes * blocks_per_chunk).view(torch.uint8).numpy()
            self._tensors.append(
                _Tensor(
                    engine=tensor.tensor.view(torch.uint8).view((-1, page_bytes)).numpy(),
                    chunks=np.lib.stride_tricks.as_strided(
                        row,
                        shape=(row.shape[0], blocks_per_chunk, page_bytes),
                        strides=(row.strides[0], page_bytes, 1),
                    ),
                )
            )
        self._groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs]
        self._finished: list[TransferResult] = []

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._transfer(job_id, src_spec, dst_spec, is_store=True)

    @override
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
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
        for where, refs in zip(groups, self._groups, strict=True):
            for tensor_index, page_bytes in refs:
                tensor = self._tensors[tensor_index]
                # Bytes past the page are padding, which upstream does not copy either.
                if is_store:
                    tensor.chunks[where.chunks, where.inner, :page_bytes] = tensor.engine[where.blocks, :page_bytes]
                else:
                    tensor.engine[where.blocks, :page_bytes] = tensor.chunks[where.chunks, where.inner, :page_bytes]
                transfer_bytes += len(where.blocks) * page_bytes
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=transfer_bytes,
                transfer_time=time.perf_counter() - started,
            )
        )
        return True
