# SPDX-License-Identifier: Apache-2.0
"""What stands around the engine pods: Service, account, how many a drain may take; and whether one serves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.routing_spec import CLIENT_IP, ClientIp, Routing
from kvtier_operator.conditions import ConditionRule, Problem, View, as_before, met, not_checked
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Pod


def service(plan: TierPlan) -> Manifest:
    """Return the Service in front of the ready engine pods."""
    settings = plan.spec.engine.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            **names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE),
            **({"annotations": dict(settings.annotations)} if settings.annotations else {}),
        },
        "spec": {
            "type": settings.type,
            "selector": names.selector(plan.tier),
            "ports": [{"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
            **_affinity(plan.spec.routing),
        },
    }


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
    """Return the budget: one engine at a time by default; one that does not serve never holds up a drain."""
    budget = plan.spec.engine.disruption_budget
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE),
        "spec": {
            **(budget.to_manifest() or {"maxUnavailable": 1}),
            "selector": {"matchLabels": names.selector(plan.tier)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _judge(view: View, previous: Mapping[str, Any]) -> Problem:
    """At least one engine serves, be it of this spec or of an earlier one."""
    if view.snapshot is None or view.spec is None:
        return as_before(_AVAILABLE, previous) or not_checked()
    ready, wanted = view.snapshot.engines.ready, view.spec.replicas
    if ready:
        return met(
            Reason.SERVING, f"{ready} of {wanted} engines serve" if ready <= wanted else f"{ready} engines serve"
        )
    if wanted == 0:
        return Problem(reason=Reason.SCALED_TO_ZERO, message="spec.replicas is 0: no engine serves")
    return Problem(
        reason=Reason.UNAVAILABLE, message=f"none of {wanted} engines serves: see Ready for what holds them up"
    )


def is_growing(view: View, previous: Mapping[str, Any]) -> bool:
    """Tell whether a tier that was ready only waits for engines that never served: it was scaled up, or lost a node."""
    before = as_before("Ready", previous)
    if view.spec is None or view.snapshot is None or before is None or not before.is_met:
        return False
    engines, pods = view.snapshot.engines, [pod for pod in view.snapshot.pods if not pod.is_terminating]
    is_observed = view.keeps_pods or engines.observed_generation >= engines.generation
    is_current = is_observed and engines.updated == engines.replicas
    is_smaller = 0 < engines.ready < view.spec.replicas and engines.replicas <= view.spec.replicas
    return is_current and is_smaller and all(pod.is_ready or _never_served(pod) for pod in pods)


def _never_served(pod: Pod) -> bool:
    return not any(
        container.is_started or container.restarts
        for container in pod.containers
        if container.name == names.ENGINE_CONTAINER
    )


_AVAILABLE: Final = "Available"
AVAILABLE: Final = ConditionRule(_AVAILABLE, _judge, counts=False)
