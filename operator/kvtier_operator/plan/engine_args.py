# SPDX-License-Identifier: Apache-2.0
"""The engine's command line as a value: `read` turns ``spec.engine.args`` into an `EngineArgs`. Pure.

vLLM's parser accepts ``--flag value``, ``--flag=value``, underscores for dashes and ``--flag.key value`` for JSON
options. All spellings give the same value here.

`EngineArgs.identity` has the flags without which a block cannot be read. A flag belongs there if it changes the bytes
of a block by more than rounding, their meaning, their layout, or the tokens of a key. When in doubt it does: that costs
a cold cache once, and the other mistake costs wrong answers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_MOST_DIGITS: Final = 4
"""Of a number of engines, stages or tokens in a block; a longer number is a mistake and counts as left out."""

_SHORT: Final = {
    "ac": "attention-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpl": "data-parallel-size-local",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}


IDENTITY: Final = frozenset(
    {
        # Which weights are loaded, and how.
        *("code-revision", "config-format", "convert", "dtype", "hf-config-path", "hf-overrides", "ignore-patterns"),
        *("load-format", "model-class-overrides", "model-impl", "model-loader-extra-config", "model-weights"),
        *("quantization", "quantization-config", "runner", "trust-remote-code"),
        # Decides the weights where load-format makes them up.
        "seed",
        # Long-context RoPE variants choose their factors by it.
        "max-model-len",
        # How KV and states are computed, rounded and laid out.
        *("additional-config", "attention-backend", "attention-config", "block-size", "diffusion-config"),
        *("disable-hybrid-kv-cache-manager", "disable-sliding-window", "enable-trace-replay", "engram-config"),
        *("gdn-prefill-backend", "kda-decode-backend", "kda-prefill-backend", "kv-cache-dtype"),
        *("kv-cache-dtype-skip-layers", "kv-sharing-fast-prefill", "prefix-match-unit", "sparse-indexer-topk-backend"),
        *("swa-bounded-replay", "worker-cls", "enable-mamba-cache-stochastic-rounding"),
        *("enable-mamba-shared-prefix-checkpoint", "mamba-block-size", "mamba-cache-dtype", "mamba-cache-mode"),
        *("mamba-cache-philox-rounds", "mamba-config", "mamba-ssm-cache-dtype", "replayssm-buffer-len"),
        "use-replayssm",
        # Which tokens and heads a rank holds.
        *("cp-kv-cache-interleave-size", "dcp-kv-cache-interleave-size", "decode-context-parallel-size"),
        *("pipeline-parallel-size", "prefill-context-parallel-size"),
        # How an image or a video is processed, which the key names by its own hash.
        *("media-io-kwargs", "mm-device-do-normalize", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path"),
        *("mm-hasher-algorithm", "mm-processor-device", "mm-processor-kwargs", "video-pruning-method"),
        "video-pruning-rate",
        # How an adapter is applied, which the key names by its contents.
        *("enable-mixed-moe-lora-format", "enable-moe-shared-loras", "enable-tower-connector-lora", "lora-dtype"),
        "lora-target-modules",
        # A draft model has KV of its own in the same blocks; the short forms are another way to write the config.
        *("spec-method", "spec-model", "spec-tokens", "speculative-config"),
    }
)
"""Flags that change the bytes of a block or their meaning."""

ENVIRONMENT: Final = (
    "VLLM_ATTENTION_BACKEND",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MLA_DISABLE",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)
"""Variables that change the bytes of a block or their meaning; engines compare besides how they really lay KV out."""


_LENGTH: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)")
_UNITS: Final[Mapping[str, int]] = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Flags of one engine; a flag that is left out, or has a value that vLLM does not take, has its default."""

    words: Mapping[str, tuple[str, ...]]
    """Each flag without its dashes, with the words that follow it."""
    pipeline_parallel: int = 1
    decode_context_parallel: int = 1
    engines_per_pod: int = 1
    """Engine cores of one pod (data parallelism); each of them has a CPU tier of its own."""
    kv_dtype: str = "auto"
    """``--kv-cache-dtype``."""
    dtype: str = "auto"
    block_tokens: int | None = None
    """``--block-size``; None leaves it to vLLM."""
    max_model_len: int | None = None
    """Tokens of the longest prompt and its answer; None leaves it to the model."""
    gpu_memory_utilization: float | None = None
    """Share of a device's memory, above 0 and at most 1; None leaves it to vLLM."""

    def has(self, *flags: str) -> bool:
        """Return whether one of the flags is given."""
        return any(flag in self.words for flag in flags)

    def count(self, flag: str) -> int:
        """Return the whole number of a flag; 1 if it is left out."""
        return _count(self.words, flag)

    @property
    def identity(self) -> dict[str, list[str]]:
        """Return the flags that belong to the identity of a block, in the order of their names."""
        return {flag: list(self.words[flag]) for flag in sorted(self.words) if is_identity(flag)}


NO_ARGS: Final = EngineArgs(words={})
"""An empty command line."""


def read(args: Iterable[str]) -> EngineArgs:
    """Return the value of a command line."""
    return _read(tuple(args))


@functools.lru_cache(maxsize=1024)
def _read(args: tuple[str, ...]) -> EngineArgs:
    found = _words(args)
    return EngineArgs(
        words=found,
        pipeline_parallel=_count(found, "pipeline-parallel-size"),
        decode_context_parallel=_count(found, "decode-context-parallel-size"),
        engines_per_pod=_count(found, "data-parallel-size-local", default=_count(found, "data-parallel-size")),
        kv_dtype=_last(found, "kv-cache-dtype") or "auto",
        dtype=_last(found, "dtype") or "auto",
        block_tokens=_count(found, "block-size") if "block-size" in found else None,
        max_model_len=_length(_last(found, "max-model-len")),
        gpu_memory_utilization=_share(_last(found, "gpu-memory-utilization")),
    )


def is_identity(flag: str) -> bool:
    """Return whether a flag, or an abbreviation that vLLM's parser takes for one, belongs to the identity."""
    positive = flag.removeprefix("no-")
    return any(known.startswith(positive) for known in IDENTITY)


def _words(args: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return every flag with the words that follow it, in order; repeated flags add up."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in args:
        if word.startswith("-") and not _is_number(word):
            text, has_value, value = word.lstrip("-").partition("=")
            flag, has_key, key = text.partition(".")
            flag = _SHORT.get(flag, flag.replace("_", "-"))
            words = ((f".{key}",) if has_key else ()) + ((value,) if has_value else ())
            found[flag] = found.get(flag, ()) + words
        elif flag:
            found[flag] = (*found[flag], word)
    return found


def _last(found: Mapping[str, tuple[str, ...]], flag: str) -> str | None:
    """Return the value that vLLM goes by, which is the last one; None where there is none."""
    words = found.get(flag)
    return words[-1] if words else None


def _count(found: Mapping[str, tuple[str, ...]], flag: str, *, default: int = 1) -> int:
    word = _last(found, flag) or ""
    return max(1, int(word)) if word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS else default


def _length(text: str | None) -> int | None:
    match = _LENGTH.fullmatch(text or "")
    return None if match is None else max(1, int(float(match[1]) * _UNITS[match[2]]))


def _share(text: str | None) -> float | None:
    try:
        share = float(text or "")
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."
