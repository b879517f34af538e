# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model keep KV, and of which kind, read from its config.json.

Pure. Every family of models writes this in a way of its own; what is not recognised is said to be so, because a number
that is silently wrong sizes a pod wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

_NESTED: Final = ("text_config", "llm_config", "language_config")
_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# Full attention comes every Nth layer; the families whose config.json may leave N out.
_PATTERNS: Final = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}

_UNEVEN: Final[Mapping[str, str]] = {
    "swa_num_key_value_heads": "its sliding-window layers have heads of another number",
    "swa_head_dim": "its sliding-window layers have heads of another size",
    "global_head_dim": "its full-attention layers have heads of another size",
    "block_configs": "its layers differ one by one",
    "compress_ratios": "it compresses the KV of some layers",
    "index_topk": "it keeps an index beside the KV (sparse attention)",
    "cross_attention_layers": "it has cross-attention layers",
}
"""Fields of models whose layers differ in ways that are not computed here, and which way."""


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
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return language_config(thinker)
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, Mapping) and any(count in nested for count in _LAYER_COUNTS):
            # What is said only outside (the type of the numbers, quantization) holds inside, too.
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
    """Count the layers of the language model.

    Raises:
        ConfigUnclear: the config leaves it open, or the model is built in a way that is not known here.
    """
    for field, why in _UNEVEN.items():
        if config.get(field):
            raise ConfigUnclear(f"{why} ({field})")
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
    """MiniMax, Bamba and Kimi Linear: lists of the layers that are attention."""
    types = config.get("attn_type_list")
    if isinstance(types, list):
        return [(FULL,) if each == 1 else (LINEAR,) for each in types]
    indices = config.get("attn_layer_indices")
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
    marks = config.get("no_rope_layers")
    if isinstance(marks, list) and marks:
        return [(SLIDING,) if mark else (FULL,) for mark in marks]
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
