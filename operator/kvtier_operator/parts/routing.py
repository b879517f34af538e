# SPDX-License-Identifier: Apache-2.0
"""vLLM's router before the engines: pods that may list the pods of their namespace, and nothing else. Pure.

Whether requests come to the engines as ``spec.routing`` says; and the InferencePool, if one is asked for. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import __version__, names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.routing_spec import CLIENT_IP, Router, Routing
from kvtier_operator.conditions import ConditionRule, Problem, View, as_before, met, not_checked, quoted, unknown
from kvtier_operator.errors import ClusterError
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.parts import pods
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Pod, Snapshot

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
        "securityContext": pods.security_context(template, mounts_volume=False),
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
        "securityContext": pods.hardened(),
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


def pool(spec: TierSpec, tier: TierRef) -> Manifest | None:
    """Return the InferencePool of the engines; None where none is asked for."""
    wanted = spec.routing.inference_pool
    if wanted is None:
        return None
    picker = wanted.endpoint_picker
    return {
        "apiVersion": names.INFERENCE_POOL,
        "kind": names.POOL_KIND,
        "metadata": names.metadata(tier, names.engine(tier), component=names.COMPONENT_ENGINE),
        "spec": {
            "targetPorts": [{"number": names.HTTP_PORT}],
            "selector": {"matchLabels": names.selector(tier)},
            "endpointPickerRef": {
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": picker.failure_mode,
            },
        },
    }


def pool_failed(error: ClusterError, status: Mapping[str, Any]) -> Problem:
    """Return why the InferencePool is not as it is asked for, in the words of the first of several failures in a row.

    Each change of the status wakes the tier at once, and an error that says something else each time would never be
    waited out.
    """
    found = Problem(
        reason=Reason.POOL_FAILED,
        message=f"{error}; it is tried again soon, less often each time; nothing else waits for it",
    )
    told = as_before(_ROUTED, status)
    passes_soon = error.retry_after is not None and error.retry_after <= _SOON_SECONDS
    return told if told is not None and told.reason is found.reason and passes_soon else found


def document(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return where requests are to be sent; what was told before where nothing is known."""
    if view.spec is None or view.snapshot is None:
        return dict(previous.get("routing") or {})
    tier, spec = view.tier, view.spec
    service = names.engine(tier) if spec.routing.router_settings is None else names.router(tier)
    found = {"service": f"{service}.{tier.namespace}.svc:{names.HTTP_PORT}"}
    had_pool = bool((previous.get("routing") or {}).get("inferencePool"))
    has_pool = had_pool if view.has_pool is None else view.has_pool
    return {**found, **({"inferencePool": names.engine(tier)} if has_pool else {})}


def _judge(view: View, previous: Mapping[str, Any]) -> Problem:
    """Requests find their way, and each part of it that was asked for stands."""
    if view.spec is None or view.snapshot is None:
        return as_before(_ROUTED, previous) or not_checked()
    found = _router(view.spec, view.snapshot)
    if view.pool is not None and (found is None or found.is_met or not found.is_known):
        return view.pool
    return found or _by_service(view.tier, view.spec.routing)


def _by_service(tier: TierRef, routing: Routing) -> Problem:
    name = f"Service/{names.engine(tier)}"
    if routing.type == CLIENT_IP:
        return met(Reason.ROUTED_BY_CLIENT, f"{name} keeps each client's address with one engine")
    return met(Reason.ROUTED_BY_SERVICE, f"{name} spreads connections over the engines")


def _router(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return how the router fares; None where there is none."""
    settings, tier = spec.routing.router_settings, snapshot.tier
    if settings is None:
        return None
    for pod in snapshot.routers:
        problem = None if pod.is_ready or pod.is_terminating else _of_pod(pod, settings.image or ROUTER_IMAGE)
        if problem is not None:
            return problem
    live = snapshot.live.get(names.router_key(tier))
    conditions = () if live is None else live.content.get("status", {}).get("conditions", ())
    failure: Mapping[str, Any] = next((each for each in conditions if each["type"] == "ReplicaFailure"), {})
    if failure.get("status") == "True":
        return Problem(
            reason=Reason.ROUTER_REFUSED,
            message=f"pods of the router cannot be created{quoted(failure.get('message', ''))}; raise the quota, or "
            "change what was refused",
        )
    ready = sum(pod.is_ready and not pod.is_terminating for pod in snapshot.routers)
    if ready:
        of = f"{ready} of {settings.replicas}" if ready <= settings.replicas else f"{ready}"
        return met(Reason.ROUTER_READY, f"{of} routers serve behind Service/{names.router(tier)}")
    if spec.replicas == 0:
        return unknown(Reason.SCALED_TO_ZERO, "spec.replicas is 0: there is no engine to route to")
    if not snapshot.engines.ready:
        return unknown(Reason.NO_ROUTE, "the router has no engine to send requests to: see EnginesReady")
    return Problem(
        reason=Reason.ROUTER_STARTING,
        message=f"no pod of the router is ready yet: `kubectl logs deployment/{names.router(tier)}` says what it does; "
        "it must be able to list the pods of its namespace, and to reach port 8000 of the engines",
    )


_PULL: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_BROKEN: Final = frozenset(
    {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_QUOTED: Final = 300


def _of_pod(pod: Pod, image: str) -> Problem | None:
    for container in pod.containers:
        said = container.waiting_message
        if container.waiting_reason in _PULL:
            return Problem(
                reason=Reason.ROUTER_IMAGE_PULL_FAILED,
                message=f"pod {pod.name} of the router cannot pull {image} ({container.waiting_reason}{quoted(said)}): "
                "correct spec.routing.router.image, or give a pull secret in spec.engine.podTemplate.imagePullSecrets",
            )
        if container.waiting_reason in _BROKEN:
            why = said or container.waiting_reason
            if container.exit_code is not None:
                last = container.exit_message[-_QUOTED:].strip()
                why = f"it ended with exit code {container.exit_code}{quoted(last)}"
            return Problem(
                reason=Reason.ROUTER_FAILING,
                message=f"the router in pod {pod.name} does not stay up: {why}; `kubectl logs {pod.name} --previous` "
                "says more; correct spec.routing.router.args, or name an image with vllm-router in "
                "spec.routing.router.image",
            )
    if pod.is_scheduled is False:
        return Problem(
            reason=Reason.ROUTER_NOT_SCHEDULED,
            message=f"no node takes pod {pod.name} of the router{quoted(pod.scheduling_message)}: make room on a node, "
            "or lower spec.routing.router.resources",
        )
    return None


_SOON_SECONDS: Final = 5.0
_ROUTED: Final = "RoutingReady"
ROUTED: Final = ConditionRule(_ROUTED, _judge)
