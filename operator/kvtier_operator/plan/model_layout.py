# SPDX-License-Identifier: Apache-2.0
"""The KV of a model as a value: `make_model_layout` reads config.json and gives the bytes of a token in a tier. Pure.

It follows what vLLM allocates and offloads. A chunk is one row with the share of every rank side by side, so a tier
also holds the heads that tensor parallelism copies. Layers of several kinds form groups of equally many layers, and
each group has chunks of its own. A config that is not recognised raises `ConfigUnclear` inside and gives a `KvUnknown`:
a number that is silently wrong sizes a pod wrongly.

In order: the kinds of layers, the bytes of a token, the size of a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.plan.engine_args import NO_ARGS, EngineArgs

FULL: Final = "full"
SLIDING: Final = "sliding"
LINEAR: Final = "linear"
"""A state of fixed size instead of keys and values for each token: Mamba, linear attention, short convolutions."""
NONE: Final = "none"
"""A layer of its own that keeps nothing between tokens: an MLP."""

_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "full_attention": (FULL,),
    "attention": (FULL,),
    "sliding_attention": (SLIDING,),
    "chunked_attention": (SLIDING,),
    "linear_attention": (LINEAR,),
    "mamba": (LINEAR,),
    "mamba2": (LINEAR,),
    "conv": (LINEAR,),
    "hybrid": (FULL, LINEAR),
    "mlp": (NONE,),
    "moe": (NONE,),
}

NESTED: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# Full attention comes every Nth layer; the families whose config.json may leave N out.
_PATTERNS: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}

_MOST_LAYERS: Final = 4096
_LARGEST: Final = 1 << 17
"""More than any dimension of any model. Numbers beyond it are mistakes, and their products fit no field of a status."""


class ConfigUnclear(ValueError):
    """The config.json does not say, or not in a way known here, how large the KV is."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """How many layers keep KV of each kind."""

    full: int
    sliding: int = 0
    linear: int = 0
    window: int | None = None
    """Tokens that a sliding-window layer looks back; None where there is none."""


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part about the language model: multimodal models keep it one or two levels down."""
    if isinstance(config.get("thinker_config"), Mapping):
        return language_config(config["thinker_config"])
    for name in NESTED:
        nested = config.get(name)
        if isinstance(nested, Mapping) and any(count in nested for count in (*_LAYER_COUNTS, "layers_block_type")):
            # The outer part also describes the inner one (the type of the numbers, quantization).
            return {**config, **nested}
    return config


def number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of the fields that is there, a whole number that a dimension can be.

    Raises:
        ConfigUnclear: none is there and there is no default, or it is something else.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise ConfigUnclear(f"{name} is {str(value)[:32]!r}, not a whole number from 1 to {_LARGEST}")
        return value
    if default is None:
        raise ConfigUnclear(f"{names[0]} is missing")
    return default


def read_layers(config: Mapping[str, Any]) -> Layers:
    """Count the layers of the language model."""
    count = number(config, *_LAYER_COUNTS)
    if count > _MOST_LAYERS:
        raise ConfigUnclear(f"it has {count} layers, more than any model")
    kinds = _kinds(config, count)
    if len(kinds) < count:
        raise ConfigUnclear(f"it lists {len(kinds)} layers and has {count}")
    # The last layers of some models read the KV of earlier ones and keep none.
    shared = _optional(config, "num_kv_shared_layers")
    kept = [kind for layer in kinds[: count - shared] for kind in layer]
    layers = Layers(
        full=kept.count(FULL), sliding=kept.count(SLIDING), linear=kept.count(LINEAR), window=_window(config)
    )
    if layers.full + layers.sliding == 0:
        raise ConfigUnclear("none of its layers is an attention layer, so nothing grows with the prompt")
    return layers


def _optional(config: Mapping[str, Any], name: str) -> int:
    """Return a number that is 0 where it is left out."""
    return number(config, name) if config.get(name) else 0


def _window(config: Mapping[str, Any]) -> int | None:
    value = config.get("sliding_window") or config.get("attention_chunk_size")
    return value if isinstance(value, int) else None


def _kinds(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]]:
    """Return the kinds of KV that each layer keeps, first layer first."""
    for read in (_listed, _by_pattern_text, _by_type_list, _by_period, _linear_by_interval, _chunked):
        found = read(config, count)
        if found is not None:
            return found
    return _by_window(config, count)


def _listed(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]] | None:
    if config.get("model_type") == "falcon_h1":
        return [(FULL, LINEAR)] * count
    listed = config.get("layer_types") or config.get("layers_block_type")
    if not isinstance(listed, list):
        return None
    unknown = [name for name in listed if not isinstance(name, str) or name not in _KINDS]
    if unknown:
        raise ConfigUnclear(f"it has layers of type {unknown[0]!r}")
    return [_KINDS[name] for name in listed]


def _by_pattern_text(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]] | None:  # noqa: ARG001  as its siblings
    """Nemotron-H: one letter for each layer."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return None
    letters = {"*": (FULL,), "M": (LINEAR,), "-": (NONE,), "E": (NONE,)}
    unknown = next((letter for letter in pattern if letter not in letters), None)
    if unknown is not None:
        raise ConfigUnclear(f"hybrid_override_pattern has layers of type {unknown!r}")
    return [letters[letter] for letter in pattern]


def _by_type_list(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]] | None:
    """MiniMax, Bamba, LFM2 and Kimi Linear: lists of the layers that are attention."""
    types = config.get("attn_type_list")
    if isinstance(types, list):
        return [(FULL,) if each == 1 else (LINEAR,) for each in types]
    indices = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        indices = [index - 1 for index in linear["full_attn_layers"] if isinstance(index, int)]
    if isinstance(indices, list):
        return [(FULL,) if layer in indices else (LINEAR,) for layer in range(count)]
    return None


def _by_period(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]] | None:
    """Jamba: every Nth layer is attention, starting at an offset."""
    if "attn_layer_period" not in config:
        return None
    period, offset = number(config, "attn_layer_period"), _optional(config, "attn_layer_offset")
    return [(FULL,) if layer % period == offset else (LINEAR,) for layer in range(count)]


def _linear_by_interval(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]] | None:
    """Qwen3-Next: every fourth layer is attention."""
    if "linear_num_value_heads" not in config:
        return None
    interval = number(config, "full_attention_interval", default=4)
    return [(FULL,) if (layer + 1) % interval == 0 else (LINEAR,) for layer in range(count)]


def _chunked(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]] | None:
    """Llama 4: layers with RoPE look at their chunk only."""
    if not config.get("attention_chunk_size"):
        return None
    rope_layers = config.get("no_rope_layers")
    if isinstance(rope_layers, list) and rope_layers:
        return [(SLIDING,) if mark else (FULL,) for mark in rope_layers]
    interval = number(config, "no_rope_layer_interval", default=4)
    return [(FULL,) if (layer + 1) % interval == 0 else (SLIDING,) for layer in range(count)]


def _by_window(config: Mapping[str, Any], count: int) -> Sequence[tuple[str, ...]]:
    """The rest: a window for all layers, for all but every Nth, or for none."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [(FULL,)] * count
    if config.get("use_sliding_window"):
        first = _optional(config, "max_window_layers")
        return [(SLIDING,) if layer >= first else (FULL,) for layer in range(count)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    every = pattern if isinstance(pattern, int) else _PATTERNS.get(str(config.get("model_type")), 0)
    if every < 1:
        return [(SLIDING,)] * count
    return [(FULL,) if (layer + 1) % every == 0 else (SLIDING,) for layer in range(count)]


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
class EngineLayout:
    """How one engine splits and stores the KV."""

    args: EngineArgs = NO_ARGS
    tensor_parallel: int = 1
    is_cpu_build: bool = False
    is_canonical: bool = False
    """The connector's canonical layout: one copy, whatever the parallelism."""

    @property
    def is_single_group(self) -> bool:
        """Tell whether windows save nothing."""
        return self.args.has("disable-hybrid-kv-cache-manager")


@dataclass(frozen=True, kw_only=True)
class ModelLayout:
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
    extra_bytes: int = 0
    """Bytes of one token in one chunk beside those of the layers."""

    @property
    def group_bytes(self) -> int:
        """Return the bytes of one token in one chunk."""
        return self.layers_per_group * self.layer_bytes + self.extra_bytes

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
    """The reason why the size of the KV is unknown."""

    why: str


def make_model_layout(config: Mapping[str, Any], layout: EngineLayout) -> ModelLayout | KvUnknown:
    """Return what one token takes, or why that cannot be told."""
    text = language_config(config)
    try:
        layers = read_layers(text)
        if layout.is_single_group and layers.linear == 0:
            layers = Layers(full=layers.full + layers.sliding)
        layer_bytes, formula = _layer_bytes(text, layout)
        group, attention_groups, state_groups = _group(layers)
        return ModelLayout(
            layers=layers,
            layer_bytes=layer_bytes,
            heads=1 if text.get("kv_lora_rank") else _heads(text),
            layers_per_group=layout.args.pipeline_parallel * _first_stage(group, layout.args.pipeline_parallel),
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
    return size, (math.ceil(layers.full / size) + math.ceil(layers.sliding / size)), math.ceil(layers.linear / size)


def _first_stage(layers: int, stages: int) -> int:
    """Return the layers of the first pipeline stage, which decides the size of every rank's share."""
    share, rest = divmod(layers, stages)
    return max(1, share + (1 if rest == stages - 1 and stages > 1 else 0))


def _layer_bytes(config: Mapping[str, Any], layout: EngineLayout) -> tuple[int, str]:
    """Return the bytes of one token in one layer over all ranks, and the formula."""
    if config.get("kv_lora_rank"):
        return _latent_bytes(config, layout)
    size = _element_bytes(config, layout)
    heads = _heads(config)
    rows, row_text = _head_size(config)
    kept = heads if layout.is_canonical else max(1, heads // layout.tensor_parallel) * layout.tensor_parallel
    copies = f" ({heads} heads, each on {kept // heads} of {layout.tensor_parallel} ranks)" if kept > heads else ""
    total = kept * rows * size // layout.args.decode_context_parallel
    shared = (
        ""
        if layout.args.decode_context_parallel == 1
        else f" / {layout.args.decode_context_parallel} (context parallel)"
    )
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


def attention_heads(config: Mapping[str, Any]) -> int | None:
    """Return the attention heads of one layer; None where the config does not say."""
    try:
        return number(language_config(config), "num_attention_heads", "n_head", "n_heads")
    except ConfigUnclear:
        return None


def has_uneven_heads(config: Mapping[str, Any], ranks: int = 1) -> bool:
    """Tell whether a rank has other heads in some layers, and so blocks of other numbers of tokens."""
    model = language_config(config)
    by_layer = layers.values() if isinstance(layers := model.get("per_layer_config"), Mapping) else ()
    others = [each.get("head_dim") for each in by_layer if isinstance(each, Mapping)]
    others += [model.get("swa_head_dim"), model.get("global_head_dim")]
    names = ("num_key_value_heads", "swa_num_key_value_heads")
    heads = {max(1, model[name] // ranks) for name in names if isinstance(model.get(name), int)}
    return len(heads) > 1 or any(other not in (None, model.get("head_dim")) for other in others)


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


def _latent_bytes(config: Mapping[str, Any], layout: EngineLayout) -> tuple[int, str]:
    """MLA keeps one latent vector for all heads; ranks that hold the same one share a copy on a single node."""
    rank, rope = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim", default=64)
    is_shared = layout.is_canonical or (layout.args.pipeline_parallel == 1 and layout.args.decode_context_parallel == 1)
    copies = 1 if is_shared else layout.tensor_parallel // layout.args.decode_context_parallel or 1
    times = f" x {copies} ranks" if copies > 1 else ""
    packed = _PACKED_LATENTS.get(layout.args.kv_dtype)
    if packed is not None:
        return packed * copies, f"{packed} B ({layout.args.kv_dtype}){times}"
    size = _element_bytes(config, layout)
    return (rank + rope) * size * copies, f"({rank} + {rope}) latent x {size} B{times}"


def _device_copies(config: Mapping[str, Any], layout: EngineLayout) -> int:
    """Every rank has the latent of its own on its device, whatever the tier keeps."""
    if not config.get("kv_lora_rank") or layout.args.pipeline_parallel > 1 or layout.args.decode_context_parallel > 1:
        return 1
    return layout.tensor_parallel


def _element_bytes(config: Mapping[str, Any], layout: EngineLayout) -> int:
    if layout.args.kv_dtype in _CACHE_BYTES:
        return _CACHE_BYTES[layout.args.kv_dtype]
    if layout.args.kv_dtype != "auto":
        raise ConfigUnclear(
            f"--kv-cache-dtype {layout.args.kv_dtype} packs its numbers in a way that is not known here"
        )
    if _is_fp8_checkpoint(config.get("quantization_config")):
        return 1
    return _model_bytes(config, layout)


def _is_fp8_checkpoint(quantization: object) -> bool:
    """Tell whether the checkpoint brings scales for an fp8 KV cache, which ``auto`` then uses."""
    if not isinstance(quantization, Mapping):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"  # noqa: PLR2004  bits
    return str(quantization.get("kv_cache_quant_algo")).lower() == "fp8"


def _block_tokens(config: Mapping[str, Any], layout: EngineLayout, *, has_states: bool) -> int | None:
    """Return the tokens of one block: a page of attention must hold a state, so states make blocks large."""
    is_latent = bool(config.get("kv_lora_rank"))
    usual = layout.args.block_tokens or _BLOCK_TOKENS["cpu" if layout.is_cpu_build else "device"]
    if not has_states:
        return usual * layout.args.decode_context_parallel
    if layout.is_cpu_build:
        # There vLLM keeps some states in other types.
        return None
    state = state_bytes(config, tensor_parallel=layout.tensor_parallel, element_bytes=_model_bytes(config, layout))
    if state is None:
        return None
    alignment = max(usual, _MLA_STATE_ALIGNMENT) if is_latent else usual
    total, _ = _layer_bytes(config, layout)
    return alignment * math.ceil(state / (alignment * (total if is_latent else total // layout.tensor_parallel)))


def _model_bytes(config: Mapping[str, Any], layout: EngineLayout) -> int:
    """Return the bytes of one number where the model computes, which is what states are kept in."""
    if layout.args.dtype != "auto":
        if layout.args.dtype not in _FLAG_BYTES:
            raise ConfigUnclear(f"--dtype {layout.args.dtype} is not known here")
        return _FLAG_BYTES[layout.args.dtype]
    named = str(config.get("dtype") or config.get("torch_dtype") or "auto").removeprefix("torch.")
    if named not in _MODEL_BYTES:
        raise ConfigUnclear(f"dtype {named!r} is not known here")
    return _MODEL_BYTES[named]


_STATE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def state_bytes(config: Mapping[str, Any], *, tensor_parallel: int, element_bytes: int) -> int | None:
    """Return the bytes of one layer's state on one rank, or None for a family that is not known here."""
    convolution, recurrent = _shapes(config, tensor_parallel) or (0, 0)
    return convolution * element_bytes + recurrent * _recurrent_bytes(config, element_bytes) or None


def _recurrent_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Return the bytes of one number of the recurrent part, which some models keep more exactly."""
    if config.get("model_type") == "nemotron_h":
        return _STATE_BYTES.get(str(config.get("mamba_ssm_cache_dtype", "float32")), 4)
    named = config.get("mamba_ssm_dtype") if str(config.get("model_type")).startswith("qwen3_5") else None
    return _STATE_BYTES.get(str(named), element_bytes)


def _shapes(config: Mapping[str, Any], ranks: int) -> tuple[int, int] | None:
    """Return how many numbers the convolution and the recurrent part keep on one rank."""
    if "linear_num_value_heads" in config:
        return _gated_delta_net(config, ranks)
    if "mamba_num_heads" in config or "mamba_n_heads" in config:
        return _mamba2(config, ranks)
    if "conv_L_cache" in config:
        return number(config, "conv_dim", "hidden_size") // ranks * (number(config, "conv_L_cache") - 1), 0
    if "mamba_d_state" in config and "mamba_expand" in config:
        inner = number(config, "mamba_expand") * number(config, "hidden_size") // ranks
        return inner * (number(config, "mamba_d_conv", default=4) - 1), inner * number(config, "mamba_d_state")
    return None


def _gated_delta_net(config: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    key_size, value_size = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    width = (2 * keys * key_size + values * value_size) // ranks
    kernel = number(config, "linear_conv_kernel_dim", default=4)
    return width * (kernel - 1), math.ceil(values / ranks) * key_size * value_size


def _mamba2(config: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    heads = number(config, "mamba_num_heads", "mamba_n_heads")
    head_size = number(config, "mamba_head_dim", "mamba_d_head")
    groups = number(config, "n_groups", "mamba_n_groups", default=1)
    state = number(config, "ssm_state_size", "mamba_d_state")
    if groups % ranks:
        # Every rank needs the groups of its own heads.
        groups = ranks
    width = (number(config, "mamba_d_ssm", default=heads * head_size) + 2 * groups * state) // ranks
    kernel = number(config, "conv_kernel", "mamba_d_conv", default=4)
    return width * (kernel - 1), math.ceil(heads / ranks) * head_size * state
