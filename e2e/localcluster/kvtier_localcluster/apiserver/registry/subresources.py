# SPDX-License-Identifier: Apache-2.0
"""The scale subresource: an object's replica numbers seen as a `Scale`. Pure.

Evictions: a pod goes only where its disruption budget has room, and takes that room at once.

The controller of budgets counts anew when it sees the pod going; until then the budget remembers the eviction, so that
two evictions at the same time never share the last place.
"""

from __future__ import annotations

from typing import Final

from kvtier_localcluster.apiserver.store.api_errors import ApiError, bad_request
from kvtier_localcluster.apiserver.store.memory import EventType, Storage
from kvtier_localcluster.apiserver.store.objects import Json, field_at, object_key, timestamp
from kvtier_localcluster.apiserver.store.resources import Resource, ScalePaths
from kvtier_localcluster.apiserver.store.selectors import labels_match

_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def scale_view(resource: Resource, manifest: Json) -> Json:
    """Return the Scale of an object."""
    paths = resource.scale or ScalePaths()
    if paths.selector:
        selector = field_at(manifest, paths.selector) or ""
    else:
        labels = field_at(manifest, "spec.selector.matchLabels") or {}
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
    metadata = manifest["metadata"]
    status: Json = {"replicas": field_at(manifest, paths.status) or 0}
    if isinstance(selector, str) and selector:
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in _METADATA if name in metadata},
        "spec": {"replicas": field_at(manifest, paths.spec) or 0},
        "status": status,
    }


def scale_patch(resource: Resource, scale: Json) -> Json:
    """Return the merge patch of an object that makes it as a Scale wants it."""
    paths = resource.scale or ScalePaths()
    replicas = field_at(scale, "spec.replicas")
    if not isinstance(replicas, int) or replicas < 0:
        raise bad_request(f"spec.replicas must be a number of 0 or more, found {replicas!r}")
    patch: Json = {}
    here = patch
    *parents, last = paths.spec.strip(".").split(".")
    for name in parents:
        here = here.setdefault(name, {})
    here[last] = replicas
    version = field_at(scale, "metadata.resourceVersion")
    if version:
        patch["metadata"] = {"resourceVersion": version}
    return patch


_BUDGETS: Final = ("policy", "poddisruptionbudgets")
_BEYOND_DISRUPTION: Final = ("Pending", "Succeeded", "Failed")


def take_place(storage: Storage, pod: Json, *, is_dry_run: bool) -> None:
    """Take one place in the budget of a pod.

    Raises:
        ApiError: the budget has none, or its controller has not counted yet (429); there is more than one budget (500).
    """
    namespace, name = object_key(pod)
    if pod["metadata"].get("deletionTimestamp") or field_at(pod, "status.phase") in _BEYOND_DISRUPTION:
        return
    labels = pod["metadata"].get("labels") or {}
    budgets = [
        budget
        for budget in storage.all(_BUDGETS)
        if object_key(budget)[0] == namespace and labels_match(field_at(budget, "spec.selector"), labels)
    ]
    if len(budgets) > 1:
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ApiError(500, "InternalError", message)
    for budget in budgets:
        status = _checked_status(budget, pod)
        if status is not None and not is_dry_run:
            left = status["disruptionsAllowed"] - 1
            disrupted = {**(status.get("disruptedPods") or {}), name: timestamp()}
            changed = {**budget, "status": {**status, "disruptionsAllowed": left, "disruptedPods": disrupted}}
            storage.commit(EventType.MODIFIED, _BUDGETS, changed)


def _checked_status(budget: Json, pod: Json) -> Json | None:
    """Return the status of a budget with a place left, or None where the pod needs no place."""
    status, name = budget.get("status") or {}, object_key(budget)[1]
    healthy, needed = status.get("currentHealthy", 0), status.get("desiredHealthy", 0)
    conditions = field_at(pod, "status.conditions") or []
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    policy = field_at(budget, "spec.unhealthyPodEvictionPolicy")
    if not is_ready and (policy == "AlwaysAllow" or healthy >= needed > 0):
        return None
    if status.get("observedGeneration", 0) < budget["metadata"].get("generation", 1):
        raise _refused(f"The disruption budget {name} is still being processed by the server.", retry_seconds=10)
    if status.get("disruptionsAllowed", 0) < 1:
        raise _refused(f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently")
    return dict(status)


def _refused(cause: str, **details: int) -> ApiError:
    message = "Cannot evict pod as it would violate the pod's disruption budget."
    known = {"retryAfterSeconds": details["retry_seconds"]} if details else {}
    return ApiError(429, "TooManyRequests", message, causes=[{"reason": "DisruptionBudget", "message": cause}], **known)
