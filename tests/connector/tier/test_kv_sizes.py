# SPDX-License-Identifier: Apache-2.0
"""What the operator computes from a config.json is what vLLM allocates and offloads for it."""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from transformers import AutoConfig
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    # Where vLLM 0.33 plans; 0.32 does it among its utilities.
    planning = importlib.import_module(
        f"vllm.v1.core.{'kv_cache_planning' if find_spec('vllm.v1.core.kv_cache_planning') else 'kv_cache_utils'}"
    )

from kvtier_operator.plan import engine_args
from kvtier_operator.plan.model_layout import EngineLayout, ModelLayout, make_model_layout
from kvtier_operator.plan.models import known

BLOCK = 16
MEMORY = 64 << 30

# As vLLM's own config classes need it; what they derive from it (kinds of layers, head sizes) is theirs.
TYPES = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
    "Qwen/Qwen3-8B": "qwen3",
    "google/gemma-2-9b-it": "gemma2",
    "google/gemma-3-27b-it": "gemma3_text",
    "google/gemma-3-12b-it": "gemma3_text",
    "openai/gpt-oss-20b": "gpt_oss",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3",
    "deepseek-ai/DeepSeek-V2-Lite": "deepseek_v2",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
    "ai21labs/AI21-Jamba-1.5-Mini": "jamba",
}


def hf_config(config: dict[str, Any], model_type: str) -> Any:
    without_type = {field: value for field, value in config.items() if field != "model_type"}
    heads = {"num_attention_heads": 128} if "kv_lora_rank" in config else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(model_type, **{**heads, **without_type})


def layer_kinds(hf: Any) -> list[str]:
    count = hf.num_hidden_layers
    return list(getattr(hf, "layer_types", None) or getattr(hf, "layers_block_type", None) or ["attention"] * count)


def state_shapes(hf: Any, tp: int) -> Any:
    if hf.model_type == "jamba":
        return MambaStateShapeCalculator.mamba1_state_shape(
            tp, hf.mamba_expand * hf.hidden_size, hf.mamba_d_state, hf.mamba_d_conv
        )
    return MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp,
        hf.linear_num_key_heads,
        hf.linear_num_value_heads,
        hf.linear_key_head_dim,
        hf.linear_value_head_dim,
        hf.linear_conv_kernel_dim,
    )


def specs(hf: Any, *, tp: int, dtype: torch.dtype, block: int) -> dict[str, KVCacheSpec]:
    """Return vLLM's spec of each layer, as its attention and Mamba layers would on one rank."""
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(hf.model_type, ModelArchConfigConvertorBase)(hf, hf)
    head, heads = convertor.get_head_size(), max(1, convertor.get_total_num_kv_heads() // tp)
    found: dict[str, KVCacheSpec] = {}
    for index, kind in enumerate(layer_kinds(hf)):
        if convertor.is_deepseek_mla():
            spec: KVCacheSpec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=head, dtype=dtype)
        elif kind == "sliding_attention":
            spec = SlidingWindowSpec(
                block_size=block, num_kv_heads=heads, head_size=head, dtype=dtype, sliding_window=hf.sliding_window
            )
        elif kind in {"linear_attention", "mamba"}:
            spec = MambaSpec(block_size=block, shapes=state_shapes(hf, tp), dtypes=(torch.bfloat16, torch.bfloat16))
        else:
            spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=head, dtype=dtype)
        found[f"layers.{index}"] = spec
    return found


def offloaded_bytes_per_block(found: dict[str, KVCacheSpec], *, copies: int, layout: str) -> tuple[int, int]:
    """Return the bytes of one block over all ranks and the number of groups, by vLLM's own allocation."""
    config = VllmConfig(cache_config=CacheConfig(block_size=BLOCK), device_config=DeviceConfig("cpu"))
    config.cache_config.kv_cache_layout = layout
    groups = planning.get_kv_cache_groups(config, found)
    allocated = planning.get_kv_cache_config_from_groups(config, groups, MEMORY)
    return allocated.kv_cache_tensors[0].size // allocated.num_blocks * copies, len(groups)


def ours(name: str, layout: EngineLayout) -> ModelLayout:
    model = known(name)
    assert model is not None
    found = make_model_layout({**model.config, "model_type": TYPES[name]}, layout)
    assert isinstance(found, ModelLayout)
    return found


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("kv_dtype", "dtype"), [("auto", torch.bfloat16), ("fp8", torch.uint8)])
@pytest.mark.parametrize(("tp", "layout"), [(1, "LBNHC"), (2, "BLHNC"), (16, "LBHNC")])
def test_a_chunk_holds_what_vllm_offloads(name: str, kv_dtype: str, dtype: torch.dtype, tp: int, layout: str) -> None:
    model = known(name)
    assert model is not None
    hf = hf_config(dict(model.config), TYPES[name])
    found = ours(
        name,
        EngineLayout(
            tensor_parallel=tp, args=engine_args.read([f"--kv-cache-dtype={kv_dtype}", f"--block-size={BLOCK}"])
        ),
    )
    assert found.block_tokens is not None
    of_vllm = specs(hf, tp=tp, dtype=dtype, block=found.block_tokens)
    if found.has_states:
        # vLLM makes attention pages just large enough for a state, and then pads the state to the page.
        page = next(spec.page_size_bytes for spec in of_vllm.values() if isinstance(spec, FullAttentionSpec))
        state = next(spec.page_size_bytes for spec in of_vllm.values() if isinstance(spec, MambaSpec))
        assert page - page // found.block_tokens * BLOCK < state <= page
        of_vllm = {
            layer: MambaSpec(block_size=spec.block_size, shapes=spec.shapes, dtypes=spec.dtypes, page_size_padded=page)
            if isinstance(spec, MambaSpec)
            else spec
            for layer, spec in of_vllm.items()
        }
    is_latent = "kv_lora_rank" in model.config
    block_bytes, groups = offloaded_bytes_per_block(of_vllm, copies=1 if is_latent else tp, layout=layout)
    assert found.group_bytes * found.block_tokens == block_bytes
    assert found.attention_groups + found.state_groups == groups


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_the_share_of_a_pipeline_stage_is_that_of_the_first(stages: int) -> None:
    first, last = get_pp_indices(36, 0, stages)
    found = ours("Qwen/Qwen3-8B", EngineLayout(args=engine_args.read([f"-pp={stages}"])))
    assert found.layers_per_group == stages * (last - first)
