# SPDX-License-Identifier: Apache-2.0
"""Which blocks fit which engine: the identity of a generation, and its digest.

Pure. KV bytes are valid only for the exact model, layout and hashing that made them. The identity is an explicit list
of fields, so that a new field of the spec changes no cache by accident; raising ``IDENTITY_VERSION`` changes
every cache on purpose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from kvtier_connector.contract.engine import ACROSS_VERIFIED, BLOCK_FORMAT_VERSION
from kvtier_operator.api import TierSpec
from kvtier_operator.plan import engine_args

IDENTITY_VERSION: Final = 1
DIGEST_LENGTH: Final = 16
"""Hex digits: short enough for a label. ``tier.json`` repeats the identity, so nothing hangs on a collision."""


def identity(spec: TierSpec, chunking: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields that decide whether an engine of this spec may read a block.

    The image stands for what only the engine knows (resolved types, group layout): another image never reads the
    blocks of this one, or compares them first.
    """
    env = {entry["name"]: entry for entry in spec.engine.env if entry["name"] in engine_args.ENVIRONMENT}
    return {
        "version": IDENTITY_VERSION,
        "model_name": spec.model.name,
        "model_revision": spec.model.revision,
        "engine_image": "any" if spec.generations.across_releases == ACROSS_VERIFIED else spec.engine.image,
        "engine_accelerator": spec.engine.accelerator.resource,
        "engine_tensor_parallel": "any" if spec.disk.canonical_layout else spec.engine.tensor_parallel,
        "engine_flags": engine_args.read(spec.engine.args).identity,
        "engine_env": {name: env[name].get("value", env[name].get("valueFrom")) for name in sorted(env)},
        "engine_chunking": dict(chunking),
        "hash_algorithm": spec.hash.algorithm,
        "hash_seed": spec.hash.seed,
        "block_format": BLOCK_FORMAT_VERSION,
        # Only where it is another than ever: a release that knows one more keeps everybody's cache.
        **({"connector": spec.connector.identity} if spec.connector.identity else {}),
    }


def digest(fields: Mapping[str, Any]) -> str:
    """Return the digest of canonical JSON: key order and white space never matter."""
    return digest_text(json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True))


def digest_text(text: str) -> str:
    """Return the digest of one text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
