# SPDX-License-Identifier: Apache-2.0
"""Which blocks fit which engine: the identity of a generation, and its digest.

Pure. KV bytes are valid only for the exact model, layout and hashing that made them. The identity is an explicit list
of fields, so that adding a field to the spec changes nobody's cache by accident; raising ``IDENTITY_VERSION`` changes
everybody's on purpose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvtier_connector.contract import BLOCK_FORMAT_VERSION
from kvtier_operator.plan import flags
from kvtier_operator.spec import TierSpec

IDENTITY_VERSION: Final = 1
DIGEST_LENGTH: Final = 16
"""Hex digits: short enough for a label. ``tier.json`` repeats the identity, so nothing hangs on a collision."""

IDENTITY_FLAGS: Final = (
    "attention-backend",
    "attention-config",
    "block-size",
    "code-revision",
    "config-format",
    "cp-kv-cache-interleave-size",
    "dcp-kv-cache-interleave-size",
    "decode-context-parallel-size",
    "disable-hybrid-kv-cache-manager",
    "disable-sliding-window",
    "dtype",
    "hf-config-path",
    "hf-overrides",
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "load-format",
    "mamba-block-size",
    "mamba-cache-dtype",
    "mamba-cache-mode",
    "mamba-ssm-cache-dtype",
    # Long-context RoPE variants choose their factors by it.
    "max-model-len",
    "mm-processor-kwargs",
    "model-class-overrides",
    "model-impl",
    "model-loader-extra-config",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "quantization",
    "quantization-config",
    # Decides the weights where load-format makes them up.
    "seed",
    # A draft model has KV of its own in the same blocks; the short forms are another way to write the config.
    "spec-method",
    "spec-model",
    "spec-tokens",
    "speculative-config",
)
"""Engine flags that change the bytes of a block or their meaning."""

IDENTITY_ENV: Final = ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE")
"""Environment variables that do the same."""


def identity(spec: TierSpec, chunking: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields that decide whether an engine of this spec may read a block.

    Args:
        spec: what the engine is started with.
        chunking: what it is told about the size of its chunks.

    The image stands for what only the engine knows (resolved types, group layout): another image never reads the
    blocks of this one.
    """
    found = {flag: words for flag, words in flags.parse(spec.engine.args).items() if _is_identity(flag)}
    env = {entry["name"]: entry for entry in spec.engine.env if entry["name"] in IDENTITY_ENV}
    return {
        "version": IDENTITY_VERSION,
        "model_name": spec.model.name,
        "model_revision": spec.model.revision,
        "engine_image": spec.engine.image,
        "engine_accelerator": spec.engine.accelerator.resource,
        "engine_tensor_parallel": spec.engine.tensor_parallel,
        "engine_flags": {flag: list(found[flag]) for flag in sorted(found)},
        "engine_env": {name: env[name].get("value", env[name].get("valueFrom")) for name in sorted(env)},
        "engine_chunking": dict(chunking),
        "hash_algorithm": spec.hash.algorithm,
        "hash_seed": spec.hash.seed,
        "block_format": BLOCK_FORMAT_VERSION,
    }


def _is_identity(flag: str) -> bool:
    """Tell whether a flag, or what vLLM's parser would take for one, is part of the identity."""
    positive = flag.removeprefix("no-")
    return any(known.startswith(positive) for known in IDENTITY_FLAGS)


def digest(fields: Mapping[str, Any]) -> str:
    """Return the digest of canonical JSON: key order and white space never matter."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return digest_text(text)


def digest_text(text: str) -> str:
    """Return the digest of one text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
