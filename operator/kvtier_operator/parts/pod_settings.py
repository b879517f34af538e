# SPDX-License-Identifier: Apache-2.0
"""What the pods of a tier have in common: who they run as, and what they may not do. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.api.engine_spec import CLAIMED
from kvtier_operator.api.pod_template import PodTemplate
from kvtier_operator.names import Manifest
from kvtier_operator.parts.overlay import lay_over
from kvtier_operator.plan import TierPlan

USER_ID: Final = 10001
"""Any non-root number will do; the volume's files belong to the group of the same number."""


def security_context(template: PodTemplate, *, mounts_volume: bool = True) -> Manifest:
    """Return the security context of every pod of a tier: all are of one user, and of one group on the volume."""
    # Changing the owner of millions of block files at each start would take longer than the start.
    on_volume = {"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"} if mounts_volume else {}
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        **on_volume,
        "seccompProfile": {"type": "RuntimeDefault"},
        **(template.security_context or {}),
    }


def hardened(added: Mapping[str, Any] | None = None) -> Manifest:
    """Return the security context of every container of ours, before what a user adds is laid over it."""
    return {**unprivileged(added or {}), "readOnlyRootFilesystem": True}


def of_user(container: Manifest) -> Manifest:
    """Return a container of the user's with what it does not say itself: as few rights as the engine."""
    own = {
        "name": container["name"],
        "image": container["image"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": unprivileged(container),
    }
    return lay_over(own, container)


def unprivileged(container: Mapping[str, Any]) -> Manifest:
    """Return what a container may not do, unless it is to do everything: Kubernetes takes no such contradiction."""
    if (container.get("securityContext") or {}).get("privileged"):
        return {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def service_account(plan: TierPlan) -> str:
    """Return the account of the pods that mount the volume for engines."""
    return plan.spec.engine.pod_template.service_account_name or names.engine(plan.tier)


def engine_resources(plan: TierPlan) -> Manifest:
    """Return the resources of the engine's container."""
    engine = plan.spec.engine
    memory = quantity.format_bytes(plan.sizing.memory_bytes)
    devices = {resource: str(count) for resource, count in engine.accelerator.of_plugin.items()}
    storage = quantity.format_bytes(engine.ephemeral_bytes or plan.sizing.ephemeral_bytes)
    limit = {} if engine.ephemeral_bytes is None else {"ephemeral-storage": storage}
    claims = engine.pod_template.resource_claims if engine.accelerator.resource == CLAIMED else ()
    return {
        **({"claims": [{"name": claim["name"]} for claim in claims]} if claims else {}),
        "requests": {"cpu": engine.cpu, "memory": memory, "ephemeral-storage": storage, **devices},
        # Request equals limit: pinned pages cannot be reclaimed, so a node must never promise them twice.
        "limits": {"memory": memory, **limit, **devices},
    }


def tolerations(plan: TierPlan) -> list[Manifest]:
    """Return the taints that a pod must put up with to run wherever an engine does, though it has no device."""
    given = list(plan.spec.engine.pod_template.tolerations)
    for resource in plan.spec.engine.accelerator.of_plugin:
        # Kubernetes adds this one to pods that ask for the device, so the template need not have it.
        of_devices = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
        given += [] if of_devices in given else [of_devices]
    return given
