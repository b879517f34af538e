# SPDX-License-Identifier: Apache-2.0
"""Where the pages of a chunk lie, on the GPU and in host memory, and the copies that move whole chunks. Pure.

In vLLM's shared region all that one worker keeps of a chunk is contiguous: its *cell*, one tensor after the other, each
with the pages of the chunk's blocks. A staging buffer on the GPU holds a few cells, the *slots*, laid out the same. So
a chunk crosses the bus as one piece, or as few where a group of layers owns parts of the cell, and a kernel on the GPU
moves the pages between the slots and the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

ALIGNMENT_BYTES = 16
"""The kernel reads and writes so much at once."""
STAGING_BYTES = 64 << 20
LARGEST_CELL_BYTES = 256 << 20
MOST_BLOCKS_OF_A_STEP = 1 << 16
"""Blocks that one kernel moves: a cell of a tiny model has few bytes, but the kernel's grid has limits."""


class TensorPlace(NamedTuple):
    """One KV tensor: on the GPU one page per block, in host memory the pages of a chunk's blocks in one row."""

    address: int
    stride_bytes: int
    """From one block to the next."""
    page_bytes: int
    host_address: int
    """Of its part of chunk 0."""
    host_stride_bytes: int
    """From one chunk to the next."""


class TensorRef(NamedTuple):
    """A layer of a group: the tensor that it lives in, and how much of a page it uses."""

    tensor: int
    page_bytes: int


class Step(NamedTuple):
    """What fits into the staging buffer at once, all of one group."""

    group: int
    descriptors: slice
    """The copies over the bus, in the arrays of descriptors."""
    moves: slice
    """One for each block, in the array of sizes: see `Cells.fill`."""


@dataclass(frozen=True)
class Group:
    """The part of a cell that the layers of one KV cache group own."""

    table: Integers
    """[tensor, 4] bytes: address of block 0, from block to block, a page, and where in the cell its pages start."""
    runs: Integers
    """[run, 2] bytes: the contiguous parts of the cell, as offset and length."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all tensors."""
        return int(self.table[:, 2].sum())


class Ends(NamedTuple):
    """The two sides of one group's part of a transfer."""

    blocks: npt.NDArray[np.int32]
    """On the GPU, in the order of the request."""
    chunks: npt.NDArray[np.int32]
    """In host memory; the blocks fill them one after the other."""
    skipped: int
    """Blocks at the start of the first chunk that are not part of the transfer."""


class Arrays(NamedTuple):
    """The arrays of a transfer's copies, int64, each as long as `Cells.count_entries` said or longer."""

    gpu: Integers
    host: Integers
    sizes: Integers


@dataclass(frozen=True)
class Cells:
    """The cells of one worker."""

    blocks_per_chunk: int
    cell_bytes: int
    slots: int
    """Cells in the staging buffer."""
    host_address: int
    host_stride_bytes: int
    groups: tuple[Group, ...]

    def are_whole(self, sizes: Sequence[int], starts: Sequence[int]) -> bool:
        """Say whether a transfer consists of whole chunks; `sizes` and `starts` are in blocks, one for each group."""
        length = self.blocks_per_chunk
        return all(
            size == 0 or (start % length == 0 and size % length == 0) for size, start in zip(sizes, starts, strict=True)
        )

    def count_chunks(self, size: int, start: int) -> int:
        """Return how many chunks a run of blocks touches."""
        return -(-(start % self.blocks_per_chunk + size) // self.blocks_per_chunk) if size else 0

    def count_entries(self, sizes: Sequence[int]) -> int:
        """Return how long the arrays of a transfer have to be: not less than `fill` needs."""
        return sum(
            size + (size // self.blocks_per_chunk + 2) * len(group.runs)
            for size, group in zip(sizes, self.groups, strict=True)
        )

    def fill(self, number: int, ends: Ends, arrays: Arrays, first: int, *, staging_address: int) -> list[Step]:
        """Write the copies of one group's part of a transfer into the arrays, from the entry `first` on.

        First come the descriptors, chunk by chunk; then, in `sizes` alone, an entry for each block: its number on the
        GPU in the lower half, its place among the slots' blocks in the upper one.
        """
        group, length = self.groups[number], self.blocks_per_chunk
        chunk_count, run_count = len(ends.chunks), len(group.runs)
        first_move = first + chunk_count * run_count
        last = first_move + len(ends.blocks)

        host_cells = self.host_address + ends.chunks.astype(np.int64) * self.host_stride_bytes
        slots = staging_address + np.arange(chunk_count, dtype=np.int64) % self.slots * self.cell_bytes
        shape = (chunk_count, run_count)
        np.add(slots[:, None], group.runs[:, 0], out=arrays.gpu[first:first_move].reshape(shape))
        np.add(host_cells[:, None], group.runs[:, 0], out=arrays.host[first:first_move].reshape(shape))
        arrays.sizes[first:first_move].reshape(shape)[:] = group.runs[:, 1]
        places = np.arange(ends.skipped, ends.skipped + len(ends.blocks), dtype=np.int64) % (self.slots * length)
        arrays.sizes[first_move:last] = ends.blocks | places << 32

        steps = []
        for chunk in range(0, chunk_count, self.slots):
            end = min(chunk + self.slots, chunk_count)
            steps.append(
                Step(
                    number,
                    slice(first + chunk * run_count, first + end * run_count),
                    slice(
                        max(first_move + chunk * length - ends.skipped, first_move),
                        min(first_move + end * length - ends.skipped, last),
                    ),
                )
            )
        return steps


def make_cells(
    tensors: Sequence[TensorPlace], groups: Sequence[Sequence[TensorRef]], blocks_per_chunk: int
) -> Cells | str:
    """Find the cells, or say why whole chunks cannot be copied."""
    if reason := _why_no_cells(tensors, blocks_per_chunk) or _why_not_grouped(tensors, groups):
        return reason
    offsets = np.cumsum([0, *(tensor.page_bytes * blocks_per_chunk for tensor in tensors)])
    cell_bytes = int(offsets[-1])
    if cell_bytes > LARGEST_CELL_BYTES:
        return f"a chunk has {cell_bytes >> 20} MiB, more than {LARGEST_CELL_BYTES >> 20}"
    slots = min(STAGING_BYTES // cell_bytes, MOST_BLOCKS_OF_A_STEP // blocks_per_chunk)
    return Cells(
        blocks_per_chunk=blocks_per_chunk,
        cell_bytes=cell_bytes,
        slots=max(slots, 1),
        host_address=tensors[0].host_address,
        host_stride_bytes=tensors[0].host_stride_bytes,
        groups=tuple(_make_group(tensors, sorted(ref.tensor for ref in refs), offsets) for refs in groups),
    )


def _make_group(tensors: Sequence[TensorPlace], members: Sequence[int], offsets: Integers) -> Group:
    table = [
        (tensors[member].address, tensors[member].stride_bytes, tensors[member].page_bytes, offsets[member])
        for member in members
    ]
    runs: list[list[int]] = []
    for member in members:
        start, end = int(offsets[member]), int(offsets[member + 1])
        if runs and sum(runs[-1]) == start:
            runs[-1][1] += end - start
        else:
            runs.append([start, end - start])
    return Group(np.array(table, dtype=np.int64).reshape(-1, 4), np.array(runs, dtype=np.int64).reshape(-1, 2))


def _why_no_cells(tensors: Sequence[TensorPlace], blocks_per_chunk: int) -> str | None:
    for tensor in tensors:
        if tensor.page_bytes % ALIGNMENT_BYTES or tensor.stride_bytes % ALIGNMENT_BYTES:
            return f"pages of {tensor.page_bytes} bytes, {tensor.stride_bytes} apart, are not aligned"
        if tensor.address % ALIGNMENT_BYTES or tensor.page_bytes <= 0:
            return "a KV tensor is empty or not aligned"
    for one, following in pairwise(tensors):
        if following.host_address != one.host_address + one.page_bytes * blocks_per_chunk:
            return "the tensors of a chunk are not contiguous in host memory"
        if following.host_stride_bytes != one.host_stride_bytes:
            return "the tensors have rows of different lengths in host memory"
    return None if tensors else "there is no KV tensor"


def _why_not_grouped(tensors: Sequence[TensorPlace], groups: Sequence[Sequence[TensorRef]]) -> str | None:
    for refs in groups:
        if not refs:
            return "a group has no KV tensor"
        if len({ref.tensor for ref in refs}) != len(refs):
            return "two layers of a group share a KV tensor"
        if any(ref.page_bytes != tensors[ref.tensor].page_bytes for ref in refs):
            return "the pages of a layer are padded"
    return None
