# SPDX-License-Identifier: Apache-2.0
"""What only the engine knows about its blocks: it becomes part of the identity that ``tier.json`` holds.

The operator's digest covers what the user wrote. The engine resolves the rest (types, groups, sizes), and two engines
with the same flags can still differ there. The list is explicit: a new field in vLLM's config changes nobody's cache.

A tier is told little of vLLM's config; `KVTierSpec` learns the rest from our connector. What is not known is None,
and None differs from everything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier_connector.fingerprints.model_files import fingerprint
from kvtier_connector.fingerprints.packing import Declared, layout_env
from kvtier_connector.fingerprints.weights import join
from kvtier_connector.store.format import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig


PREFIX = "engine."


def engine_facts(
    spec: OffloadingSpec, declared: Sequence[Declared], *, bytes_per_chunk: int, revision: str = "main"
) -> dict[str, Any]:
    """Return the facts by name, each name with `PREFIX`; JSON values only.

    Args:
        spec: vLLM's settings of the engine.
        declared: what its workers declare, in the order of their ranks.
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
        "weights": fingerprint(config.model.name, revision) or _loaded(declared),
        "kv_dtype": config.model.dtype,
        "kv_layout": config.kv_cache_layout,
        "backends": sorted({backend for each in declared for backend in each.backends}),
        "layout_env": layout_env(),
        # Canonical rows are the same whatever the ranks hold.
        "layout": "canonical" if is_topology_free else sorted({each.layout for each in declared}),
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
        **_resolved(getattr(spec, "engine_config", None)),
    }
    return {f"{PREFIX}{name}": value for name, value in facts.items()}


def _loaded(declared: Sequence[Declared]) -> str | None:
    """Return the weights by what was loaded, where no files can be found that say it."""
    found = join([each.weights for each in declared])
    return None if found is None else f"loaded:{found[:32]}"


def _resolved(config: VllmConfig | None) -> dict[str, Any]:
    """Return what vLLM made of the user's settings."""
    names = ("revision", "dtype", "quantization", "rope", "hf_overrides", "kv_cache_dtype", "hash_algorithm")
    if config is None:
        return dict.fromkeys(names)
    model, cache = config.model_config, config.cache_config
    rope = {
        name: getattr(model.hf_text_config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")
    }
    values = (
        model.revision,
        str(model.dtype).removeprefix("torch."),
        None if model.quantization is None else str(model.quantization),
        _plain(rope),
        _plain(model.hf_overrides),
        str(cache.cache_dtype),
        str(cache.prefix_caching_hash_algo),
    )
    return dict(zip(names, values, strict=True))


def _plain(value: Any) -> Any:
    """Return it if it is made of what JSON has; of a function no more than its name is known."""
    return json.loads(
        json.dumps(value, sort_keys=True, default=lambda other: getattr(other, "__qualname__", str(other)))
    )
