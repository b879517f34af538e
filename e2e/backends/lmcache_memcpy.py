# SPDX-License-Identifier: Apache-2.0
"""Copy for LMCache where vLLM's KV cache is ordinary memory: the one thing that it has no class for on the CPU build.

The engine's process calls `register` before it makes the engine. Everything else of LMCache runs as its wheel has it:
the connector, the token database, the lookup between scheduler and worker, memory, disk and Redis.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

ASKED = "KVTIER_BENCH_LMCACHE_COPIES"


class Memcpy:
    """The class that LMCache calls a GPU connector. It copies whole blocks, whose inner order only CPU kernels know."""

    def __init__(self, metadata: Any) -> None:
        """Store."""
        self._metadata = metadata
        self.kvcaches: list[Any] | None = None

    def initialize_kvcaches_ptr(self, *, kvcaches: list[Any] | None = None, **_: Any) -> None:
        """Take the engine's tensors, one for each layer."""
        self.kvcaches = kvcaches or self.kvcaches

    def get_shape(self, num_tokens: int) -> Any:
        """Return the shape of a chunk."""
        return self._metadata.get_shapes(num_tokens)[0]

    def batched_from_gpu(self, chunks: Sequence[Any], starts: list[int], ends: list[int], **more: Any) -> None:
        """Copy blocks of the engine into chunks."""
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            self.from_gpu(chunk, start, end, **more)

    def batched_to_gpu(self, chunks: Sequence[Any], starts: list[int], ends: list[int], **more: Any) -> None:
        """Copy chunks into blocks of the engine."""
        for chunk, start, end in zip(chunks, starts, ends, strict=True):
            self.to_gpu(chunk, start, end, **more)

    def from_gpu(self, chunk: Any, start: int, end: int, **more: Any) -> None:
        """Copy the blocks of some tokens into their chunk."""
        for rows, layer, blocks in self._parts(chunk, start, end, more):
            rows.copy_(layer[blocks].view(rows.shape))

    def to_gpu(self, chunk: Any, start: int, end: int, **more: Any) -> None:
        """Copy a chunk into the blocks of its tokens."""
        for rows, layer, blocks in self._parts(chunk, start, end, more):
            layer[blocks] = rows.view(layer[blocks].shape)

    def _parts(self, chunk: Any, start: int, end: int, more: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
        """Return, for each layer, its part of the chunk, its tensor and the numbers of its blocks."""
        self.initialize_kvcaches_ptr(**more)
        assert self.kvcaches is not None
        size = self.kvcaches[0].shape[2]
        slots = more["slot_mapping"][start:end]
        if len(slots) % size or any(slots[::size] % size):
            raise ValueError(f"tokens {start} to {end} are no whole blocks of {size}")
        parts = chunk.tensor.view(len(self.kvcaches), -1)
        return [(rows, layer, slots[::size] // size) for rows, layer in zip(parts, self.kvcaches, strict=True)]


def register_where_asked() -> None:
    """Register it in each process of an engine whose environment asks for it: vLLM calls this as a plugin."""
    if os.environ.get(ASKED):
        register()


def register() -> None:
    """Have LMCache use the class above, and vLLM start with LMCache imported."""
    import lmcache.v1.gpu_connector
    from vllm.triton_utils import dispatcher

    vars(lmcache.v1.gpu_connector)["CreateGPUConnector"] = lambda _config, metadata, *_, **__: Memcpy(metadata)
    rebind = dispatcher._rebind_kernels  # noqa: SLF001  nothing public keeps modules from it

    def rebind_others(*args: Any) -> None:
        """Hide a module that LMCache imports: the CPU worker looks through all there are, and falls over this one."""
        hidden = sys.modules.pop("llvmlite.binding.ffi", None)
        rebind(*args)
        if hidden is not None:
            sys.modules["llvmlite.binding.ffi"] = hidden

    vars(dispatcher)["_rebind_kernels"] = rebind_others
