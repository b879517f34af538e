# SPDX-License-Identifier: Apache-2.0
"""The compared backends: each as the ``kv_transfer_config`` of an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier_connector.contract.engine import CONFIG_FILE, ConnectorConfig, encode

NONE = "none"
"""vLLM without offloading."""
FS = "fs"
"""vLLM's TieringOffloadingSpec with its ``fs`` tier."""
KVTIER = "kvtier"
"""Ours."""
CPU = "cpu"
"""vLLM's CPU tier alone: what its connector costs with any tier below."""

SIMPLE_EAGER = "simple-eager"
"""vLLM's SimpleCPUOffloadConnector, which copies each block to the CPU when it is computed."""
SIMPLE_LAZY = "simple-lazy"
"""The same connector, which copies a block when the GPU is about to forget it."""

KNOWN = (KVTIER, FS, NONE, CPU, SIMPLE_EAGER, SIMPLE_LAZY)


def has_volume(backend: str) -> bool:
    """Say whether the backend puts blocks on a volume."""
    return backend in {FS, KVTIER}


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Settings that every backend shares."""

    cpu_bytes: int
    block_tokens: int
    is_cpu_build: bool
    """vLLM's CPU build, where only our spec can copy between the engine and the CPU tier."""
    kvtier: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ConnectorConfig to try."""


def transfer_config(backend: str, directory: Path, offload: Offload) -> dict[str, Any] | None:
    """Return the engine's ``kv_transfer_config`` for blocks under the directory; None for no offloading."""
    if backend == NONE:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    extra: dict[str, Any] = {"cpu_bytes_to_use": offload.cpu_bytes}
    if backend in {SIMPLE_EAGER, SIMPLE_LAZY}:
        extra["lazy_offload"] = backend == SIMPLE_LAZY
        return {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    extra["block_size"] = offload.block_tokens
    connector = {"kv_connector": "OffloadingConnector"}
    if backend != CPU:
        extra |= {"spec_name": "TieringOffloadingSpec", "eviction_policy": "lru"}
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(directory)}]
    if backend == KVTIER:
        connector = {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier_connector.vllm_adapter.connector",
        }
        extra["secondary_tiers"] = [_kvtier(directory, offload)]
    if backend == KVTIER or (backend == FS and offload.is_cpu_build):
        extra |= {"spec_name": "KVTierSpec", "spec_module_path": "kvtier_connector.vllm_adapter.spec"}
    return {**connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _kvtier(directory: Path, offload: Offload) -> dict[str, Any]:
    identity = {"model": "bench", "block_tokens": offload.block_tokens}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    config = ConnectorConfig(
        tier="bench/bench",
        root=str(directory / digest),
        digest=digest,
        identity=identity,
        **offload.kvtier,
    )
    path = directory / CONFIG_FILE
    path.write_text(encode(config), encoding="utf-8")
    return {
        "type": "SharedVolumeTier",
        "module_path": "kvtier_connector.vllm_adapter.secondary_tier",
        "config_file": str(path),
    }
