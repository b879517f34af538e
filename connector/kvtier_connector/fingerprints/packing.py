# SPDX-License-Identifier: Apache-2.0
"""How this engine really lays KV out: which attention backends it has, and what they make of a known pattern.

Two engines of one spec can differ in it: by the instructions of their processors, by what a backend finds on the node,
by a variable of the environment. Shapes do not show all of that: the CPU build packs the same tensor otherwise where
the processor has AMX. So there each worker has every kind of layer write a pattern through its own backend, and tells a
digest of the bytes; on devices names, shapes and strides say it all. Engines compare it before they read a block.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

logger = init_logger("vllm.kvtier.packing")

LAYOUT_ENV: Final = ("VLLM_KV_CACHE_LAYOUT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT")
"""Variables by which backends lay KV or state out in another way."""
_BLOCKS: Final = 2
"""Of the memory that the pattern is written to."""


@dataclass(frozen=True)
class Declared(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler's side before the first request."""

    backends: tuple[str, ...]
    """Kinds of layers, with the backend and the instruction set of each."""
    layout: str
    """Digest of what they make of the pattern."""
    weights: str | None
    """Digest of the weights that are loaded; None if they cannot be looked at."""


def layout_env() -> dict[str, str]:
    """Return the variables that lay KV out in another way than usual, as vLLM understands them."""
    values = {name: getattr(envs, name, None) for name in LAYOUT_ENV}
    return {name: str(value) for name, value in values.items() if value}


def describe(config: VllmConfig, kv_caches: Mapping[str, Any], blocks: int) -> tuple[tuple[str, ...], str]:
    """Return the kinds of layers, and a digest of how they lay KV out.

    Args:
        config: vLLM's, with its layers.
        kv_caches: By layer, its tensor or tensors.
        blocks: How many blocks the tensors have.
    """
    layers = config.compilation_config.static_forward_context
    backends: set[str] = set()
    packed: dict[str, str] = {}
    found = []
    for name in sorted(kv_caches):
        layer, held = layers.get(name), kv_caches[name]
        tensors = [held] if isinstance(held, torch.Tensor) else list(held)
        backend = _backend(layer)
        shapes = [_shape(tensor, blocks) for tensor in tensors]
        kind = json.dumps([backend, shapes])
        backends.add(backend)
        if kind not in packed:
            packed[kind] = _pack(layer, tensors[0], blocks) if len(tensors) == 1 else ""
        found.append([name, kind, packed[kind]])
    text = json.dumps([found, layout_env()], separators=(",", ":"))
    return tuple(sorted(backends)), hashlib.sha256(text.encode()).hexdigest()[:32]


def _backend(layer: Any) -> str:
    """Return what a layer is, by whom it is computed, and with which instructions."""
    made: Any = getattr(layer, "attn_backend", None) or getattr(layer, "impl", None)
    name = made.get_name() if hasattr(made, "get_name") else type(made).__name__
    parts = [type(layer).__name__, "" if made is None else name, str(getattr(layer, "isa", ""))]
    return "/".join(part for part in parts if part)


def _shape(tensor: torch.Tensor, blocks: int) -> list[Any]:
    """Return type, shape and order of the dimensions; how many blocks there are depends on the room only."""
    place = _block_dimension(tensor, blocks)
    sizes = [-1 if number == place else size for number, size in enumerate(tensor.shape)]
    strides = [stride if stride < tensor.stride(place) else -1 for stride in tensor.stride()]
    return [str(tensor.dtype), sizes, strides]


def _block_dimension(tensor: torch.Tensor, blocks: int) -> int:
    """Return the first dimension that can number the blocks, which a backend may cut into smaller ones."""
    return next((number for number, size in enumerate(tensor.shape) if size and size % blocks == 0), 0)


def _pack(layer: Any, tensor: torch.Tensor, blocks: int) -> str:
    """Have the backend of a layer write a pattern into memory like the layer's own; return a digest of the bytes."""
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    # A kernel that faults on a device ends the engine; there names and strides say how KV is laid out.
    if update is None or tensor.device.type != "cpu":
        return ""
    try:
        place = _block_dimension(tensor, blocks)
        shape = [_BLOCKS if number == place else size for number, size in enumerate(tensor.shape)]
        length = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
        memory = torch.zeros(length, dtype=tensor.dtype, device=tensor.device)
        given = _arguments(layer, memory.as_strided(shape, tensor.stride()))
        update(*(given[name] for name in inspect.signature(update).parameters))
        content = memory.view(torch.uint8).cpu().numpy().tobytes()
    except Exception as error:  # noqa: BLE001 - whatever a backend says of a pattern, the engine serves
        logger.warning(
            "%s cannot be asked how it lays KV out: %r; shapes and names are compared", _backend(layer), error
        )
        return "unknown"
    return hashlib.sha256(content).hexdigest() if any(content) else "unknown"


def _arguments(layer: Any, cache: torch.Tensor) -> dict[str, Any]:
    """Return what the backends take to write the keys and values of the tokens of one block."""
    size = int(getattr(layer, "head_size", 0))
    heads = int(getattr(layer, "num_kv_heads", 1))
    dtype = getattr(layer, "dtype", None) or torch.bfloat16
    tokens = 16
    rank, rope = int(getattr(layer, "kv_lora_rank", 0)), int(getattr(layer, "qk_rope_head_dim", 0))
    return {
        "layer": layer,
        "key": _pattern((tokens, heads, size), 1, dtype, cache),
        "value": _pattern((tokens, heads, int(getattr(layer, "head_size_v", size))), 2, dtype, cache),
        "kv_c_normed": _pattern((tokens, rank), 1, dtype, cache),
        "k_pe": _pattern((tokens, 1, rope), 2, dtype, cache),
        "kv_cache": cache,
        "slot_mapping": torch.arange(tokens, dtype=torch.int64, device=cache.device),
        "kv_cache_dtype": getattr(layer, "kv_cache_dtype", "auto"),
        "k_scale": getattr(layer, "_k_scale", None),
        "v_scale": getattr(layer, "_v_scale", None),
    }


def _pattern(shape: Sequence[int], seed: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Return numbers that differ from their neighbours in every dimension, and are exact in every type."""
    count = 1
    for size in shape:
        count *= size
    places = torch.arange(count, dtype=torch.int64)
    return ((places * 37 + places // 61 + seed * 11) % 61 - 30).view(*shape).to(dtype).to(like.device)
