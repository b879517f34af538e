# SPDX-License-Identifier: Apache-2.0
"""Look after the Job that tries a new claim: read how far it is, make it, replace one of another claim, end it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtier_operator import names
from kvtier_operator.api.reasons import Reason
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts.preflight import CHECKED, preflight
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.preflight_result import JobState, Preflight, State, judge, key_of, remembered
from kvtier_operator.snapshot import Snapshot


def advance(cluster: Cluster, plan: TierPlan, snapshot: Snapshot, status: Mapping[str, Any]) -> Preflight:
    """Bring the preflight of a tier a step further and return how far it is.

    Args:
        cluster: what is read and written; not at all once a claim was found good, or is known not to be tried.
        plan: what the tier becomes.
        snapshot: what stands.
        status: what the status says so far.

    Raises:
        ClusterError: the Job could not be read or written.
    """
    storage = status.get("storage") or {}
    known = remembered(plan.spec, snapshot, storage)
    if known is not None and known.state is State.OFF:
        return _end(cluster, plan, known, status)
    if known is not None or plan.spec.paused:
        return known or Preflight(state=State.RUNNING, detail="the tier is paused")
    key = key_of(plan.spec, snapshot)
    job = _look(cluster, plan)
    if job.key and job.key != key and not job.is_foreign:
        cluster.delete(_key(plan), plan.tier.namespace, uid=job.uid)
    elif not job.uid:
        is_bound = snapshot.claim is not None and snapshot.claim.phase == "Bound"
        cluster.apply(preflight(plan, key, places_volume=plan.is_on_one_node and not is_bound), over=None)
    return judge(key, storage, job)


def _end(cluster: Cluster, plan: TierPlan, off: Preflight, status: Mapping[str, Any]) -> Preflight:
    """Delete a Job that nobody waits for any more. That it is off is told afterwards, so it is looked for once."""
    conditions = status.get("conditions", ())
    told: Mapping[str, Any] = next((each for each in conditions if each["type"] == CHECKED.kind), {})
    if (told.get("reason"), told.get("message")) == (Reason.PREFLIGHT_OFF.value, off.detail):
        return off
    if plan.spec.paused:
        return replace(off, detail=f"{off.detail}; the tier is paused, and a Job that runs goes on")
    found = cluster.get(_key(plan), plan.tier.namespace)
    if found is not None and names.is_ours(found, plan.tier):
        cluster.delete(_key(plan), plan.tier.namespace, uid=found["metadata"]["uid"])
    return off


def _key(plan: TierPlan) -> ObjectKey:
    return ObjectKey(api_version="batch/v1", kind="Job", name=names.preflight(plan.tier))


def _look(cluster: Cluster, plan: TierPlan) -> JobState:
    tier = plan.tier
    found = cluster.get(_key(plan), tier.namespace)
    if found is None:
        return JobState()
    uid = found["metadata"]["uid"]
    if not names.is_ours(found, tier):
        return JobState(uid=uid, is_foreign=True)
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_PREFLIGHT},{names.LABEL_TIER}={tier.name}"
    pods = [
        pod
        for pod in cluster.list("v1", "Pod", namespace=tier.namespace, selector=selector)
        if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences", ()))
    ]
    ended = [each for each in (_terminated(pod) for pod in pods) if each is not None]
    # One that went through counts, whatever failed before it.
    best = min(ended, key=lambda each: int(each.get("exitCode", 1) != 0), default=None)
    conditions = found.get("status", {}).get("conditions", ())
    failed: Mapping[str, Any] = next(
        (each for each in conditions if each["type"] == "Failed" and each["status"] == "True"), {}
    )
    return JobState(
        key=(found["metadata"].get("annotations") or {}).get(names.ANNOTATION_PREFLIGHT, "?"),
        uid=uid,
        failure=str(failed.get("message", "")),
        waiting=next(filter(None, (_waiting(pod) for pod in pods)), ""),
        exit_code=None if best is None else best.get("exitCode"),
        message="" if best is None else str(best.get("message", "")),
    )


def _state(pod: Manifest) -> Mapping[str, Any]:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return next((each.get("state") or {} for each in statuses if each["name"] == names.PREFLIGHT_CONTAINER), {})


def _terminated(pod: Manifest) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = _state(pod).get("terminated")
    return found


def _waiting(pod: Manifest) -> str:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"no node takes pod {pod['metadata']['name']}: {condition.get('message', '')}"
    waiting = _state(pod).get("waiting") or {}
    if waiting.get("reason", "") in {"", "ContainerCreating", "PodInitializing"}:
        return ""
    return f"pod {pod['metadata']['name']} waits: {waiting['reason']}: {waiting.get('message', '')}"
