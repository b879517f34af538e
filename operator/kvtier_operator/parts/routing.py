# SPDX-License-Identifier: Apache-2.0
"""How requests reach the engine pods: Service, router and InferencePool, and the conditions about them. Pure.

The account of the engine pods and their PodDisruptionBudget are here, too. The router's pods may list the pods of their
namespace, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import __version__, names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.engine_spec import ServiceSettings
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.api.routing_spec import CLIENT_IP, ClientIp, Router, Routing
from kvtier_operator.conditions import (
    AppliedStage,
    ConditionRule,
    PlannedStage,
    Problem,
    ReadStage,
    Status,
    as_before,
    met,
    unknown,
)
from kvtier_operator.errors import ClusterError, KindMissing
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.parts import pods
from kvtier_operator.parts.part import Component, component_problem
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Pod, Snapshot


def service(plan: TierPlan) -> Manifest:
    """Return the Service in front of the ready engine pods."""
    made = _service(plan.tier, names.engine(plan.tier), names.COMPONENT_ENGINE, plan.spec.engine.service)
    return {**made, "spec": {**made["spec"], **_affinity(plan.spec.routing)}}


def _service(tier: TierRef, name: str, component: str, settings: ServiceSettings) -> Manifest:
    ports = [pods.port("http", names.HTTP_PORT, "http")]
    return pods.service(tier, name, component, ports, kind=settings.type, annotations=settings.annotations)


def _affinity(routing: Routing) -> Manifest:
    if routing.type != CLIENT_IP:
        return {"sessionAffinity": "None"}
    seconds = (routing.client_ip or ClientIp()).timeout_seconds
    return {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}


def service_account(plan: TierPlan) -> Manifest | None:
    """Return an account of the pods' own, without a token: what runs models needs no cluster credentials.

    None where the user brings one.
    """
    if plan.spec.engine.pod_template.service_account_name is not None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE),
        "automountServiceAccountToken": False,
    }


def disruption_budget(plan: TierPlan) -> Manifest:
    """Return the budget: one engine at a time by default."""
    limits = plan.spec.engine.disruption_budget.to_manifest() or _ONE_AT_A_TIME
    return pods.disruption_budget(plan.tier, names.engine(plan.tier), names.COMPONENT_ENGINE, limits)


_ONE_AT_A_TIME: Final = {"maxUnavailable": 1}


def _judge_available(stage: ReadStage, _previous: Status) -> Problem:
    """At least one engine serves, be it of this spec or of an earlier one."""
    ready = stage.snapshot.engines.ready
    wanted = stage.spec.replicas
    if ready:
        return met(
            Reason.SERVING, f"{ready} of {wanted} engines serve" if ready <= wanted else f"{ready} engines serve"
        )
    if wanted == 0:
        return Problem(Reason.SCALED_TO_ZERO, "spec.replicas is 0: no engine serves")
    return Problem(Reason.UNAVAILABLE, f"none of {wanted} engines serves: see Ready for what holds them up")


def is_growing(stage: ReadStage | None, previous: Status) -> bool:
    """Tell whether a tier that was ready only waits for engines that never served: it was scaled up, or lost a node."""
    before = as_before("Ready", previous)
    if stage is None or before is None or not before.is_met:
        return False
    engines, pods = stage.snapshot.engines, [pod for pod in stage.snapshot.pods if not pod.is_terminating]
    keeps_pods = isinstance(stage, PlannedStage) and stage.plan.rendered is not None
    is_observed = keeps_pods or engines.observed_generation >= engines.generation
    is_current = is_observed and engines.updated == engines.replicas
    is_smaller = 0 < engines.ready < stage.spec.replicas and engines.replicas <= stage.spec.replicas
    return is_current and is_smaller and all(pod.is_ready or _never_served(pod) for pod in pods)


def _never_served(pod: Pod) -> bool:
    return not any(
        container.is_started or container.restarts
        for container in pod.containers
        if container.name == names.ENGINE_CONTAINER
    )


AVAILABLE: Final = ConditionRule(kind="Available", needs=ReadStage, judge=_judge_available, counts=False)


ROUTER_IMAGE: Final = f"ghcr.io/kvtier/router:{__version__}"
"""Default of spec.routing.router.image."""

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
    tier, name = plan.tier, names.router(plan.tier)
    return (
        # It watches all pods of the namespace and picks those of the tier itself; no rule can name labels.
        *pods.account(tier, name, _COMPONENT, {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}),
        _service(tier, name, _COMPONENT, settings.service),
        pods.disruption_budget(tier, name, _COMPONENT, _ONE_AT_A_TIME),
        pods.deployment(
            tier,
            name,
            _COMPONENT,
            _pod(plan, settings),
            replicas=settings.replicas,
            # The new one knows the engines before the old one goes: it needs no device, so there is room for both.
            strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        ),
    )


def _pod(plan: TierPlan, settings: Router) -> Manifest:
    template = plan.spec.engine.pod_template
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
        **pods.pull_secrets(template),
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
    return [
        f"--host={plan.listen_host}",
        f"--port={names.HTTP_PORT}",
        f"--policy={settings.policy}",
        "--service-discovery",
        "--selector",
        *[f"{key}={value}" for key, value in sorted(names.selector(plan.tier).items())],
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


def asks_for_pool(body: Mapping[str, Any]) -> bool:
    """Tell whether a KVCacheTier body asks for an InferencePool, or has one; its kind is read for such a tier alone."""
    routings = [part.get("routing") for part in (body.get("spec"), body.get("status")) if isinstance(part, Mapping)]
    return any(isinstance(each, Mapping) and bool(each.get("inferencePool")) for each in routings)


def pool_problem(found: ClusterError | Refusal, status: Status) -> Problem:
    """Return why the InferencePool is not as it is asked for, in the words of the first of several failures in a row.

    Each change of the status wakes the tier at once. An error with another text each time would never be waited out.
    """
    if isinstance(found, KindMissing):
        return Problem(
            Reason.POOL_KIND_MISSING,
            f"the cluster has no {names.POOL_KIND} of {names.INFERENCE_POOL}: install the definitions of "
            "Gateway API's inference extension, or remove spec.routing.inferencePool. It is tried again soon, less "
            "often each time; everything else goes on",
        )
    if isinstance(found, Refusal):
        return Problem(Reason.POOL_FAILED, f"{found.message}; or remove spec.routing.inferencePool")
    problem = Problem(
        Reason.POOL_FAILED, f"{found}; it is tried again soon, less often each time; nothing else waits for it"
    )
    last = as_before(_ROUTED, status)
    return last if last is not None and last.reason is problem.reason and found.passes_soon else problem


def document(stage: ReadStage | None, previous: Status) -> dict[str, Any]:
    """Return the address of the tier for the status; that of the last status where nothing was read."""
    before = dict(previous.get("routing") or {})
    if stage is None:
        return before
    tier = stage.tier
    service = names.engine(tier) if stage.spec.routing.router_settings is None else names.router(tier)
    is_unknown = names.POOL_KIND in stage.snapshot.unreadable
    has_pool = "inferencePool" in before if is_unknown else names.pool_key(tier) in stage.snapshot.live
    return {
        "service": f"{service}.{tier.namespace}.svc:{names.HTTP_PORT}",
        **({"inferencePool": names.engine(tier)} if has_pool else {}),
    }


POOL: Final = "pool"
"""Name of the part."""


def _judge_routed(stage: ReadStage, _previous: Status) -> Problem:
    """Requests find their way, and each part of it that was asked for stands."""
    found = _router(stage.spec, stage.snapshot)
    pool_fails = stage.problems.get(POOL) if isinstance(stage, AppliedStage) else None
    if pool_fails is not None and (found is None or found.is_met or not found.is_known):
        return pool_fails
    return found or _by_service(stage.tier, stage.spec.routing)


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
    live = snapshot.live.get(names.deployment_key(names.router(tier)))
    problem = component_problem(_OF_MESSAGES, snapshot.routers, None if live is None else live.content)
    if problem is not None:
        return problem
    ready = sum(pod.is_ready and not pod.is_terminating for pod in snapshot.routers)
    if ready:
        of = f"{ready} of {settings.replicas}" if ready <= settings.replicas else f"{ready}"
        return met(Reason.ROUTER_READY, f"{of} routers serve behind Service/{names.router(tier)}")
    if spec.replicas == 0:
        return unknown(Reason.SCALED_TO_ZERO, "spec.replicas is 0: there is no engine to route to")
    if not snapshot.engines.ready:
        return unknown(Reason.NO_ROUTE, "the router has no engine to send requests to: see EnginesReady")
    return Problem(
        Reason.ROUTER_STARTING,
        f"no pod of the router is ready yet: `kubectl logs deployment/{names.router(tier)}` says what it does. "
        "It must be able to list the pods of its namespace, and to reach port 8000 of the engines",
    )


_OF_MESSAGES: Final = Component(
    name="router",
    image_fields="spec.routing.router.image",
    resources_field="spec.routing.router.resources",
    remedy="correct spec.routing.router.args, or name an image with vllm-router in spec.routing.router.image",
)

_ROUTED: Final = "RoutingReady"
ROUTED: Final = ConditionRule(kind=_ROUTED, needs=ReadStage, judge=_judge_routed)
