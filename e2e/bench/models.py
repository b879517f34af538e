# SPDX-License-Identifier: Apache-2.0
"""The models of the benchmarks, with random weights, and prompts of any length. Nothing comes from a hub.

vLLM's own dummy weights are so small that attention adds nothing to the last token's embedding. Such a model answers
the same whatever the cache holds, and equal outputs prove nothing. With these weights answers depend on the prompt.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20240607
FIRST_TOKEN = 3
"""Below are the special tokens."""
_ATTENTION_SHARPNESS = 2.0
"""Queries and keys are this much larger than unit variance: a token attends to some others, not evenly to all."""
_HEAD_VARIETY = 0.5
"""Output rows differ in length, so the best token leads by more than the rounding of bf16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama model, and of its KV cache."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    max_tokens: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in bf16."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 2

    def config(self) -> dict[str, Any]:
        """Return the Hugging Face configuration."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_tokens,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128256, 131072)
"""Llama-3.1-8B."""
TINY = Shape(512, 1376, 8, 8, 4, 32000, 8192)
"""Small enough for two cores."""


def joined_ids(parts: Iterable[tuple[int, int]], vocabulary: int) -> list[int]:
    """Return a prompt of parts, each a seed and a number of tokens: prompts that begin with equal parts share a prefix.

    One token that all prompts share ends it, so that parts of whole blocks can be answered from the cache whole.
    """
    prompt: list[int] = []
    for seed, tokens in parts:
        prompt += _part_ids(seed, tokens, vocabulary)
    return [*prompt, FIRST_TOKEN]


@functools.lru_cache(maxsize=4096)
def _part_ids(seed: int, tokens: int, vocabulary: int) -> tuple[int, ...]:
    chooser = random.Random(seed)
    return tuple(chooser.choices(range(FIRST_TOKEN, vocabulary), k=tokens))


def engine_arguments(model: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs that every engine of the benchmarks shares."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": True,
    }


def write_config(directory: Path, shape: Shape) -> None:
    """Write a model without weights, for vLLM's dummy loader."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")


def write_model(directory: Path, shape: Shape) -> None:
    """Write a model with weights; one that is there already is left alone."""
    if (directory / "model.safetensors").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**shape.config())).to(torch.bfloat16)
    fill(model.named_parameters())
    model.save_pretrained(directory, safe_serialization=True)


def fill(parameters: Iterable[tuple[str, Any]], seed: int = SEED) -> int:
    """Draw the weights in place, the same for the same seed and device; return how many tensors were filled."""
    import torch

    filled = 0
    with torch.inference_mode():
        for name, tensor in parameters:
            if not tensor.numel():
                continue
            filled += 1
            if tensor.dim() == 1:
                tensor.fill_(1.0)
                continue
            # By name and not by order, so that nothing depends on how the model lists its tensors.
            generator = torch.Generator(device=tensor.device).manual_seed(seed + zlib.crc32(name.encode()))
            tensor.normal_(0.0, _deviation(name, tensor.shape[-1]), generator=generator)
            if "lm_head" in name:
                lengths = torch.empty(tensor.shape[0], 1, device=tensor.device, dtype=torch.float32)
                lengths.normal_(0.0, _HEAD_VARIETY, generator=generator)
                tensor.mul_(lengths.exp().to(tensor.dtype))
    return filled


def _deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    sharpness = _ATTENTION_SHARPNESS if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
    return sharpness / math.sqrt(fan_in)


SEEDS_WEIGHTS = "KVTIER_BENCH_SEEDS_WEIGHTS"
"""In the environment of an engine whose dummy weights are to be drawn by `fill`."""


def offer_plugin(directory: Path) -> None:
    """Make of a directory, for the path of Python's modules, one that has vLLM call `seed_weights` in each process."""
    described = directory / "kvtier_bench-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-bench\nVersion: 0\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkvtier_bench = e2e.bench.models:seed_weights\n", encoding="utf-8"
    )


def seed_weights() -> None:
    """Have vLLM's loader draw weights instead of its dummies, where the environment asks for it.

    The loader draws them while the engine starts: with weights drawn later, the engine would leave its volume.
    """
    if os.environ.get(SEEDS_WEIGHTS):
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

        DummyModelLoader.load_weights = lambda _, model, __: fill(model.named_parameters())
