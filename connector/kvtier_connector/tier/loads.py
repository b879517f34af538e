# SPDX-License-Identifier: Apache-2.0
"""What one request loads into the GPU, piece by piece. Pure bookkeeping; the scheduler's alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

NO_ROW = -1


class Piece(NamedTuple):
    """Chunks that go to the GPU together."""

    keys: set[OffloadKey]
    source: CPULoadStoreSpec
    target: GPULoadStoreSpec


@dataclass(slots=True)
class _Part:
    """The chunks of one group of layers."""

    first: int
    """Number of its first chunk in the load."""
    count: int
    blocks: list[int]
    """GPU blocks."""
    index: int
    """Of the first of them, among the blocks of the request."""
    skipped: int
    """Blocks of the first chunk that come before it, and that the GPU has."""
    handed: int = 0
    """Chunks that were handed to the worker."""


class Load:
    """The chunks of a request in the order of its prompt, group by group: where they lie, and which come.

    A chunk is *ready* once it lies in a row of the CPU tier, pinned and verified. Chunks go to the GPU in their order,
    so that a load that ends early leaves a prefix.
    """

    def __init__(self, context: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Start with nothing ready."""
        self.context = context
        self.keys = tuple(keys)
        self.rows = [NO_ROW] * len(self.keys)
        """Rows of the CPU tier; `NO_ROW` for a chunk that is not ready."""
        self.failed: set[int] = set()
        """Numbers of the chunks that do not come."""
        self.is_over = False
        """Whether the request goes on with what was loaded."""
        self._parts: list[_Part] = []
        self._blocks_per_chunk = 1

    def aim(self, target: GPULoadStoreSpec, blocks_per_chunk: int) -> None:
        """Say where on the GPU the chunks go."""
        self._blocks_per_chunk = blocks_per_chunk
        block_ids = target.block_ids.tolist()
        first_block = first_chunk = 0
        for size, index in zip(target.group_sizes, target.block_indices, strict=True):
            skipped = index % blocks_per_chunk
            count = -(-(size + skipped) // blocks_per_chunk) if size else 0
            blocks = block_ids[first_block : first_block + size]
            self._parts.append(_Part(first_chunk, count, blocks, index, skipped))
            first_block += size
            first_chunk += count

    @property
    def has_piece(self) -> bool:
        """Whether anything is ready that follows what was handed over."""
        return any(self._next_row(part) != NO_ROW for part in self._parts)

    @property
    def is_handed_over(self) -> bool:
        """Whether nothing more is handed over: all of it was, or what follows does not come."""
        if self.failed and len(self._parts) > 1:
            # vLLM computes all of a request with several groups, if any of it is missing.
            return True
        return all(part.handed == part.count or part.first + part.handed in self.failed for part in self._parts)

    @property
    def handed(self) -> set[int]:
        """Numbers of the chunks that were handed over."""
        return {number for part in self._parts for number in range(part.first, part.first + part.handed)}

    def take_piece(self) -> Piece:
        """Return what is ready and follows what was handed over before; call it if `has_piece`."""
        rows: list[int] = []
        blocks: list[int] = []
        keys: set[OffloadKey] = set()
        sizes, indices = [], []
        for part in self._parts:
            begin = part.handed
            low = self._blocks_before(part, begin)
            while self._next_row(part) != NO_ROW:
                part.handed += 1
            high = self._blocks_before(part, part.handed)
            chunks = slice(part.first + begin, part.first + part.handed)
            rows += self.rows[chunks]
            keys.update(self.keys[chunks])
            blocks += part.blocks[low:high]
            sizes.append(high - low)
            indices.append(part.index + low)
        return Piece(keys, CPULoadStoreSpec(rows), GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices))

    @property
    def unwritten(self) -> list[int]:
        """The GPU blocks that nothing was handed over for."""
        return [block for part in self._parts for block in part.blocks[self._blocks_before(part, part.handed) :]]

    @property
    def reached(self) -> list[int]:
        """For each group, how many chunks of the request are on the GPU once all pieces are."""
        return [part.index // self._blocks_per_chunk + part.handed for part in self._parts]

    def _next_row(self, part: _Part) -> int:
        return self.rows[part.first + part.handed] if part.handed < part.count else NO_ROW

    def _blocks_before(self, part: _Part, chunk: int) -> int:
        return min(len(part.blocks), max(0, chunk * self._blocks_per_chunk - part.skipped))
