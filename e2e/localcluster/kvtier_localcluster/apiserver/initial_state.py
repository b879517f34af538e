# SPDX-License-Identifier: Apache-2.0
"""What a new object starts with besides its spec: its status, and whether it counts generations. Pure."""

from __future__ import annotations

import copy
from typing import Final

from kvtier_localcluster.apiserver.objects import Json
from kvtier_localcluster.apiserver.resources import Resource, crd_status

CLAIM_FINALIZER: Final = "kubernetes.io/pvc-protection"
"""Keeps a claim that is deleted until no pod uses it."""

# Clients with typed models refuse a status that lacks its required counters, so those start at 0 as in a real server.
_STATUS: Final[dict[str, Json]] = {
    "PersistentVolumeClaim": {"phase": "Pending"},
    "PersistentVolume": {"phase": "Pending"},
    "Namespace": {"phase": "Active"},
    "Service": {"loadBalancer": {}},
    "ReplicaSet": {"replicas": 0},
    "StatefulSet": {"replicas": 0, "availableReplicas": 0},
    "DaemonSet": {
        "currentNumberScheduled": 0,
        "desiredNumberScheduled": 0,
        "numberMisscheduled": 0,
        "numberReady": 0,
    },
    "PodDisruptionBudget": {"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0},
    "HorizontalPodAutoscaler": {"currentMetrics": [], "desiredReplicas": 0},
}
_WITH_GENERATION: Final = (
    "apps",
    "batch",
    "policy",
    "autoscaling",
    "networking.k8s.io",
    "apiextensions.k8s.io",
    "admissionregistration.k8s.io",
)


def counts_generations(resource: Resource) -> bool:
    """Tell whether writes to the spec of this kind move metadata.generation."""
    return resource.is_custom or resource.group in _WITH_GENERATION or resource.kind == "Pod"


def reset_status(resource: Resource, manifest: Json) -> None:
    """Replace, in place, the status that a client sent along with a create."""
    if resource.kind == "CustomResourceDefinition":
        manifest["status"] = crd_status(manifest, None)
    elif resource.kind == "Pod" and not resource.is_custom:
        manifest["status"] = {"phase": "Pending", "qosClass": qos_class(manifest.get("spec") or {})}
    elif resource.kind == "Node" or not resource.has_status:
        return  # a node registers with its status
    elif resource.is_custom:
        manifest.pop("status", None)
    else:
        manifest["status"] = copy.deepcopy(_STATUS.get(resource.kind, {}))


def qos_class(spec: Json) -> str:
    """Return the quality-of-service class of a pod."""
    resources = [c.get("resources") or {} for c in (spec.get("containers") or []) + (spec.get("initContainers") or [])]
    if not any(r.get("requests") or r.get("limits") for r in resources):
        return "BestEffort"
    for each in resources:
        limits, requests = each.get("limits") or {}, each.get("requests") or {}
        if any(name not in limits or requests.get(name, limits[name]) != limits[name] for name in ("cpu", "memory")):
            return "Burstable"
    return "Guaranteed"
