# SPDX-License-Identifier: Apache-2.0
"""The KV of models whose config.json needs more than counting layers and heads: `make_family_layout`. Pure.

It names what vLLM keeps no prefix cache for, and families whose layout only the engine knows. It turns the fields of
others into those that `model_layout` reads. Then it adds what those leave out: the index of sparse attention, and heads
of another size in layers with a window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator.plan.model_layout import (
    NESTED,
    ConfigUnclear,
    EngineLayout,
    KvUnknown,
    ModelLayout,
    language_config,
    make_model_layout,
    number,
)

MEASURED: Final = "the engine measures it at its first start, and logs it as 'KV cache size'"
"""The end of a reason where there is KV to keep, and only its size is not known."""

_MEASURED_FIELDS: Final[Mapping[str, str]] = {
    "block_configs": "its layers differ one by one",
    "compress_ratios": "it compresses the KV of some layers",
    "index_kpool": "it keeps an index of pooled keys",
    "param_sink_number": "it keeps sinks before the tokens",
    "rswa_window": "vLLM frees the middle of its prompts",
    "canvas_length": "it writes its answers in blocks, by diffusion",
    "loop_num": "it runs each layer several times",
    "H_cycles": "it runs each layer several times",
}
_MEASURED_TYPES: Final = {
    "deepseek_v4": "compress_ratios",
    "deepseek_v41": "compress_ratios",
    "dots3_note": "rows of full layers are padded to those of layers with a window",
    "glm5_next": "index_kpool",
    "hrm_text": "H_cycles",
    "hy_v4": "layers share an index",
    "inkling_mm_model": "some layers keep short convolutions beside the KV",
    "inkling_model": "some layers keep short convolutions beside the KV",
    "inkling": "some layers keep short convolutions beside the KV",
    "iquestloopcoder": "loop_num",
    "k2_horizon": "layers with latents are mixed with others",
    "sarvam_mla": "vLLM decides by the accelerator whether it keeps a latent",
    **dict.fromkeys(
        ("alice_ai", "beam", "dory", "flint", "muse_spark", "musespark1x", "step5", "step5_vl"),
        "vLLM sizes its layers in code of their own",
    ),
    "qwen4_exp": "layers with an index",
    "unlimited-ocr": "rswa_window",
    "unlimited_ocr": "rswa_window",
    "voxtral_realtime": "its encoder has KV, too",
}
"""Types of models whose layers vLLM sizes in code of their own, and the field or trait that it is about."""

_WITHOUT_ATTENTION: Final = frozenset({"mamba", "mamba2", "falcon_mamba"})
_HEADS: Final = ("num_key_value_heads", "head_dim", "v_head_dim")
_INDEX_SCALE_TOKENS: Final = 128
"""Numbers of an index that share a scale of 4 bytes."""
_SPARSE_BLOCK_TOKENS: Final = 64
_M3_BLOCK_TOKENS: Final = 128


def make_family_layout(config: Mapping[str, Any], layout: EngineLayout) -> ModelLayout | KvUnknown:
    """Return what one token takes, or why that cannot be told."""
    text = language_config(config)
    try:
        for part in (config, text):
            _refuse(part)
        is_narrow = layout.args.kv_dtype == "nvfp4" or (layout.args.kv_dtype == "auto" and _is_narrow_checkpoint(text))
        return (_in_four_bits if is_narrow else _with_the_rest)(_plain(text), layout)
    except ConfigUnclear as error:
        return KvUnknown(why=str(error))


def _with_the_rest(plain: Mapping[str, Any], layout: EngineLayout) -> ModelLayout | KvUnknown:
    full, windowed = _heads_by_kind(plain)
    found = make_model_layout({**plain, **full}, layout)
    if isinstance(found, KvUnknown):
        return found
    has_index = plain.get("index_topk") or plain.get("sparse_attention_config")
    if has_index and found.attention_groups + found.state_groups > 1:
        raise ConfigUnclear(f"it has layers of several kinds and an index beside their KV: {MEASURED}")
    if plain.get("index_topk"):
        return _with_index(found, plain, layout)
    if plain.get("sparse_attention_config"):
        return _with_key_index(found, plain, layout)
    if full != windowed and found.layers.sliding:
        return _uneven(found, make_model_layout({**plain, **windowed}, layout), layout)
    return found


def _is_narrow_checkpoint(text: Mapping[str, Any]) -> bool:
    quantization = text.get("quantization_config")
    return isinstance(quantization, Mapping) and str(quantization.get("kv_cache_quant_algo")).lower() == "nvfp4"


def _in_four_bits(plain: Mapping[str, Any], layout: EngineLayout) -> ModelLayout | KvUnknown:
    """Size an NVFP4 cache: 16 numbers take 8 bytes, and 1 for their scale."""
    found = _with_the_rest(plain, dataclasses.replace(layout, args=dataclasses.replace(layout.args, kv_dtype="fp8")))
    if isinstance(found, KvUnknown):
        return found
    full, windowed = _heads_by_kind(plain)
    obstacles = (
        (bool(plain.get("kv_lora_rank")), "the model keeps a latent: write --kv-cache-dtype=nvfp4_ds_mla"),
        (layout.is_canonical, f"spec.disk.canonicalLayout takes heads one by one: {MEASURED}"),
        (layout.args.has("kv-cache-dtype-skip-layers"), f"--kv-cache-dtype-skip-layers leaves layers out: {MEASURED}"),
        (found.has_states or found.extra_bytes > 0 or full != windowed, f"its layers are of several kinds: {MEASURED}"),
        (bool(plain.get("v_head_dim")) or found.layer_bytes % 32 > 0, f"its heads are of an odd size: {MEASURED}"),
    )
    for is_there, why in obstacles:
        if is_there:
            raise ConfigUnclear(f"its KV is packed into 4 bits (NVFP4), and {why}")
    formula = f"{found.formula} x 9 / 16 (4 bits, and a scale for 16 numbers)"
    return dataclasses.replace(found, layer_bytes=found.layer_bytes * 9 // 16, formula=formula)


def _refuse(part: Mapping[str, Any]) -> None:
    """Refuse what this part of a config.json names and what has no KV to size here."""
    for field in ("is_encoder_decoder", "cross_attention_layers"):
        if part.get(field):
            raise ConfigUnclear(
                f"it has an encoder beside the decoder ({field}), for which vLLM has no prefix cache: serve it without "
                "a KVCacheTier"
            )
    kind = str(part.get("model_type"))
    if kind in _WITHOUT_ATTENTION:
        raise ConfigUnclear(
            f"none of its layers is an attention layer (model_type {kind}): serve it without a KVCacheTier"
        )
    for field, why in _MEASURED_FIELDS.items():
        if part.get(field):
            raise ConfigUnclear(f"{why} ({field}): {MEASURED}")
    trait = _MEASURED_TYPES.get(kind.removesuffix("_text"))
    if trait is not None:
        raise ConfigUnclear(f"{_MEASURED_FIELDS.get(trait, trait)} (model_type {kind}): {MEASURED}")


def _plain(text: Mapping[str, Any]) -> dict[str, Any]:
    """Write the fields of a few families as others write them."""
    plain = {name: value for name, value in text.items() if name not in NESTED}
    kind = str(text.get("model_type"))
    return plain | _plain_layers(text, kind) | _plain_kinds(text, kind) | _plain_heads(text, kind)


def _plain_layers(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the number of layers where it is not written as such."""
    if kind.startswith("longcat_flash") or "LongcatFlash" in str(text.get("architectures")):
        # Each layer has two attentions.
        return {"num_hidden_layers": 2 * number(text, "num_layers")}
    blocks = text.get("layers_block_type")
    return {"num_hidden_layers": len(blocks)} if isinstance(blocks, list) and blocks else {}


def _plain_kinds(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the kinds of layers where they are not written as such."""
    if isinstance(text.get("interleaved_sliding_window"), list):
        raise ConfigUnclear(f"layers have windows of different sizes (interleaved_sliding_window): {MEASURED}")
    types, pattern = text.get("layer_types"), text.get("hybrid_layer_pattern")
    if text.get("index_topk") and isinstance(types, list) and all(each == "indexed_attention" for each in types):
        return {"layer_types": None}
    if kind.startswith("mimo_v2"):
        window = text.get("sliding_window") or text.get("sliding_window_size")
        listed = [
            "sliding_attention" if each == 1 else "full_attention"
            for each in (pattern if isinstance(pattern, list) else ())
        ]
        # It names pieces that it does not attend to.
        return {"attention_chunk_size": None, "sliding_window": window, "layer_types": types or listed}
    if text.get("layer_group_size") and not types:
        # Bailing: the last layer of each group is attention.
        size, count = number(text, "layer_group_size"), number(text, "num_hidden_layers")
        if count % size:
            raise ConfigUnclear(f"its last group of layers is not whole (layer_group_size): {MEASURED}")
        return {"layer_types": (["linear_attention"] * (size - 1) + ["full_attention"]) * (count // size)}
    return {}


def _plain_heads(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the heads that vLLM keeps where they are not written as such."""
    attention = text.get("attn_config")
    if isinstance(attention, Mapping) and "kv_n_heads" in attention:
        return {"num_key_value_heads": attention["kv_n_heads"]}
    if kind in {"falcon", "RefinedWebModel"} and text.get("multi_query") and not text.get("new_decoder_architecture"):
        return {"num_kv_heads": 1}
    if kind == "minicpm3":
        # vLLM expands the latent into heads before it keeps them.
        size = number(text, "qk_nope_head_dim") + number(text, "qk_rope_head_dim")
        heads = number(text, "num_attention_heads")
        return {"kv_lora_rank": None, "num_key_value_heads": heads, "head_dim": size, "v_head_dim": size}
    if kind.startswith("gemma4") and not text.get("per_layer_config"):
        return {"global_head_dim": text.get("global_head_dim") or 512}
    return {}


def _heads_by_kind(text: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields about heads that full layers and those with a window have of their own."""
    found: dict[str, dict[str, Any]] = {"full_attention": {}, "sliding_attention": {}}
    if text.get("global_head_dim"):
        found["full_attention"]["head_dim"] = text["global_head_dim"]
    if text.get("num_global_key_value_heads") and text.get("attention_k_eq_v"):
        found["full_attention"]["num_key_value_heads"] = text["num_global_key_value_heads"]
    for field in _HEADS:
        if text.get(f"swa_{field}"):
            found["sliding_attention"][field] = text[f"swa_{field}"]
    other = text.get("attention_other_setting")
    if isinstance(other, Mapping) and other.get("attention_type") in found:
        found[other["attention_type"]].update(
            num_key_value_heads=other.get("num_attention_groups"), head_dim=other.get("head_dim")
        )
    _read_layers_one_by_one(text, found)
    return found["full_attention"], found["sliding_attention"]


def _read_layers_one_by_one(text: Mapping[str, Any], found: Mapping[str, dict[str, Any]]) -> None:
    """Take heads from ``per_layer_config``, which must give all layers of a kind the same."""
    layers, kinds = text.get("per_layer_config"), text.get("layer_types")
    if not layers:
        return
    if not isinstance(layers, Mapping) or not isinstance(kinds, list):
        raise ConfigUnclear(f"its layers differ one by one (per_layer_config): {MEASURED}")
    by_index = {int(index): each for index, each in layers.items() if str(index).isdigit()}
    for kind, fields in found.items():
        first, *others = [by_index.get(layer, {}) for layer, name in enumerate(kinds) if name == kind] or [{}]
        if any(each != first for each in others) or not set(_HEADS).issuperset(first):
            raise ConfigUnclear(f"its layers differ one by one (per_layer_config): {MEASURED}")
        fields.update(first)


def _uneven(full: ModelLayout, windowed: ModelLayout | KvUnknown, layout: EngineLayout) -> ModelLayout:
    """Put layers with a window and other heads beside each other, as vLLM packs them into blocks of one size.

    The layers without a window fill a block, and as many of the others as fit share one.
    """
    if isinstance(windowed, KvUnknown):
        raise ConfigUnclear(windowed.why)
    if full.layer_bytes == windowed.layer_bytes:
        return full
    obstacles = (
        (layout.is_cpu_build, "the CPU build makes blocks of both kinds equally large"),
        (layout.is_canonical, "spec.disk.canonicalLayout takes layers one by one"),
        (layout.is_single_group, "--disable-hybrid-kv-cache-manager keeps windows in full"),
        (layout.args.pipeline_parallel > 1, "pipeline stages hold different numbers of both kinds"),
        (layout.args.decode_context_parallel > 1, "context parallelism splits one kind of them only"),
        (full.layers.linear > 0 or full.layers.full == 0, "other layers decide the size of blocks"),
    )
    for is_there, why in obstacles:
        if is_there:
            raise ConfigUnclear(f"layers with a window have heads of another size, and {why}: {MEASURED}")
    whole = full.layers.full * full.layer_bytes
    groups = math.ceil(full.layers.sliding / max(1, whole // windowed.layer_bytes))
    return dataclasses.replace(
        full,
        layers_per_group=full.layers.full,
        extra_bytes=max(whole, math.ceil(full.layers.sliding / groups) * windowed.layer_bytes) - whole,
        attention_groups=1 + groups,
        formula=f"{full.formula} (as much as layers with a window, of {windowed.formula}, share)",
    )


def _with_index(found: ModelLayout, text: Mapping[str, Any], layout: EngineLayout) -> ModelLayout:
    """Add the keys by which sparse attention chooses tokens (DeepSeek-V3.2, GLM-5): 8 bits each, and scales."""
    if not text.get("kv_lora_rank"):
        raise ConfigUnclear(f"it keeps an index beside heads (index_topk): {MEASURED}")
    _refuse_unusual(layout, _SPARSE_BLOCK_TOKENS)
    kind = layout.args.kv_dtype
    if kind.startswith("fp8") and kind != "fp8_ds_mla":
        raise ConfigUnclear(
            f"vLLM chooses between two layouts of {kind} by the accelerator: write --kv-cache-dtype=fp8_ds_mla in "
            "spec.engine.args on Hopper GPUs"
        )
    if kind == "auto" and text.get("model_type") == "glm_moe_dsa":
        raise ConfigUnclear(
            "vLLM keeps it in 8 bits on Blackwell GPUs and in 16 on others: write --kv-cache-dtype=bfloat16 or "
            "fp8_ds_mla in spec.engine.args"
        )
    size = number(text, "index_head_dim", default=128)
    each = size + size // _INDEX_SCALE_TOKENS * 4
    index = _indexed_layers(text, found.layers.full) * each
    # Blocks are whole rows apart, where a row is the latent of one token and layer.
    row = found.layer_bytes
    block = index * _SPARSE_BLOCK_TOKENS
    padded = block if kind.endswith("_ds_mla") else math.ceil(block / row) * row
    return dataclasses.replace(
        found,
        extra_bytes=math.ceil(padded / _SPARSE_BLOCK_TOKENS),
        block_tokens=_SPARSE_BLOCK_TOKENS,
        formula=f"{found.formula} + {index // each} x {each} B of an index",
    )


def _indexed_layers(text: Mapping[str, Any], count: int) -> int:
    """Return how many layers have an index of their own; the others use that of the layer before."""
    pattern, freq = text.get("index_topk_pattern"), text.get("index_topk_freq")
    if pattern is None and freq is None and "shared" in str(text.get("indexer_types")):
        # vLLM does not read it, and gives every layer an index that the checkpoint lacks.
        raise ConfigUnclear(f"layers share an index (indexer_types) without index_topk_freq: {MEASURED}")
    if pattern is None:
        every, offset = number(text, "index_topk_freq", default=1), number(text, "index_skip_topk_offset", default=2)
        return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(count))
    if not isinstance(pattern, str | list):
        raise ConfigUnclear("index_topk_pattern is not a letter for each layer")
    return count - list(pattern[:count]).count("S")


def _with_key_index(found: ModelLayout, text: Mapping[str, Any], layout: EngineLayout) -> ModelLayout:
    """Add the keys by which MiniMax-M3 chooses blocks: 16 bits each, on every rank."""
    _refuse_unusual(layout, _M3_BLOCK_TOKENS)
    sparse = text["sparse_attention_config"]
    by_layer = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    if not isinstance(by_layer, list) or len(by_layer) != found.layers.full:
        raise ConfigUnclear("sparse_attention_config does not mark each layer in sparse_attention_freq")
    layers = sum(bool(each) for each in by_layer)
    index = 2 * number(sparse, "sparse_index_dim") * layout.tensor_parallel
    return dataclasses.replace(
        found,
        extra_bytes=layers * index,
        block_tokens=_M3_BLOCK_TOKENS,
        formula=f"{found.formula} + {layers} x {index} B of an index",
    )


def _refuse_unusual(layout: EngineLayout, block_tokens: int) -> None:
    args = layout.args
    obstacles = (
        (layout.is_cpu_build, "vLLM's CPU build has no kernels for it"),
        (layout.is_canonical, "spec.disk.canonicalLayout takes layers one by one"),
        (args.block_tokens not in {None, block_tokens}, f"--block-size is not {block_tokens}"),
        (args.has("attention-config"), "--attention-config may keep it in another type"),
        (args.pipeline_parallel > 1, "pipeline stages hold different numbers of it"),
        (args.decode_context_parallel > 1, "ranks of context parallelism hold all of it"),
    )
    for is_there, why in obstacles:
        if is_there:
            raise ConfigUnclear(f"it keeps an index beside the KV (sparse attention), and {why}: {MEASURED}")
