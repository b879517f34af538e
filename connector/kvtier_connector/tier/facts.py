# SPDX-License-Identifier: Apache-2.0
"""What only the engine knows about its blocks: it becomes part of the identity that ``tier.json`` holds.

The operator's digest covers what the user wrote. The engine resolves the rest (types, groups, sizes), and two engines
with the same flags can still differ there. The list is explicit: a new field in vLLM's config changes nobody's cache.

The hash algorithm is not here: vLLM sets its current config in workers only, and the tier is built in the scheduler.
It is part of the operator's identity.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier_connector.store.format import FORMAT_VERSION
from kvtier_connector.tier.weights import fingerprint

PREFIX = "engine."


def engine_facts(spec: OffloadingSpec, *, bytes_per_chunk: int, revision: str = "main") -> dict[str, Any]:
    """Return the facts by name, each name with `PREFIX`; JSON values only.

    Args:
        spec: vLLM's settings of the engine.
        bytes_per_chunk: size of the payload of a block file.
        revision: branch, tag or commit of the model that the user asked for.
    """
    config = spec.config
    parallel = config.parallel
    # Rows of the direct layout hold the ranks side by side, so they fit one topology. Only the canonical layout, which
    # vLLM certifies layer by layer, is free of it.
    is_topology_free = bool(config.canonical_layout and parallel.is_parallelism_agnostic)
    topology = {
        "world_size": parallel.world_size,
        "tensor_parallel": parallel.tp_size,
        "pipeline_parallel": parallel.pp_size,
        "prefill_context_parallel": parallel.pcp_size,
        "decode_context_parallel": parallel.dcp_size,
    }
    facts = {
        "model_name": config.model.name,
        "weights": fingerprint(config.model.name, revision),
        "kv_dtype": config.model.dtype,
        "kv_layout": config.kv_cache_layout,
        "is_layout_canonical": bool(config.canonical_layout),
        "is_layout_replicated": bool(config.replicated_layout),
        "groups": [
            {"tokens_per_block": group.tokens_per_block, "layers": list(group.layer_names)} for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "bytes_per_chunk": bytes_per_chunk,
        "topology": "any" if is_topology_free else topology,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "block_format": FORMAT_VERSION,
    }
    return {f"{PREFIX}{name}": value for name, value in facts.items()}
