# SPDX-License-Identifier: Apache-2.0
"""Sizes of KV that engines reported, for models whose config does not tell them. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator.api.status_schema import Capacity
from kvtier_operator.snapshot import Snapshot

UNKNOWN: Final = "KV bytes per token are unknown"
"""Begins the note about a model whose config does not tell them."""
REPORTED: Final = "reported by the engine"
"""Begins the formula of sizes that one reported."""


def add_reported(found: Capacity, snapshot: Snapshot | None, *, cpu_bytes: int, config_digest: str) -> Capacity:
    """Return the capacity with what the serving engines reported in the place of what is unknown.

    Engines that disagree add nothing, and neither do those of another configuration: in a rollout, while the tier is
    paused or its spec refused, they may run another model.
    """
    reports = [
        (pod.name, seen.token_bytes, seen.chunk_bytes)
        for pod in ([] if snapshot is None else sorted(snapshot.pods, key=lambda pod: pod.name))
        if pod.config_digest == config_digest
        if (seen := pod.report) is not None and seen.token_bytes and pod.is_ready and not pod.is_terminating
    ]
    if len({each[1:] for each in reports}) != 1:
        return found
    name, token_bytes, chunk_bytes = reports[0]
    if found.kv_bytes_per_token is not None:
        return found if found.chunk_bytes is not None else found.model_copy(update={"chunk_bytes": chunk_bytes})
    disk = found.disk_bytes
    return found.model_copy(
        update={
            "chunk_bytes": chunk_bytes,
            "kv_bytes_per_token": token_bytes,
            "kv_formula": f"{REPORTED} {name}",
            "cpu_tokens": cpu_bytes // token_bytes,
            "disk_tokens": None if disk is None else disk // token_bytes,
            "notes": tuple(each for each in found.notes if not each.startswith(UNKNOWN)),
        }
    )
