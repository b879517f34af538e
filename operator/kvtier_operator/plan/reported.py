# SPDX-License-Identifier: Apache-2.0
"""Sizes of KV that engines reported, for models whose config does not tell them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier_operator.api.status_schema import Capacity
from kvtier_operator.snapshot import Snapshot

UNKNOWN: Final = "KV bytes per token are unknown"
"""Begins the note about a model whose config does not tell them."""


REPORTED: Final = "reported by the engine"
"""Begins the formula of sizes that one reported."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    pod: str
    token_bytes: int
    chunk_bytes: int


def add_reported(found: Capacity, snapshot: Snapshot | None, *, cpu_bytes: int) -> Capacity:
    """Return the capacity with what the serving engines reported in the place of what is unknown.

    Engines that disagree, as in the middle of a rollout to another model, add nothing.
    """
    sizes = _sizes(snapshot)
    if sizes is None:
        return found
    if found.kv_bytes_per_token is not None:
        return found if found.chunk_bytes is not None else found.model_copy(update={"chunk_bytes": sizes.chunk_bytes})
    disk = found.disk_bytes
    return found.model_copy(
        update={
            "chunk_bytes": sizes.chunk_bytes,
            "kv_bytes_per_token": sizes.token_bytes,
            "kv_formula": f"{REPORTED} {sizes.pod}",
            "cpu_tokens": cpu_bytes // sizes.token_bytes,
            "disk_tokens": None if disk is None else disk // sizes.token_bytes,
            "notes": tuple(each for each in found.notes if not each.startswith(UNKNOWN)),
        }
    )


def _sizes(snapshot: Snapshot | None) -> _Sizes | None:
    pods = [] if snapshot is None else sorted(snapshot.pods, key=lambda pod: pod.name)
    found = [
        _Sizes(pod=pod.name, token_bytes=seen.token_bytes, chunk_bytes=seen.chunk_bytes)
        for pod in pods
        if (seen := pod.report) is not None and seen.token_bytes and pod.is_ready and not pod.is_terminating
    ]
    return found[0] if len({(each.token_bytes, each.chunk_bytes) for each in found}) == 1 else None
