# SPDX-License-Identifier: Apache-2.0
"""Conditions that do not apply to a tier because of its connector, and the program that does the work instead. Pure."""

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
    """Return the judgement of a condition that does not apply to the connector of a tier; None where it applies."""
    if spec is None:
        return None
    if kind == _SHARED and snapshot is not None and (found := _redis_is_silent(spec, snapshot)) is not None:
        return found
    connector = spec.connector
    label = f"spec.connector.type {connector.label}"
    if kind in _OF_THE_VOLUME and not connector.uses_volume:
        unused = "; spec.volume is kept and not mounted" if spec.volume.is_there else ""
        return _says(f"{label} keeps nothing on a shared volume{unused}")
    if kind in _OF_THE_JANITOR and snapshot is not None and (found := _is_orphaned(spec, snapshot)) is not None:
        return found if kind == "JanitorHealthy" else _says("engines may not store: see JanitorHealthy")
    if kind in _OF_THE_JANITOR and not connector.has_janitor:
        return _says(f"{label} has no janitor: {connector.cleaner}")
    if kind in _OF_KVTIER and not connector.is_ours:
        return _says(
            f"{label} does not report its loads, so nothing can be proven or judged here: `kvtier bench` measures them"
        )
    return None


def _redis_is_silent(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return that engines found no Redis when they started; None where they found one, or need none."""
    lmcache = spec.connector.used_lmcache
    if lmcache is None or lmcache.redis is None:
        return None
    silent = {
        pod.name: problem
        for pod in snapshot.pods
        for container in pod.containers
        if container.name == names.REDIS_CHECK_CONTAINER and (problem := _problem(container.exit_message))
        if not pod.is_terminating
    }
    if not silent:
        return None
    name, why = min(silent.items())
    where = "spec.connector.lmcache.redis" if spec.connector.hybrid is None else "spec.connector.hybrid.lmcache.redis"
    return unknown(
        Reason.STORE_UNREACHABLE,
        f"pod {listed(sorted(silent))} found no Redis when it started ({name}: {why}), and serves without the blocks "
        f"of others. Correct {where}, or see that the Redis runs and the pods can reach it. Then set the annotation "
        f"{names.ANNOTATION_RESTART}, unless the log says that LMCache has connected since",
    )


def _is_orphaned(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return that no janitor permits these engines to store into the blocks of the other tier."""
    owner, janitors = spec.connector.blocks_of, {each.name: each.has_janitor for each in snapshot.neighbours}
    if owner is None or janitors.get(owner):
        return None
    why, remedy = f"there is no tier {owner} on this claim", "create it, correct the name"
    if owner in janitors:
        why = f"the tier {owner} has no janitor"
        remedy = "set its spec.janitor.enabled to true and give it a connector that a janitor clears"
    return Problem(
        Reason.JANITOR_MISSING,
        f"spec.connector.hybrid.nixl.blocksOf: {why}, so these engines get no permit and store nothing: "
        f"{remedy}, or leave the field out",
    )


def _problem(text: str) -> str:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return ""
    return str(found.get("problem", ""))[:200] if isinstance(found, dict) else ""


def _says(message: str) -> Problem:
    return unknown(Reason.NOT_APPLICABLE, message)
