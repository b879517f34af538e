# SPDX-License-Identifier: Apache-2.0
"""Reads how far the Jobs of a tier are: the one that tries its claim, and the one that sends prompts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kvtier_operator import names
from kvtier_operator.errors import ClusterForbidden
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.mounts import is_held_up, mount_problem
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.snapshot import SeenJob


def read_preflight(cluster: Cluster, tier: TierRef) -> SeenJob:
    """Read how far the Job is that tries a claim."""
    return _read_job(cluster, tier, names.preflight_key(tier), names.COMPONENT_PREFLIGHT, names.ANNOTATION_PREFLIGHT)


def read_warming(cluster: Cluster, tier: TierRef, now: datetime) -> SeenJob:
    """Read how far the Job is that sends prompts, and what keeps the volume with them from its pod."""
    return _read_job(cluster, tier, names.warm_key(tier), names.COMPONENT_WARM, names.ANNOTATION_WARM, now=now)


def _read_job(  # noqa: PLR0913  each by its name
    cluster: Cluster,
    tier: TierRef,
    job: ObjectKey,
    component: str,
    annotation: str,
    *,
    now: datetime | None = None,
) -> SeenJob:
    """Read a Job whose one container is called like its component."""
    found = cluster.get(job, tier.namespace)
    if found is None:
        return SeenJob()
    uid = found["metadata"]["uid"]
    if not names.is_controlled(found, tier):
        return SeenJob(uid=uid, is_foreign=True)
    selector = f"{names.LABEL_COMPONENT}={component},{names.LABEL_TIER}={tier.name}"
    try:
        listed = cluster.list("v1", "Pod", namespace=tier.namespace, selector=selector)
    except ClusterForbidden:
        listed = []  # how it ended, the Job itself tells, though not with which words
    pods = [
        pod for pod in listed if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences", ()))
    ]
    ended = [each for each in (_terminated(pod, component) for pod in pods) if each is not None]
    # One that went through counts, whatever failed before it.
    best = min(ended, key=lambda each: int(each.get("exitCode", 1) != 0), default=None)
    conditions = found.get("status", {}).get("conditions", ())
    told = {each["type"]: each for each in conditions if each["status"] == "True"}
    annotations = found["metadata"].get("annotations") or {}
    attempt = str(annotations.get(names.ANNOTATION_WARM_TRY, "1"))
    held_up = [] if now is None else [pod for pod in pods if is_held_up(pod)]
    waits = [*(_waiting(pod, component) for pod in pods), *(_unmounted(cluster, pod, now) for pod in held_up)]
    return SeenJob(
        key=annotations.get(annotation, "?"),
        attempt=int(attempt) if attempt.isdecimal() else 1,
        is_held_up=bool(held_up),
        uid=uid,
        failure=str(told.get("Failed", {}).get("message", "")),
        waiting=next(filter(None, waits), ""),
        exit_code=(0 if "Complete" in told else None) if best is None else best.get("exitCode"),
        message="" if best is None else str(best.get("message", "")),
    )


def _unmounted(cluster: Cluster, pod: Manifest, now: datetime | None) -> str:
    problem = "" if now is None else mount_problem(cluster, pod, now)
    return problem and f"pod {pod['metadata']['name']} waits: {problem}"


def _tried(pod: Manifest, container: str) -> Mapping[str, Any]:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return next((each.get("state") or {} for each in statuses if each["name"] == container), {})


def _terminated(pod: Manifest, container: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = _tried(pod, container).get("terminated")
    return found


def _waiting(pod: Manifest, container: str) -> str:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"no node takes pod {pod['metadata']['name']}: {condition.get('message', '')}"
    waiting = _tried(pod, container).get("waiting") or {}
    if waiting.get("reason", "") in {"", "ContainerCreating", "PodInitializing"}:
        return ""
    return f"pod {pod['metadata']['name']} waits: {waiting['reason']}: {waiting.get('message', '')}"
