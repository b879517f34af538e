# SPDX-License-Identifier: Apache-2.0
"""Reads how far the Job is that tries the claim of a tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier_operator import names
from kvtier_operator.errors import ClusterForbidden
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.snapshot import SeenJob


def read_preflight(cluster: Cluster, tier: TierRef) -> SeenJob:
    """Read how far the Job is that tries a claim."""
    return _read_job(cluster, tier, names.preflight_key(tier), names.COMPONENT_PREFLIGHT, names.ANNOTATION_PREFLIGHT)


def _read_job(cluster: Cluster, tier: TierRef, job: ObjectKey, component: str, annotation: str) -> SeenJob:
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
    return SeenJob(
        key=annotations.get(annotation, "?"),
        uid=uid,
        failure=str(told.get("Failed", {}).get("message", "")),
        waiting=next(filter(None, (_waiting(pod, component) for pod in pods)), ""),
        exit_code=(0 if "Complete" in told else None) if best is None else best.get("exitCode"),
        message="" if best is None else str(best.get("message", "")),
    )


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
