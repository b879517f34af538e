# SPDX-License-Identifier: Apache-2.0
"""Well-known models: the fields of their config.json that say how large KV is, and the size of their weights.

Pure data. A model that is not here is no problem: ``spec.model.config`` takes the same fields. Adding one changes no
running tier, because what was decided for a tier is kept with its Deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_GB: Final = 10**9


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """Facts about one model."""

    config: Mapping[str, Any]
    weight_bytes: int
    """Size of the weights as published, rounded up to three digits."""


def _dense(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **more,
    }


def _latent(layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}


_LLAMA_8B: Final = _dense(32, 4096, 32, 8)
_LLAMA_70B: Final = _dense(80, 8192, 64, 8)
_QWEN_7B: Final = _dense(28, 3584, 28, 4)
_QWEN_32B: Final = _dense(64, 5120, 40, 8)
_GPT_OSS: Final = {"head_dim": 64, "sliding_window": 128, "model_type": "gpt_oss"}
_GEMMA_2: Final = {"model_type": "gemma2", "sliding_window": 4096}
_GEMMA_3: Final = {"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 6}
_SEES: Final[dict[str, Any]] = {"vision_config": {}}
"""The model takes pictures; how, does not matter here."""
_DELTA_NET: Final = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_TABLE: Final[tuple[tuple[dict[str, Any], float, tuple[str, ...]], ...]] = (
    (_dense(16, 2048, 32, 8), 2.48, ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct")),
    (_dense(28, 3072, 24, 8), 6.43, ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-3B-Instruct")),
    (
        _LLAMA_8B,
        16.1,
        (
            "meta-llama/Meta-Llama-3-8B-Instruct",
            "meta-llama/Llama-3.1-8B",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        ),
    ),
    (
        _LLAMA_70B,
        142,
        (
            "meta-llama/Llama-3.1-70B",
            "meta-llama/Llama-3.1-70B-Instruct",
            "meta-llama/Meta-Llama-3.1-70B-Instruct",
            "meta-llama/Llama-3.3-70B-Instruct",
            "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        ),
    ),
    (_dense(126, 16384, 128, 8), 812, ("meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-405B-Instruct")),
    (_dense(24, 896, 14, 2), 0.989, ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct")),
    (_QWEN_7B, 15.3, ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")),
    ({**_QWEN_7B, **_SEES}, 16.6, ("Qwen/Qwen2.5-VL-7B-Instruct",)),
    (
        _QWEN_32B,
        65.6,
        (
            "Qwen/Qwen2.5-32B-Instruct",
            "Qwen/Qwen2.5-Coder-32B-Instruct",
            "Qwen/QwQ-32B",
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        ),
    ),
    (_dense(80, 8192, 64, 8), 146, ("Qwen/Qwen2.5-72B", "Qwen/Qwen2.5-72B-Instruct")),
    (_dense(28, 1024, 16, 8, head_dim=128), 1.51, ("Qwen/Qwen3-0.6B",)),
    (_dense(36, 2560, 32, 8, head_dim=128), 8.05, ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507")),
    (_dense(36, 4096, 32, 8, head_dim=128), 16.4, ("Qwen/Qwen3-8B",)),
    (_dense(40, 5120, 40, 8, head_dim=128), 29.6, ("Qwen/Qwen3-14B",)),
    (_dense(64, 5120, 64, 8, head_dim=128), 65.6, ("Qwen/Qwen3-32B",)),
    (
        _dense(48, 2048, 32, 4, head_dim=128),
        61.1,
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    ),
    (_dense(94, 4096, 64, 4, head_dim=128), 471, ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B-Instruct-2507")),
    (
        _dense(48, 2048, 16, 2, head_dim=256, model_type="qwen3_next", **_DELTA_NET),
        163,
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    ),
    (_dense(32, 4096, 32, 8), 14.5, ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3")),
    (_dense(40, 5120, 32, 8, head_dim=128), 24.5, ("mistralai/Mistral-Nemo-Instruct-2407",)),
    (_dense(40, 5120, 32, 8, head_dim=128), 47.2, ("mistralai/Mistral-Small-24B-Instruct-2501",)),
    (_dense(88, 12288, 96, 8), 246, ("mistralai/Mistral-Large-Instruct-2407",)),
    (_dense(32, 4096, 32, 8), 93.5, ("mistralai/Mixtral-8x7B-Instruct-v0.1",)),
    (_dense(42, 3584, 16, 8, head_dim=256, **_GEMMA_2), 18.5, ("google/gemma-2-9b", "google/gemma-2-9b-it")),
    (_dense(46, 4608, 32, 16, head_dim=128, **_GEMMA_2), 54.5, ("google/gemma-2-27b", "google/gemma-2-27b-it")),
    (_dense(48, 3840, 16, 8, head_dim=256, **_GEMMA_3, **_SEES), 24.4, ("google/gemma-3-12b-it",)),
    (_dense(62, 5376, 32, 16, head_dim=128, **_GEMMA_3, **_SEES), 54.9, ("google/gemma-3-27b-it",)),
    (_dense(24, 2880, 64, 8, **_GPT_OSS), 13.8, ("openai/gpt-oss-20b",)),
    (_dense(36, 2880, 64, 8, **_GPT_OSS), 65.3, ("openai/gpt-oss-120b",)),
    (_latent(27), 31.5, ("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat")),
    (_latent(60), 472, ("deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2.5")),
    (
        _latent(61),
        689,
        (
            "deepseek-ai/DeepSeek-V3",
            "deepseek-ai/DeepSeek-V3-0324",
            "deepseek-ai/DeepSeek-V3.1",
            "deepseek-ai/DeepSeek-R1",
        ),
    ),
    (_latent(61), 1030, ("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Instruct-0905")),
    (_dense(40, 5120, 40, 10), 29.4, ("microsoft/phi-4",)),
    (_dense(46, 4096, 96, 8, head_dim=128), 221, ("zai-org/GLM-4.5-Air",)),
    (_dense(92, 5120, 96, 8, head_dim=128), 717, ("zai-org/GLM-4.5",)),
    (
        _dense(48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192, **_SEES),
        218,
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct",),
    ),
    (
        _dense(
            32, 4096, 32, 8, attn_layer_period=8, attn_layer_offset=4, mamba_expand=2, mamba_d_state=16, mamba_d_conv=4
        ),
        103,
        ("ai21labs/AI21-Jamba-1.5-Mini",),
    ),
    (_dense(12, 768, 12, 12, torch_dtype="float16"), 0.251, ("facebook/opt-125m",)),
)

_MODELS: Final[Mapping[str, KnownModel]] = {
    name.lower(): KnownModel(config=config, weight_bytes=round(gigabytes * _GB))
    for config, gigabytes, names in _TABLE
    for name in names
}

NAMES: Final = tuple(sorted(name for _, _, names in _TABLE for name in names))
"""Every name in the table, as its publisher writes it."""


def known(name: str) -> KnownModel | None:
    """Return what is known about a model, by its name on the hub; None where nothing is."""
    return _MODELS.get(name.lower())
