# SPDX-License-Identifier: Apache-2.0
"""The compared backends of `backends.yaml`: each as the ``kv_transfer_config`` of an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from kvtier_connector.contract.engine import CONFIG_FILE, ConnectorConfig, encode

NONE: Final = "none"
"""vLLM without offloading."""
BACKENDS: Final[Mapping[str, Mapping[str, Any]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
KNOWN: Final = tuple(name for name, backend in BACKENDS.items() if name == NONE or "transfer" in backend)
"""Those that can be played."""


def has_volume(backend: str) -> bool:
    """Say whether the backend puts blocks on a volume."""
    return "{directory}" in json.dumps(BACKENDS[backend])


def volume(backend: str) -> str:
    """Return the name of the directory for the backend's blocks, or nothing."""
    return BACKENDS[backend].get("volume", backend) if has_volume(backend) else ""


def file_tokens(backend: str, block_tokens: int) -> int:
    """Return how many tokens a file of the backend has."""
    extra = BACKENDS[backend].get("transfer", {}).get("kv_connector_extra_config", {})
    return int(extra.get("lmcache.chunk_size", block_tokens))


def transfer_config(  # noqa: PLR0913  what an engine is told
    backend: str,
    directory: Path,
    *,
    cpu_bytes: int,
    block_tokens: int,
    is_cpu_build: bool,
    kvtier: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the engine's ``kv_transfer_config`` for blocks under the directory; None for no offloading.

    Fields of ConnectorConfig to try are those of `kvtier`.
    """
    if backend == NONE:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    identity = {"model": "bench", "block_tokens": block_tokens}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    root = str(directory / digest)
    config = ConnectorConfig(tier="bench/bench", root=root, digest=digest, identity=identity, **kvtier)
    (directory / CONFIG_FILE).write_text(encode(config), encoding="utf-8")
    known = json.dumps(BACKENDS[backend]).replace("{directory}", str(directory))
    found: dict[str, Any] = json.loads(known)["transfer"]
    extra = found.get("kv_connector_extra_config", {})
    if found["kv_connector"] == "LMCacheConnectorV1":
        extra["lmcache.max_local_cpu_size"] = cpu_bytes / 1e9
    else:
        extra["cpu_bytes_to_use"] = cpu_bytes
    if found["kv_connector"] in {"OffloadingConnector", "KVTierConnector"}:
        extra["block_size"] = block_tokens
    if is_cpu_build:
        extra |= BACKENDS[backend].get("on_cpu_build", {})
    return {**found, "kv_role": "kv_both", "kv_connector_extra_config": extra}
