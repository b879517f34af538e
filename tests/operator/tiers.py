# SPDX-License-Identifier: Apache-2.0
"""KVCacheTier bodies, and what the kubelet and the controllers would say about their children."""

from __future__ import annotations

import copy
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.names import Manifest, ObjectKey, TierName
from kvtier_operator.parts import engine, render
from kvtier_operator.plan import TierPlan, make_unchecked_plan

NAMESPACE = "serving"
TIER = TierName(namespace=NAMESPACE, name="llama")
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

CLAIM = ObjectKey(api_version="v1", kind="PersistentVolumeClaim", name="llama-blocks")
CONFIG = ObjectKey(api_version="v1", kind="ConfigMap", name="llama-connector")
DEPLOYMENT = ObjectKey(api_version="apps/v1", kind="Deployment", name="llama-engine")
JANITOR_CONFIG = ObjectKey(api_version="v1", kind="ConfigMap", name="llama-janitor")
JANITOR = ObjectKey(api_version="apps/v1", kind="Deployment", name="llama-janitor")
LEASE = ObjectKey(api_version=names.COORDINATION, kind="Lease", name="llama-janitor")
JANITOR_SERVICE = ObjectKey(api_version="v1", kind="Service", name="llama-janitor")
SERVICE = ObjectKey(api_version="v1", kind="Service", name="llama-engine")
TIER_KEY = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name="llama")


def tier(**spec: Any) -> dict[str, Any]:
    """Return a small tier whose spec is changed by the given top-level fields."""
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "llama", "namespace": NAMESPACE},
        "spec": {
            "model": {"name": "meta-llama/Llama-3.1-8B-Instruct"},
            "replicas": 2,
            "cpu": {"size": "64Gi"},
            "volume": {"claim": {"size": "2Ti", "storageClassName": "cephfs"}},
            # No Job runs in most tests; those of the preflight say Always.
            "proof": {"preflight": "Never"},
        },
    }
    return merge(body, {"spec": spec})


def merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the target with a JSON merge patch applied; neither is changed."""
    result = copy.deepcopy(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def plan_of(body: dict[str, Any]) -> TierPlan:
    return make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:test")


def rendered(body: dict[str, Any]) -> dict[tuple[str, str], Manifest]:
    """Return the objects of a tier by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in render(plan_of(body))}


def engine_pod(plan: TierPlan) -> dict[str, Any]:
    return dict(engine.deployment(plan)["spec"]["template"]["spec"])


def claim(name: str = "mine", *modes: str, phase: str = "Bound", **metadata: Any) -> dict[str, Any]:
    """Return a claim of the user's own."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE, **metadata},
        "spec": {"accessModes": list(modes), "resources": {"requests": {"storage": "1Ti"}}},
        "status": {"phase": phase},
    }


def ready_deployment(replicas: int = 2, generation: int = 1) -> dict[str, Any]:
    """Return the status of a Deployment that has finished its rollout."""
    return {
        "observedGeneration": generation,
        "replicas": replicas,
        "updatedReplicas": replicas,
        "readyReplicas": replicas,
    }


def pod(name: str, template: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return a pod that was made from the template of a tier's Deployment by the controllers of a cluster."""
    labels, text = template["metadata"]["labels"], json.dumps(template, sort_keys=True)
    template_hash = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    deployment = f"{labels[names.LABEL_TIER]}-{labels[names.LABEL_COMPONENT]}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {**labels, "pod-template-hash": template_hash},
            "annotations": dict(template["metadata"]["annotations"]),
            "ownerReferences": [made_by(f"{deployment}-{template_hash}")],
        },
        "spec": copy.deepcopy(template["spec"]),
        "status": status or RUNNING,
    }


def made_by(replica_set: str) -> dict[str, Any]:
    """Return the reference of a pod to the ReplicaSet that made it."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": replica_set,
        "uid": f"uid-of-{replica_set}",
        "controller": True,
    }


RUNNING: dict[str, Any] = {
    "phase": "Running",
    "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "True"}],
    "containerStatuses": [{"name": "engine", "image": "vllm", "restartCount": 0, "state": {"running": {}}}],
}


def waiting(reason: str, message: str = "", *, container: str = "engine", **last: Any) -> dict[str, Any]:
    """Return the status of a pod whose container waits, with the termination before it."""
    status = {
        "name": container,
        "image": "example.com/vllm:1",
        "restartCount": 4 if last else 0,
        "state": {"waiting": {"reason": reason, "message": message}},
        **({"lastState": {"terminated": last}} if last else {}),
    }
    return {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses" if container in {"engine", "janitor"} else "initContainerStatuses": [status],
    }
