# SPDX-License-Identifier: Apache-2.0
"""The status of a Deployment: counts, and the conditions that `kubectl rollout status` and `kubectl wait` read.

Pure, but that a deadline is compared with the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_localcluster import conditions
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.controllers import rollout
from kvtier_localcluster.kinds import Json, seconds_since

_DONE = "NewReplicaSetAvailable"
_LATE = "ProgressDeadlineExceeded"
_DEFAULT_DEADLINE_SECONDS = 600
_COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "unavailableReplicas")


def status_of(deployment: Json, *, sets: Sequence[Json], new: Json | None, now: str) -> Json:
    """Return the status; counts of zero are left out, as the API does."""
    spec = deployment["spec"]
    before = deployment.get("status") or {}
    replicas = int(spec.get("replicas", 1))
    counts = {
        "replicas": _total(sets, "replicas"),
        "updatedReplicas": _total([new] if new else [], "replicas"),
        "readyReplicas": _total(sets, "readyReplicas"),
        "availableReplicas": _total(sets, "availableReplicas"),
    }
    counts["unavailableReplicas"] = max(0, _wanted(sets) - counts["availableReplicas"])
    limits = rollout.bounds(spec.get("strategy") or {}, replicas)
    is_recreated = (spec.get("strategy") or {}).get("type") == "Recreate"
    minimum = replicas - (0 if is_recreated else limits.unavailable)
    wanted = [_available(counts["availableReplicas"] >= minimum)]
    progressing = _progressing(deployment, counts, new)
    written = conditions.updated(before.get("conditions") or [], [*wanted, progressing], now)
    for condition in written:
        condition["lastUpdateTime"] = _update_time(before, condition, counts, now)
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        **{name: value for name, value in counts.items() if value},
        "conditions": written,
    }


def seconds_to_deadline(deployment: Json, status: Json) -> float | None:
    """Return when to look again for a rollout that does not progress; None where there is nothing to wait for."""
    condition = conditions.find(status["conditions"], "Progressing")
    if condition is None or condition["reason"] in (_DONE, _LATE) or deployment["spec"].get("paused"):
        return None
    return max(1.0, _deadline_seconds(deployment) - seconds_since(condition["lastUpdateTime"]) + 1)


def _available(has_minimum: bool) -> Condition:
    if has_minimum:
        return Condition(
            "Available", holds=True, reason="MinimumReplicasAvailable", message="Deployment has minimum availability."
        )
    return Condition(
        "Available",
        holds=False,
        reason="MinimumReplicasUnavailable",
        message="Deployment does not have minimum availability.",
    )


def _progressing(deployment: Json, counts: dict[str, int], new: Json | None) -> Condition:
    replicas = int(deployment["spec"].get("replicas", 1))
    before = deployment.get("status") or {}
    known = conditions.find(before.get("conditions") or [], "Progressing") or {}
    name = new["metadata"]["name"] if new else ""
    if deployment["spec"].get("paused"):
        return Condition("Progressing", holds=True, reason="DeploymentPaused", message="Deployment is paused")
    is_updated = counts["replicas"] == counts["updatedReplicas"] == replicas
    if is_updated and counts["availableReplicas"] == replicas:
        return Condition(
            "Progressing", holds=True, reason=_DONE, message=f'ReplicaSet "{name}" has successfully progressed.'
        )
    was_done = known.get("reason") == _DONE and f'"{name}"' in known.get("message", "")
    if was_done and counts["replicas"] == counts["updatedReplicas"]:  # a pod that fails later is no new rollout
        return Condition("Progressing", holds=True, reason=_DONE, message=known["message"])
    if not _has_moved(before, counts) and known and known.get("reason") not in (_DONE, "DeploymentPaused"):
        since = known.get("lastUpdateTime")
        is_late = known["reason"] == _LATE or (since and seconds_since(since) > _deadline_seconds(deployment))
        if is_late:
            return Condition(
                "Progressing", holds=False, reason=_LATE, message=f'ReplicaSet "{name}" has timed out progressing.'
            )
    return Condition(
        "Progressing", holds=True, reason="ReplicaSetUpdated", message=f'ReplicaSet "{name}" is progressing.'
    )


def _update_time(before: Json, condition: Json, counts: dict[str, int], now: str) -> str:
    known = conditions.find(before.get("conditions") or [], condition["type"]) or {}
    is_same = all(known.get(field) == condition.get(field) for field in ("status", "reason", "message"))
    has_moved = condition.get("reason") == "ReplicaSetUpdated" and _has_moved(before, counts)
    return now if has_moved or not is_same else str(known.get("lastUpdateTime", now))


def _has_moved(before: Json, counts: dict[str, int]) -> bool:
    return any(int(before.get(name) or 0) != counts[name] for name in _COUNTS)


def _deadline_seconds(deployment: Json) -> int:
    return int(deployment["spec"].get("progressDeadlineSeconds", _DEFAULT_DEADLINE_SECONDS))


def _total(sets: Sequence[Json], field: str) -> int:
    return sum(int((each.get("status") or {}).get(field) or 0) for each in sets)


def _wanted(sets: Sequence[Json]) -> int:
    return sum(int(each["spec"].get("replicas", 1)) for each in sets)
