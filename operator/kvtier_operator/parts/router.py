# SPDX-License-Identifier: Apache-2.0
"""vLLM's router before the engines: pods that may list the pods of their namespace, and nothing else. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import __version__, names
from kvtier_operator.api.routing_spec import Router
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pod_settings
from kvtier_operator.plan import TierPlan

ROUTER_IMAGE: Final = f"ghcr.io/kvtier/router:{__version__}"
"""Where nobody names another one."""

METRICS_PORT: Final = 29000
REQUEST_SECONDS: Final = 1800
"""How long the router waits for the whole of an answer."""

_DRAIN_SECONDS: Final = 10
_COMPONENT: Final = names.COMPONENT_ROUTER


def router(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the objects of the router in apply order; none where the tier has none."""
    settings = plan.spec.routing.router_settings
    if settings is None:
        return ()
    return (
        _service_account(plan),
        _role(plan),
        _role_binding(plan),
        _service(plan, settings),
        _disruption_budget(plan),
        _deployment(plan, settings),
    )


def _metadata(plan: TierPlan) -> Manifest:
    return names.metadata(plan.tier, names.router(plan.tier), component=_COMPONENT)


def _service_account(plan: TierPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(plan),
        "automountServiceAccountToken": False,
    }


def _role(plan: TierPlan) -> Manifest:
    return {
        "apiVersion": names.RBAC,
        "kind": "Role",
        "metadata": _metadata(plan),
        # It watches all pods of the namespace and picks those of the tier itself; no rule can name labels.
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}],
    }


def _role_binding(plan: TierPlan) -> Manifest:
    name = names.router(plan.tier)
    return {
        "apiVersion": names.RBAC,
        "kind": "RoleBinding",
        "metadata": _metadata(plan),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": plan.tier.namespace}],
    }


def _service(plan: TierPlan, settings: Router) -> Manifest:
    metadata, annotations = _metadata(plan), dict(settings.service.annotations)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, **({"annotations": annotations} if annotations else {})},
        "spec": {
            "type": settings.service.type,
            "selector": names.selector(plan.tier, _COMPONENT),
            "ports": [{"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


def _disruption_budget(plan: TierPlan) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(plan),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector(plan.tier, _COMPONENT)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _deployment(plan: TierPlan, settings: Router) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(plan),
        "spec": {
            "replicas": settings.replicas,
            "selector": {"matchLabels": names.selector(plan.tier, _COMPONENT)},
            # The new one knows the engines before the old one goes: it needs no device, so there is room for both.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": {"labels": names.labels(plan.tier, _COMPONENT)},
                "spec": _pod(plan, settings),
            },
        },
    }


def _pod(plan: TierPlan, settings: Router) -> Manifest:
    template = plan.spec.engine.pod_template
    pull_secrets = list(template.image_pull_secrets)
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": names.selector(plan.tier, _COMPONENT)},
    }
    return {
        "serviceAccountName": names.router(plan.tier),
        # To find the engines, see the Role.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # Answers that are being written may be as long as those of the engines.
        "terminationGracePeriodSeconds": _DRAIN_SECONDS + 60,
        "securityContext": pod_settings.security_context(template, mounts_volume=False),
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]
            }
        },
        **({"tolerations": list(template.tolerations)} if template.tolerations else {}),
        **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
        "containers": [_container(plan, settings)],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "64Mi"}}],
    }


def _container(plan: TierPlan, settings: Router) -> Manifest:
    resources = settings.resources
    return {
        "name": names.ROUTER_CONTAINER,
        "image": settings.image or ROUTER_IMAGE,
        "command": ["python3", "-m", "vllm_router.launch_router"],
        "args": _args(plan, settings),
        "env": [{"name": "HOME", "value": names.SCRATCH_MOUNT}],
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": "64Mi"},
            "limits": {"memory": resources.memory},
        },
        # Until it knows an engine, /readiness says no, and the Service sends it nothing.
        "readinessProbe": {**_probe("/readiness"), "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**_probe("/liveness"), "periodSeconds": 10, "failureThreshold": 6},
        # The Service forgets its address before it stops to accept.
        "lifecycle": {
            "preStop": {"exec": {"command": ["python3", "-c", f"import time; time.sleep({_DRAIN_SECONDS})"]}}
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod_settings.hardened(),
        "volumeMounts": [{"name": "scratch", "mountPath": names.SCRATCH_MOUNT}],
    }


def _probe(path: str) -> Manifest:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}


def _args(plan: TierPlan, settings: Router) -> list[str]:
    selector = [f"{key}={value}" for key, value in sorted(names.selector(plan.tier).items())]
    return [
        f"--host={plan.listen_host}",
        f"--port={names.HTTP_PORT}",
        f"--policy={settings.policy}",
        "--service-discovery",
        "--selector",
        *selector,
        f"--service-discovery-namespace={plan.tier.namespace}",
        f"--service-discovery-port={names.HTTP_PORT}",
        f"--prometheus-host={plan.listen_host}",
        f"--prometheus-port={METRICS_PORT}",
        f"--request-timeout-secs={REQUEST_SECONDS}",
        # An engine whose process died leaves no news in the API server for a while: it is asked, and requests that
        # could not be delivered go to another one.
        "--health-check-interval-secs=5",
        "--health-failure-threshold=2",
        "--health-success-threshold=1",
        "--cb-failure-threshold=3",
        "--cb-timeout-duration-secs=10",
        # Each request is a line of its log otherwise, with the name of its session.
        "--log-level=warning",
        *settings.args,
    ]
