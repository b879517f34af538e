# SPDX-License-Identifier: Apache-2.0
"""What the pods of a tier have in common: who they run as, and what they may not do. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import quantity
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan
from kvtier_operator.spec.engine import NO_ACCELERATOR
from kvtier_operator.spec.pods import PodTemplate

USER_ID: Final = 10001
"""Any non-root number will do; the volume's files belong to the group of the same number."""


def security_context(template: PodTemplate) -> Manifest:
    """Return the security context of every pod that mounts the volume: all are of one user and group."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        # Changing the owner of millions of block files at each start would take longer than the start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **(template.security_context or {}),
    }


def hardened() -> Manifest:
    """Return the security context of every container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def engine_resources(plan: TierPlan) -> Manifest:
    """Return the resources of the engine's container."""
    engine = plan.spec.engine
    memory = quantity.format_bytes(plan.sizing.memory_bytes)
    devices = (
        {}
        if engine.accelerator.resource == NO_ACCELERATOR
        else {engine.accelerator.resource: str(engine.accelerator.per_pod)}
    )
    storage = quantity.format_bytes(engine.ephemeral_bytes or plan.sizing.ephemeral_bytes)
    limit = {} if engine.ephemeral_bytes is None else {"ephemeral-storage": storage}
    return {
        "requests": {"cpu": engine.cpu, "memory": memory, "ephemeral-storage": storage, **devices},
        # Request equals limit: pinned pages cannot be reclaimed, so a node must never promise them twice.
        "limits": {"memory": memory, **limit, **devices},
    }


def tolerations(plan: TierPlan) -> list[Manifest]:
    """Return the taints that a pod must put up with to run wherever an engine does, though it has no device."""
    resource = plan.spec.engine.accelerator.resource
    # Kubernetes adds this one to pods that ask for the device, so the template need not have it.
    of_devices = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    given = list(plan.spec.engine.pod_template.tolerations)
    return given if resource == NO_ACCELERATOR or of_devices in given else [*given, of_devices]
