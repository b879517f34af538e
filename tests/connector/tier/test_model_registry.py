# SPDX-License-Identifier: Apache-2.0
"""Every architecture that vLLM registers is sized as vLLM does, or refused, or left to the engine, with the reason.

What the operator computes from a config.json of a known model is what vLLM allocates and offloads for it.
"""

from __future__ import annotations

import importlib
import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto import configuration_auto, modeling_auto
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
    from vllm.model_executor.models import registry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY as CONFIGS
    from vllm.transformers_utils.config import get_hf_text_config
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        SparseCacheRole,
        get_kv_quant_mode,
    )

    # Where vLLM 0.33 plans; 0.32 does it among its utilities.
    planning = importlib.import_module(
        f"vllm.v1.core.{'kv_cache_planning' if find_spec('vllm.v1.core.kv_cache_planning') else 'kv_cache_utils'}"
    )

from kvtier_operator.plan import engine_args
from kvtier_operator.plan.model_families import MEASURED, make_family_layout
from kvtier_operator.plan.model_layout import EngineLayout, KvUnknown, ModelLayout, make_model_layout
from kvtier_operator.plan.models import known

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
DENSE, LATENT, MIMO_V2, GEMMA_4, LFM_2 = TABLES["configs"].values()


def by_architecture(name: str) -> dict[str, dict[str, Any]]:
    return {each: dict(group["fields"]) for group in TABLES[name] for each in group["architectures"].split()}


BY_HAND, LEFT_TO_THE_ENGINE = by_architecture("by_hand"), by_architecture("left_to_the_engine")
NOTHING_TO_KEEP = {each: why for why, names in TABLES["nothing_to_keep"].items() for each in names.split()}
TYPES: dict[str, str] = TABLES["types"]

ARCHITECTURES = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
LAYOUT = EngineLayout(args=engine_args.read(["--kv-cache-dtype=bfloat16"]))


def model_type_of(architecture: str) -> str | None:
    module, cls = ARCHITECTURES[architecture]
    of_class = {
        name: model_type
        for table in vars(modeling_auto)
        if table.startswith("MODEL_") and table.endswith("MAPPING_NAMES")
        for model_type, names in getattr(modeling_auto, table).items()
        for name in ((names,) if isinstance(names, str) else names)
    }
    last = module.rsplit(".", 1)[-1]
    known = last if last in CONFIGS or last in configuration_auto.CONFIG_MAPPING_NAMES else None
    return of_class.get(architecture) or of_class.get(cls) or known


def config_of(architecture: str) -> tuple[dict[str, Any], Any]:
    """Return a config.json of the architecture, and its config class's value."""
    fields = BY_HAND.get(architecture) or LEFT_TO_THE_ENGINE.get(architecture)
    if not fields and architecture in NOTHING_TO_KEEP and model_type_of(architecture) is None:
        fields = {"is_encoder_decoder": True, **DENSE}
    if fields:
        text = next(
            (fields[name] for name in ("text_config", "llm_config", "language_config") if name in fields), fields
        )
        hf = PreTrainedConfig(**{name: value for name, value in text.items() if name != "per_layer_config"})
        hf.model_type = text.get("model_type", "llama")
        return fields, hf
    model_type = model_type_of(architecture)
    assert model_type is not None, f"{architecture} has no config here: give one in BY_HAND, or say what becomes of it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf = CONFIGS[model_type]() if model_type in CONFIGS else AutoConfig.for_model(model_type)
    return json.loads(hf.to_json_string(use_diff=False)), hf


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_is_sized_as_vllm_does_or_the_reason_is_said(architecture: str) -> None:
    config, hf = config_of(architecture)
    found = make_family_layout(config, LAYOUT)
    if architecture in NOTHING_TO_KEEP:
        assert isinstance(found, KvUnknown)
        assert NOTHING_TO_KEEP[architecture] in found.why
    elif architecture in LEFT_TO_THE_ENGINE:
        assert isinstance(found, KvUnknown)
        assert found.why.endswith(MEASURED)
    else:
        assert isinstance(found, ModelLayout), found
        compare_with_vllm(found, hf)


def compare_with_vllm(found: ModelLayout, hf: Any) -> None:
    """Compare with the heads and layers that vLLM reads from the same config."""
    inner = getattr(hf, "llm_config", None)
    text = inner if isinstance(inner, PreTrainedConfig) else get_hf_text_config(hf)
    if getattr(text, "per_layer_config", None):
        # Their heads are compared below, in blocks.
        return
    convertor = MODEL_ARCH_CONFIG_CONVERTORS.get(text.model_type, ModelArchConfigConvertorBase)(hf, text)
    if convertor.is_deepseek_mla():
        assert found.layer_bytes == 2 * convertor.get_head_size()
    elif not getattr(text, "kv_lora_rank", None) and not getattr(text, "v_head_dim", None):
        assert found.layer_bytes == 2 * 2 * convertor.get_total_num_kv_heads() * convertor.get_head_size()
    if not found.has_states and not any(
        getattr(text, name, None) for name in ("layers_block_type", "num_kv_shared_layers")
    ):
        times = (
            2 if text.model_type.startswith("longcat") and convertor.get_num_hidden_layers() == text.num_layers else 1
        )
        assert found.layers.full + found.layers.sliding == times * convertor.get_num_hidden_layers()


def latents(count: int, block: int, dtype: torch.dtype, kind: str) -> dict[str, KVCacheSpec]:
    packed = {"fp8_ds_mla": 656}.get(kind)
    spec = MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=576,
        dtype=dtype,
        cache_dtype_str=kind,
        kv_quant_mode=get_kv_quant_mode(kind),
        state_content_bytes=packed,
    )
    return {f"layers.{layer}": FlashMLASparseBackend.customize_spec(spec) for layer in range(count)}


def index(layers: list[int], block: int, head: int, dtype: torch.dtype) -> dict[str, KVCacheSpec]:
    spec = MLAAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=head, dtype=dtype, cache_role=SparseCacheRole.INDEXER
    )
    return {f"layers.{layer}.index": spec for layer in layers}


def heads(layers: list[int], window: int | None, heads: int, size: int, values: int | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": heads,
        "head_size": size,
        "head_size_v": values or size,
        "dtype": torch.bfloat16,
    }
    spec = FullAttentionSpec(**fields) if window is None else SlidingWindowSpec(**fields, sliding_window=window)
    return {f"layers.{layer}": spec for layer in layers}


def assert_as_vllm_packs(
    found: ModelLayout | KvUnknown, specs: dict[str, KVCacheSpec], ranks: int = 1, layout: str = "BLHNC"
) -> None:
    config = VllmConfig(cache_config=CacheConfig(block_size=16), device_config=DeviceConfig("cpu"))
    config.cache_config.kv_cache_layout = layout  # on accelerators, the connector asks for BLHNC
    groups = planning.get_kv_cache_groups(config, specs)
    allocated = planning.get_kv_cache_config_from_groups(config, groups, 64 << 30)
    assert isinstance(found, ModelLayout), found
    assert found.block_tokens == {group.kv_cache_spec.block_size for group in groups}.pop()
    block = allocated.kv_cache_tensors[0].size // allocated.num_blocks * ranks
    assert (found.group_bytes * found.block_tokens, found.attention_groups + found.state_groups) == (block, len(groups))


DEEPSEEK_32 = {**LATENT, "model_type": "deepseek_v32", "num_hidden_layers": 61, "index_topk": 2048}


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("fields", "indexed"),
    [
        ({}, list(range(61))),
        ({"index_topk_freq": 4}, [0, 1, *range(5, 61, 4)]),
        ({"index_topk_pattern": "FSSS" * 15 + "F"}, list(range(0, 61, 4))),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"] * 61}, list(range(61))),
    ],
)
def test_an_index_counts_for_the_layers_that_have_one(kind: str, fields: dict[str, Any], indexed: list[int]) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.uint8
    specs = {**latents(61, 64, dtype, kind), **index(indexed, 64, 132, torch.uint8)}
    layout = EngineLayout(tensor_parallel=8, args=engine_args.read([f"--kv-cache-dtype={kind}"]))
    assert_as_vllm_packs(make_family_layout({**DEEPSEEK_32, **fields}, layout), specs)


@pytest.mark.parametrize("tp", [1, 4])
def test_the_keys_of_minimax_m3_are_on_every_rank(tp: int) -> None:
    config = {**DENSE, "sparse_attention_config": {"sparse_attention_freq": [0, 0, *[1] * 30], "sparse_index_dim": 128}}
    main = FullAttentionSpec(block_size=128, num_kv_heads=8 // tp, head_size=128, dtype=torch.bfloat16)
    specs = {**{f"layers.{layer}": main for layer in range(32)}, **index(list(range(2, 32)), 128, 128, torch.bfloat16)}
    assert_as_vllm_packs(make_family_layout(config, EngineLayout(tensor_parallel=tp)), specs, ranks=tp)


EVERY_SIXTH, OTHERS = [5, 11, 17, 23, 29], [layer for layer in range(30) if layer % 6 != 5]


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_heads_of_two_sizes_share_blocks_of_one_size(tp: int) -> None:
    specs = {**heads(EVERY_SIXTH, None, max(1, 4 // tp), 512), **heads(OTHERS, 1024, max(1, 16 // tp), 256)}
    assert_as_vllm_packs(make_family_layout(GEMMA_4, EngineLayout(tensor_parallel=tp)), specs, ranks=tp)


def test_layers_written_one_by_one_and_windows_with_more_heads_share_blocks() -> None:
    short = {name: value for name, value in GEMMA_4.items() if "global" not in name}
    by_layer = {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 4} for layer in EVERY_SIXTH}
    assert make_family_layout({**short, "per_layer_config": by_layer}, EngineLayout()) == make_family_layout(
        GEMMA_4, EngineLayout()
    )
    pattern = MIMO_V2["hybrid_layer_pattern"]
    assert isinstance(pattern, list)
    full = [layer for layer, mark in enumerate(pattern) if mark == 0]
    windowed = [layer for layer, mark in enumerate(pattern) if mark == 1]
    specs = {**heads(full, None, 4, 192, 128), **heads(windowed, 128, 8, 192, 128)}
    assert_as_vllm_packs(make_family_layout(MIMO_V2, EngineLayout()), specs)


@pytest.mark.parametrize(
    ("config", "args"),
    [(DENSE, ["--kv-cache-dtype=nvfp4"]), ({**DENSE, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, [])],
)
@pytest.mark.parametrize("tp", [1, 16])
def test_four_bits_come_with_scales(config: dict[str, Any], args: list[str], tp: int) -> None:
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=max(1, 8 // tp),
        head_size=128,
        dtype=torch.uint8,
        kv_quant_mode=get_kv_quant_mode("nvfp4"),
        # As FlashInfer's backend packs it, which is not installed for CPUs.
        num_head_slots=2 * max(1, 8 // tp),
        state_content_bytes=nvfp4_kv_cache_full_dim(128),
    )
    layout = EngineLayout(tensor_parallel=tp, args=engine_args.read(args))
    assert_as_vllm_packs(make_family_layout(config, layout), {f"layers.{layer}": spec for layer in range(32)}, tp)


@pytest.mark.parametrize(("base", "changes", "args", "engine", "why"), TABLES["untold"])
def test_what_decides_elsewhere_is_named(
    base: str, changes: dict[str, Any], args: list[str], engine: dict[str, bool], why: str
) -> None:
    config = {"deepseek_32": DEEPSEEK_32, **TABLES["configs"]}[base] | changes
    found = make_family_layout(config, EngineLayout(args=engine_args.read(args), **engine))
    assert isinstance(found, KvUnknown)
    assert why in found.why


def published(name: str) -> dict[str, Any]:
    return LFM_2 if TYPES[name] == "lfm2" else dict(known(name).config)


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
    if hf.model_type == "lfm2":
        return MambaStateShapeCalculator.short_conv_state_shape(tp, hf.conv_dim, hf.conv_L_cache)
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
        elif kind in {"linear_attention", "mamba", "conv"}:
            shapes = state_shapes(hf, tp)
            spec = MambaSpec(block_size=block, shapes=shapes, dtypes=(torch.bfloat16,) * len(shapes))
        else:
            spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=head, dtype=dtype)
        found[f"layers.{index}"] = spec
    return found


def ours(name: str, layout: EngineLayout) -> ModelLayout:
    found = make_model_layout({**published(name), "model_type": TYPES[name]}, layout)
    assert isinstance(found, ModelLayout)
    return found


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("kv_dtype", "dtype"), [("auto", torch.bfloat16), ("fp8", torch.uint8)])
@pytest.mark.parametrize(("tp", "layout"), [(1, "LBNHC"), (2, "BLHNC"), (16, "LBHNC")])
def test_a_chunk_holds_what_vllm_offloads(name: str, kv_dtype: str, dtype: torch.dtype, tp: int, layout: str) -> None:
    hf = hf_config(published(name), TYPES[name])
    args = engine_args.read([f"--kv-cache-dtype={kv_dtype}", "--block-size=16"])
    found = ours(name, EngineLayout(tensor_parallel=tp, args=args))
    of_vllm = specs(hf, tp=tp, dtype=dtype, block=found.block_tokens)
    if found.has_states:
        # vLLM makes attention pages just large enough for a state, and then pads the state to the page.
        page = next(spec.page_size_bytes for spec in of_vllm.values() if isinstance(spec, FullAttentionSpec))
        state = next(spec.page_size_bytes for spec in of_vllm.values() if isinstance(spec, MambaSpec))
        assert page - page // found.block_tokens * 16 < state <= page
        of_vllm = {
            layer: MambaSpec(block_size=spec.block_size, shapes=spec.shapes, dtypes=spec.dtypes, page_size_padded=page)
            if isinstance(spec, MambaSpec)
            else spec
            for layer, spec in of_vllm.items()
        }
    assert_as_vllm_packs(found, of_vllm, ranks=1 if "kv_lora_rank" in published(name) else tp, layout=layout)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_the_share_of_a_pipeline_stage_is_that_of_the_first(stages: int) -> None:
    first, last = get_pp_indices(36, 0, stages)
    found = ours("Qwen/Qwen3-8B", EngineLayout(args=engine_args.read([f"-pp={stages}"])))
    assert found.layers_per_group == stages * (last - first)
