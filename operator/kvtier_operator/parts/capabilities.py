# SPDX-License-Identifier: Apache-2.0
"""Which conditions say nothing of a tier because of its connector, and who looks after that instead. Pure."""

from __future__ import annotations

import json
from typing import Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import Problem, listed, unknown
from kvtier_operator.snapshot import Snapshot

_OF_THE_VOLUME: Final = frozenset({"VolumeBound", "ClaimShared", "StorageChecked"})
_OF_THE_JANITOR: Final = frozenset({"DiskHealthy", "DiskWithinBudget", "JanitorHealthy"})
_SHARED: Final = "SharedCacheVerified"
_OF_KVTIER: Final = frozenset({_SHARED, "DiskEffective"})


def not_applicable(kind: str, spec: TierSpec | None, snapshot: Snapshot | None = None) -> Problem | None:
    """Return what is said of a condition that a tier's connector leaves nothing to judge of; None where it does not."""
    if spec is None:
        return None
    if kind == _SHARED and snapshot is not None and (told := _redis_is_silent(spec, snapshot)) is not None:
        return told
    connector = spec.connector
    label = f"spec.connector.type {connector.label}"
    if kind in _OF_THE_VOLUME and not connector.uses_volume:
        unused = "; spec.volume is kept and not mounted" if spec.volume.is_there else ""
        return _says(f"{label} keeps nothing on a shared volume{unused}")
    if kind == "JanitorHealthy" and snapshot is not None and (told := _is_orphaned(spec, snapshot)) is not None:
        return told
    if kind in _OF_THE_JANITOR and not connector.has_janitor:
        return _says(f"{label} has no janitor: {connector.cleaner}")
    if kind in _OF_KVTIER and not connector.is_ours:
        return _says(
            f"{label} does not tell what it loads, so nobody can prove or judge it here: `kvtier bench` measures it"
        )
    return None


def _redis_is_silent(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return that engines found no Redis when they started; None where they did, or need none."""
    lmcache = spec.connector.used_lmcache
    if lmcache is None or lmcache.redis is None:
        return None
    silent = {
        pod.name: told
        for pod in snapshot.pods
        for container in pod.containers
        if container.name == names.REDIS_CHECK_CONTAINER and (told := _problem(container.exit_message))
        if not pod.is_terminating
    }
    if not silent:
        return None
    name, why = min(silent.items())
    where = "spec.connector.lmcache.redis" if spec.connector.hybrid is None else "spec.connector.hybrid.lmcache.redis"
    return unknown(
        Reason.STORE_UNREACHABLE,
        f"pod {listed(sorted(silent))} found no Redis when it started ({name}: {why}), and serves without what others "
        f"have computed: correct {where}, or see that the Redis runs and lets the pods in, then set the annotation "
        f"{names.ANNOTATION_RESTART}; LMCache may have connected since, which its log tells",
    )


def _is_orphaned(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return that the tier whose blocks these engines write is not there to look after them."""
    owner = spec.connector.blocks_of
    if owner is None or owner in {each.name for each in snapshot.neighbours}:
        return None
    return Problem(
        reason=Reason.JANITOR_MISSING,
        message=f"spec.connector.hybrid.nixl.blocksOf: there is no tier {owner} on this claim, so nobody clears what "
        "these engines write: create it, correct the name, or leave the field out",
    )


def _problem(text: str) -> str:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return ""
    return str(found.get("problem", ""))[:200] if isinstance(found, dict) else ""


def _says(message: str) -> Problem:
    return unknown(Reason.NOT_APPLICABLE, message)
