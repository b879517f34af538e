# SPDX-License-Identifier: Apache-2.0
"""How many bytes of KV a token takes in a tier: from the model's config.json and how the engine is split.

Pure. Follows what vLLM allocates and offloads: a chunk is one row with the share of every rank side by side, so heads
that tensor parallelism copies are copied in the tier, too; layers of several kinds form groups of equally many layers,
and each group has chunks of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.plan import flags, mamba_state
from kvtier_operator.plan.layers import ConfigUnclear, Layers, language_config, number, read_layers

_CACHE_BYTES: Final[Mapping[str, int]] = {
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
"""Values of ``--kv-cache-dtype`` whose numbers stand side by side; the others pack scales between them."""

_PACKED_LATENTS: Final[Mapping[str, int]] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes that one token takes in one MLA layer, where they do not follow from its dimensions."""

# float32 weights are served in 16 bits, unless --dtype says otherwise.
_MODEL_BYTES: Final[Mapping[str, int]] = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 2, "auto": 2}
_FLAG_BYTES: Final[Mapping[str, int]] = {**_MODEL_BYTES, "float32": 4, "float": 4}

_BLOCK_TOKENS: Final = {"device": 16, "cpu": 128}
"""vLLM's own block size on accelerators and on its CPU build, where nothing asks for another. Some attention kernels of
some accelerators want larger ones: then files are as many times larger. The CPU build has 16 with MLA on nodes without
AMX and 128 on those with it: a file of whole blocks of 128 tokens is one of whole blocks on both."""

_MLA_STATE_ALIGNMENT: Final = 128


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one engine splits and stores the KV."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    kv_dtype: str = "auto"
    """``--kv-cache-dtype``."""
    dtype: str = "auto"
    """``--dtype``."""
    block_tokens: int | None = None
    """``--block-size``; None leaves it to vLLM. Layers that keep a state make blocks larger."""
    is_cpu_build: bool = False
    is_single_group: bool = False
    """``--disable-hybrid-kv-cache-manager``: windows save nothing."""
    is_canonical: bool = False
    """The connector's canonical layout: one copy, whatever the parallelism."""


@dataclass(frozen=True, kw_only=True)
class KvCache:
    """The KV of one model in one layout, over all ranks of an engine."""

    layers: Layers
    layer_bytes: int
    """Bytes of one token in one attention layer."""
    heads: int
    """KV heads of one layer over all ranks, without copies; 1 where all heads share a latent."""
    layers_per_group: int
    """Layers of one group, padding and all pipeline stages included."""
    attention_groups: int
    """Groups of attention layers; a prefix takes one chunk of each for the same tokens."""
    state_groups: int
    """Groups of layers that keep a state; a prefix takes one chunk of each for every state that is kept."""
    block_tokens: int | None
    """Tokens of one block of the engine; None where a state decides it whose size is not known."""
    device_copies: int
    """How often the devices hold what a tier holds once."""
    formula: str
    """How `layer_bytes` came about, for people."""

    @property
    def group_bytes(self) -> int:
        """Return the bytes of one token in one chunk."""
        return self.layers_per_group * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Return the bytes that a tier needs to hold one token, without states."""
        return self.attention_groups * self.group_bytes

    @property
    def has_states(self) -> bool:
        """Tell whether some layers keep a state instead of KV for each token."""
        return self.state_groups > 0


@dataclass(frozen=True, kw_only=True)
class KvUnknown:
    """Why nobody can tell how large the KV is."""

    why: str


def make_layout(args: Sequence[str], *, tensor_parallel: int, is_cpu_build: bool, is_canonical: bool = False) -> Layout:
    """Read the layout from the flags of an engine; a flag that is no number counts as left out."""
    found = flags.parse(args)
    return Layout(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=flags.count(found, "pipeline-parallel-size"),
        decode_context_parallel=flags.count(found, "decode-context-parallel-size"),
        kv_dtype=flags.last(found, "kv-cache-dtype") or "auto",
        dtype=flags.last(found, "dtype") or "auto",
        block_tokens=flags.count(found, "block-size") if "block-size" in found else None,
        is_cpu_build=is_cpu_build,
        is_single_group="disable-hybrid-kv-cache-manager" in found,
        is_canonical=is_canonical,
    )


def make_kv(config: Mapping[str, Any], layout: Layout) -> KvCache | KvUnknown:
    """Return what one token takes, or why that cannot be told.

    Args:
        config: the model's config.json, or the part of it that says how large the KV is.
        layout: how the engine splits it.
    """
    text = language_config(config)
    try:
        layers = read_layers(text)
        if layout.is_single_group and layers.linear == 0:
            layers = Layers(full=layers.full + layers.sliding)
        layer_bytes, formula = _layer_bytes(text, layout)
        group, attention_groups, state_groups = _group(layers)
        return KvCache(
            layers=layers,
            layer_bytes=layer_bytes,
            heads=1 if text.get("kv_lora_rank") else _heads(text),
            layers_per_group=layout.pipeline_parallel * _first_stage(group, layout.pipeline_parallel),
            attention_groups=attention_groups,
            state_groups=state_groups,
            block_tokens=_block_tokens(text, layout, has_states=state_groups > 0),
            device_copies=_device_copies(text, layout),
            formula=formula,
        )
    except ConfigUnclear as error:
        return KvUnknown(why=str(error))


def _group(layers: Layers) -> tuple[int, int, int]:
    """Return the layers of one group, and how many groups attention and states form.

    vLLM gives every group as many layers as the rarest kind has, or as the most frequent kind where that is not much
    more, and pads.
    """
    counts = [count for count in (layers.full, layers.sliding, layers.linear) if count]
    least, most = min(counts), max(counts)
    size = most if most < least * 1.5 else least
    attention = math.ceil(layers.full / size) + math.ceil(layers.sliding / size)
    return size, attention, math.ceil(layers.linear / size)


def _first_stage(layers: int, stages: int) -> int:
    """Return the layers of the first pipeline stage, which decides the size of every rank's share."""
    share, rest = divmod(layers, stages)
    return max(1, share + (1 if rest == stages - 1 and stages > 1 else 0))


def _layer_bytes(config: Mapping[str, Any], layout: Layout) -> tuple[int, str]:
    """Return the bytes of one token in one layer over all ranks, and the formula."""
    if config.get("kv_lora_rank"):
        return _latent_bytes(config, layout)
    size = _element_bytes(config, layout)
    heads = _heads(config)
    rows, row_text = _head_size(config)
    kept = heads if layout.is_canonical else max(1, heads // layout.tensor_parallel) * layout.tensor_parallel
    copies = f" ({heads} heads, each on {kept // heads} of {layout.tensor_parallel} ranks)" if kept > heads else ""
    total = kept * rows * size // layout.decode_context_parallel
    shared = "" if layout.decode_context_parallel == 1 else f" / {layout.decode_context_parallel} (context parallel)"
    return total, f"{row_text} x {kept} KV heads{copies} x {size} B{shared}"


def _heads(config: Mapping[str, Any]) -> int:
    """Return the KV heads of one layer, as many as the model has."""
    return number(
        config,
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
        default=1 if config.get("multi_query") else number(config, "num_attention_heads", "n_head", "n_heads"),
    )


def _head_size(config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the numbers that one head keeps for one token, keys and values together."""
    head = config.get("head_dim") or config.get("hidden_size_per_head") or config.get("attention_head_dim")
    if head is None:
        hidden, heads = (
            number(config, "hidden_size", "n_embd", "d_model"),
            number(config, "num_attention_heads", "n_head", "n_heads"),
        )
        head = hidden // heads
    keys = number({"head_dim": head}, "head_dim")
    values = number(config, "v_head_dim", default=keys)
    return keys + values, f"2 x {keys}" if keys == values else f"({keys} + {values})"


def _latent_bytes(config: Mapping[str, Any], layout: Layout) -> tuple[int, str]:
    """MLA keeps one latent vector for all heads; ranks that hold the same one share a copy on a single node."""
    rank, rope = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim", default=64)
    is_shared = layout.is_canonical or (layout.pipeline_parallel == 1 and layout.decode_context_parallel == 1)
    copies = 1 if is_shared else layout.tensor_parallel // layout.decode_context_parallel or 1
    times = f" x {copies} ranks" if copies > 1 else ""
    packed = _PACKED_LATENTS.get(layout.kv_dtype)
    if packed is not None:
        return packed * copies, f"{packed} B ({layout.kv_dtype}){times}"
    size = _element_bytes(config, layout)
    return (rank + rope) * size * copies, f"({rank} + {rope}) latent x {size} B{times}"


def _device_copies(config: Mapping[str, Any], layout: Layout) -> int:
    """Every rank has the latent of its own on its device, whatever the tier keeps."""
    if not config.get("kv_lora_rank") or layout.pipeline_parallel > 1 or layout.decode_context_parallel > 1:
        return 1
    return layout.tensor_parallel


def _element_bytes(config: Mapping[str, Any], layout: Layout) -> int:
    if layout.kv_dtype in _CACHE_BYTES:
        return _CACHE_BYTES[layout.kv_dtype]
    if layout.kv_dtype != "auto":
        raise ConfigUnclear(f"--kv-cache-dtype {layout.kv_dtype} packs its numbers in a way that is not known here")
    if _is_fp8_checkpoint(config.get("quantization_config")):
        return 1
    if layout.dtype != "auto":
        if layout.dtype not in _FLAG_BYTES:
            raise ConfigUnclear(f"--dtype {layout.dtype} is not known here")
        return _FLAG_BYTES[layout.dtype]
    named = str(config.get("dtype") or config.get("torch_dtype") or "auto").removeprefix("torch.")
    if named not in _MODEL_BYTES:
        raise ConfigUnclear(f"dtype {named!r} is not known here")
    return _MODEL_BYTES[named]


def _is_fp8_checkpoint(quantization: object) -> bool:
    """Tell whether the checkpoint brings scales for an fp8 KV cache, which ``auto`` then uses."""
    if not isinstance(quantization, Mapping):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"  # noqa: PLR2004  bits
    return str(quantization.get("kv_cache_quant_algo")).lower() == "fp8"


def _block_tokens(config: Mapping[str, Any], layout: Layout, *, has_states: bool) -> int | None:
    """Return the tokens of one block: a page of attention must hold a state, so states make blocks large."""
    is_latent = bool(config.get("kv_lora_rank"))
    usual = layout.block_tokens or _BLOCK_TOKENS["cpu" if layout.is_cpu_build else "device"]
    if not has_states:
        return usual * layout.decode_context_parallel
    if layout.is_cpu_build:
        # There vLLM keeps some states in other types.
        return None
    state = mamba_state.state_bytes(
        config, tensor_parallel=layout.tensor_parallel, element_bytes=_model_bytes(config, layout)
    )
    if state is None:
        return None
    alignment = max(usual, _MLA_STATE_ALIGNMENT) if is_latent else usual
    total, _ = _layer_bytes(config, layout)
    per_rank = total if is_latent else total // layout.tensor_parallel
    return alignment * math.ceil(state / (alignment * per_rank))


def _model_bytes(config: Mapping[str, Any], layout: Layout) -> int:
    """Return the bytes of one number where the model computes, which is what states are kept in."""
    if layout.dtype in _FLAG_BYTES and layout.dtype != "auto":
        return _FLAG_BYTES[layout.dtype]
    named = str(config.get("dtype") or config.get("torch_dtype") or "auto").removeprefix("torch.")
    return _MODEL_BYTES.get(named, 2)
