# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU tier with read access to three of its private fields, which vLLM has no public method for.

Derived from vLLM's class, so that each private name is used in one place and is covered by the tests of the surface.
Nothing here writes them. The scheduler's thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager


class CpuTier(CPUPrimaryTierOffloadingManager):
    """Rows of pinned host memory between the GPU and the volume."""

    @override
    def __init__(self, num_chunks: int, **settings: Any) -> None:
        super().__init__(num_chunks=num_chunks, **settings)
        self.chunks = num_chunks
        """Number of rows."""
        # vLLM's `lookup` tells neither the row nor the pins of a chunk, and a prompt has thousands of chunks.
        self.find: Callable[[OffloadKey], ChunkStatus | None] = self._policy.get
        """Returns the row of a chunk; None without one."""

    @property
    def room(self) -> int:
        """Number of rows that are free or evictable."""
        return int(self._get_num_free_chunks() + self._num_evictable_cache_chunks)

    @property
    def is_storing(self) -> bool:
        """True while the GPU or the volume writes into rows."""
        return bool(self._num_write_pending_chunks)
