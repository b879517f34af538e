# SPDX-License-Identifier: Apache-2.0
"""How many pods each generation of a Deployment may have next. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_localcluster.kinds import Json

HASH_LABEL = "pod-template-hash"
_DEFAULT_SHARE = "25%"


@dataclass(frozen=True)
class Generation:
    """One ReplicaSet of a Deployment, as a rollout sees it."""

    name: str
    replicas: int
    """How many pods it was told to have."""
    available: int


@dataclass(frozen=True)
class Bounds:
    """How far a rollout may deviate from the wanted number of pods."""

    surge: int
    unavailable: int


def template_hash(template: Json) -> str:
    """Return a short text that identifies a pod template."""
    canonical = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def bounds(strategy: Json, replicas: int) -> Bounds:
    """Read maxSurge (rounded up) and maxUnavailable (rounded down); at least one of them lets the rollout move."""
    rolling = strategy.get("rollingUpdate") or {}
    surge = math.ceil(_share(rolling.get("maxSurge", _DEFAULT_SHARE), replicas))
    unavailable = math.floor(_share(rolling.get("maxUnavailable", _DEFAULT_SHARE), replicas))
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return Bounds(surge=surge, unavailable=min(unavailable, replicas))


def rolling_step(replicas: int, limits: Bounds, *, new: Generation, old: Sequence[Generation]) -> dict[str, int]:
    """Return the next size of every generation: new pods within the surge, old ones end when others are available."""
    sizes = {new.name: _grown(replicas, limits, new=new, old=old), **{each.name: each.replicas for each in old}}
    total = new.replicas + sum(each.replicas for each in old)
    available = new.available + sum(each.available for each in old)
    minimum = replicas - limits.unavailable
    budget = total - minimum - max(0, new.replicas - new.available)
    for each in old:  # pods that serve nobody go first
        removed = min(max(0, each.replicas - each.available), max(0, budget))
        sizes[each.name] -= removed
        budget -= removed
    spare = min(budget, available - minimum)
    for each in old:
        removed = min(sizes[each.name], max(0, spare))
        sizes[each.name] -= removed
        spare -= removed
    return sizes


def recreate_step(replicas: int, *, new: Generation, old: Sequence[Generation], old_pods: int) -> dict[str, int]:
    """Return the next sizes where no two generations may overlap: old ones end before the new one starts."""
    waits = old_pods > 0 or any(each.replicas for each in old)
    return {new.name: new.replicas if waits else replicas, **{each.name: 0 for each in old}}


def _grown(replicas: int, limits: Bounds, *, new: Generation, old: Sequence[Generation]) -> int:
    if new.replicas >= replicas:
        return replicas
    room = replicas + limits.surge - new.replicas - sum(each.replicas for each in old)
    return min(replicas, new.replicas + max(0, room))


def _share(value: Any, replicas: int) -> float:
    if isinstance(value, str) and value.endswith("%"):
        return replicas * int(value[:-1]) / 100
    return float(value)
