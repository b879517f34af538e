# SPDX-License-Identifier: Apache-2.0
"""Copies KV blocks between GPU and host memory in whole chunks, where vLLM copies page by page.

vLLM's handlers hand the driver a descriptor for each page: thousands for one request, written and enqueued by the
engine's only thread. Here a kernel gathers the pages of several chunks into a staging buffer, laid out as the chunks
are in host memory, and each chunk is one descriptor; loads go the same way back. Streams, events, order, waiting and
results stay vLLM's: only what is enqueued for a transfer differs, so a transfer may go either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex

import numpy as np
import torch
from typing_extensions import override
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker, SingleDirectionOffloadingHandler

from kvtier_connector.tier.cells import Arrays, Cells, Ends, Integers, Step, TensorPlace, TensorRef, make_cells
from kvtier_connector.tier.page_kernel import move_pages, try_kernel

logger = init_logger("vllm.kvtier.gpu_copies")

SPARE_BYTES = 1 << 30
"""GPU memory that stays free beside a staging buffer."""
_SMALLEST_ARRAY = 1024


class Moving(Protocol):
    """What moves pages on the GPU: `page_kernel.move_pages`."""

    def __call__(  # noqa: D102, PLR0913 - see move_pages
        self,
        table: torch.Tensor,
        moves: torch.Tensor,
        *,
        span: slice,
        staging: torch.Tensor,
        cell_bytes: int,
        blocks_per_chunk: int,
        to_staging: bool,
    ) -> None: ...


def free_bytes(device: torch.device) -> int:
    """Return how much memory of the GPU is free."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def urgent_stream() -> Any:
    """Return a stream whose kernels go before the model's: moving pages takes microseconds, and a transfer waits."""
    return torch.cuda.Stream(priority=-1)


class OneStream(list[Any]):
    """In the place of vLLM's pool of streams: every transfer of a handler gets the same one.

    The driver has few queues for streams. With a stream for each transfer under way some share the model's queue, and
    a kernel there that waits for the transfer before it holds up the model.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Store what makes the stream; it is made for the first transfer."""
        super().__init__()
        self._make = make
        self._stream: Any = None

    def __bool__(self) -> bool:
        """Say that a stream is there."""
        return True

    @override
    def pop(self, _: SupportsIndex = -1) -> Any:
        self._stream = self._stream or self._make()
        return self._stream

    @override
    def append(self, _: Any) -> None:
        pass

    @override
    def clear(self) -> None:
        self._stream = None


class GatheringHandler(SingleDirectionOffloadingHandler):
    """The transfers of one direction. Called from one thread, the engine worker's.

    The transfers run one after the other, so they may share one staging buffer.
    """

    def __init__(
        self,
        stock: SingleDirectionOffloadingHandler,
        cells: Cells,
        *,
        moving: Moving = move_pages,
        free: Callable[[torch.device], int] = free_bytes,
        make_stream: Callable[[], Any] = urgent_stream,
    ) -> None:
        """Take the place of a handler of vLLM that has not been used yet.

        Args:
            stock: The handler.
            cells: What its tensors look like.
            moving: What moves pages on the GPU.
            free: Bytes of the GPU's memory that are free.
            make_stream: What makes the stream of the transfers.
        """
        super().__init__(
            gpu_tensors=stock.src_tensors if stock.gpu_to_cpu else stock.dst_tensors,
            cpu_tensors=stock.dst_tensors if stock.gpu_to_cpu else stock.src_tensors,
            blocks_per_chunk=cells.blocks_per_chunk,
            layer_refs_per_group=stock.layer_refs_per_group,
            gpu_to_cpu=stock.gpu_to_cpu,
        )
        self._stream_pool = OneStream(make_stream)
        self._fill_pages, self._copy_pages = self._fill_group_ops, self._swap_blocks_batch
        self._cells = cells
        self._moving = moving
        self._free = free
        caches = self.src_tensors if self.gpu_to_cpu else self.dst_tensors
        self._device = caches[0].device
        self._most_entries = max(4 * len(caches[0]), _SMALLEST_ARRAY)
        self._tables = [torch.from_numpy(group.table).to(self._device) for group in cells.groups]
        self._is_refused = False
        """There was no memory for a staging buffer: every transfer goes page by page."""
        self._staging: torch.Tensor | None = None
        self._moves: torch.Tensor | None = None
        """What the kernel reads, for one transfer."""
        self._steps: list[Step] = []
        """Of the transfer that is being submitted."""

    @override
    def transfer_async(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        spec = src_spec if self.gpu_to_cpu else dst_spec
        # vLLM's transfer_async calls these two, and _estimate_max_copy_ops.
        if isinstance(spec, GPULoadStoreSpec) and self._gathers(spec.group_sizes, spec.block_indices):
            self._fill_group_ops, self._swap_blocks_batch = self._fill_cells, self._copy_cells
        else:
            self._fill_group_ops, self._swap_blocks_batch = self._fill_pages, self._copy_pages
        self._steps = []
        submitted: bool = super().transfer_async(job_id, src_spec, dst_spec)
        return submitted

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._staging = self._moves = None
        self._tables = []

    def _gathers(self, sizes: Sequence[int], starts: Sequence[int]) -> bool:
        """Say whether a transfer goes by way of the staging buffer, which the first such transfer makes."""
        cells = self._cells
        if self._is_refused or not any(sizes) or cells.count_entries(sizes) > self._most_entries:
            return False
        # A store of a part of a chunk must not touch the rest of its cell; a load would fetch the rest for nothing.
        if self.gpu_to_cpu and not cells.are_whole(sizes, starts):
            return False
        chunks = sum(cells.count_chunks(size, start) for size, start in zip(sizes, starts, strict=True))
        return 2 * sum(sizes) >= chunks * cells.blocks_per_chunk and self._has_staging()

    def _has_staging(self) -> bool:
        """Make the buffers, once: later than vLLM measures memory and records its graphs."""
        if self._staging is None and not self._is_refused:
            needed = self._cells.slots * self._cells.cell_bytes
            try:
                if self._free(self._device) >= needed + SPARE_BYTES:
                    self._moves = torch.empty(self._most_entries, dtype=torch.int64, device=self._device)
                    self._staging = torch.empty(needed, dtype=torch.int8, device=self._device)
            except torch.OutOfMemoryError:
                self._moves = None
            if self._staging is None:
                self._is_refused = True
                logger.info("KV blocks are copied page by page: no %d MiB of GPU memory to spare", needed >> 20)
        return self._staging is not None

    @override
    def _estimate_max_copy_ops(self, group_sizes: Sequence[int]) -> int:
        if self._fill_group_ops != self._fill_cells:
            pages: int = super()._estimate_max_copy_ops(group_sizes)
            return pages
        # Powers of two: the pinned arrays of one transfer fit most others, too.
        return 1 << (max(self._cells.count_entries(group_sizes), _SMALLEST_ARRAY) - 1).bit_length()

    def _fill_cells(  # noqa: PLR0913 - as vLLM calls it
        self,
        g_idx: int,
        *,
        group_src: np.ndarray[Any, Any],
        group_dst: np.ndarray[Any, Any],
        group_size: int,
        src_skip_count: int,
        dst_skip_count: int,
        all_src: Integers,
        all_dst: Integers,
        all_sizes: Integers,
        op_idx: int,
    ) -> tuple[int, int]:
        """Write one group's entries; return the next entry and the bytes of the group's blocks."""
        assert self._staging is not None
        if self.gpu_to_cpu:
            ends, arrays = Ends(group_src, group_dst, dst_skip_count), Arrays(all_src, all_dst, all_sizes)
        else:
            ends, arrays = Ends(group_dst, group_src, src_skip_count), Arrays(all_dst, all_src, all_sizes)
        steps = self._cells.fill(g_idx, ends, arrays, op_idx, staging_address=self._staging.data_ptr())
        self._steps += steps
        return steps[-1].moves.stop, group_size * self._cells.groups[g_idx].block_bytes

    def _copy_cells(
        self, src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, *, is_src_access_order_any: bool
    ) -> None:
        """Enqueue the steps on the current stream. The pinned arrays are not touched again before it has ended."""
        assert self._staging is not None
        assert self._moves is not None
        self._moves[: len(sizes)].copy_(sizes, non_blocking=True)
        for step in self._steps:
            if self.gpu_to_cpu:
                self._move(step)
            ops.swap_blocks_batch(
                src[step.descriptors],
                dst[step.descriptors],
                sizes[step.descriptors],
                is_src_access_order_any=is_src_access_order_any,
            )
            if not self.gpu_to_cpu:
                self._move(step)

    def _move(self, step: Step) -> None:
        assert self._staging is not None
        assert self._moves is not None
        self._moving(
            self._tables[step.group],
            self._moves,
            span=step.moves,
            staging=self._staging,
            cell_bytes=self._cells.cell_bytes,
            blocks_per_chunk=self._cells.blocks_per_chunk,
            to_staging=self.gpu_to_cpu,
        )


def gather_copies(worker: CPUOffloadingWorker, *, stores: bool = True) -> str | None:
    """Make a worker of vLLM that has not been used yet copy whole chunks; say why not where it has to copy pages.

    With `stores` False it does so on the way to the GPU only.
    """
    if not current_platform.is_cuda():
        return "the GPU is not CUDA's"
    try:
        return _replace_handlers(worker, stores=stores)
    except (AttributeError, TypeError) as error:
        return f"this version of vLLM copies in another way: {error}"
    except torch.OutOfMemoryError:
        return "the GPU's memory is full"


def _replace_handlers(worker: CPUOffloadingWorker, *, stores: bool) -> str | None:
    store, load = worker._store_handler, worker._load_handler  # noqa: SLF001 - pinned by a test
    region = worker._mmap_region  # noqa: SLF001 - pinned by a test
    if region is None or not region.is_pinned:
        return "host memory is not pinned"
    cells = cells_of(store)
    if isinstance(cells, str):
        return cells
    if reason := try_kernel(store.src_tensors[0].device):
        return reason
    worker._load_handler = GatheringHandler(load, cells)  # noqa: SLF001 - pinned by a test
    if stores:
        worker._store_handler = GatheringHandler(store, cells)  # noqa: SLF001 - pinned by a test
    return None


def cells_of(store: SingleDirectionOffloadingHandler) -> Cells | str:
    """Find the cells between the tensors of a handler of stores, or say why whole chunks cannot be copied."""
    if store._canonical_copy_plans is not None:  # noqa: SLF001 - pinned by a test
        return "the layout is canonical"
    tensors = [
        TensorPlace(gpu.data_ptr(), gpu.stride(0), gpu.shape[1], host.data_ptr(), host.stride(0))
        for gpu, host in zip(store.src_tensors, store.dst_tensors, strict=True)
    ]
    groups = [[TensorRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in store.layer_refs_per_group]
    return make_cells(tensors, groups, store.dst_blocks_per_chunk)
