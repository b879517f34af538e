# SPDX-License-Identifier: Apache-2.0
"""A Redis of one pod for trying LMCache out: in memory only, and emptied when a cache generation starts. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import names, quantity
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.parts.backends.outside import single_pod
from kvtier_operator.plan import TierPlan

ANNOTATION_GENERATION: Final = f"{names.GROUP}/generation"
"""Of the pod: LMCache's keys name neither revision nor weights, so another generation must find it empty."""

_FIRST_PORT: Final = 10_000
_PORTS: Final = 50_000


def port(plan: TierPlan) -> int:
    """Return where the Redis of this generation listens.

    Engines of the generation before run on while the new ones start. They must not find the new Redis, or they would
    write into it what the new ones then take for theirs.
    """
    return _FIRST_PORT + int(plan.generation.digest[:8], 16) % _PORTS


def redis(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the Service and the Deployment; nothing where the user has one, or LMCache needs none."""
    lmcache = plan.spec.connector.used_lmcache()
    trial = None if lmcache is None or lmcache.redis is None else lmcache.redis.trial
    if trial is None:
        return ()
    name, component = names.redis(plan.tier), names.COMPONENT_STORE
    listens = port(plan)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(plan.tier, name, component=component),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(plan.tier, component),
            # By number: the pod of the generation before has a port of the same name.
            "ports": [{"name": "redis", "port": listens, "targetPort": listens, "protocol": "TCP"}],
        },
    }
    memory = quantity.format_bytes(trial.memory_bytes + trial.memory_bytes // 4)
    container = {
        "name": "redis",
        "image": trial.image,
        "command": [trial.command],
        "args": [
            *("--port", str(listens)),
            *("--dir", names.SCRATCH_MOUNT),
            # Nothing on disk: it is a cache, and one that may be lost.
            *("--save", "", "--appendonly", "no"),
            *("--maxmemory", str(trial.memory_bytes), "--maxmemory-policy", "allkeys-lru"),
            # Reached by the Service alone; without a password it would otherwise answer this machine only.
            *("--protected-mode", "no"),
        ],
        "ports": [{"name": "redis", "containerPort": listens, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": memory}, "limits": {"memory": memory}},
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5},
        "securityContext": pods.hardened(),
        "volumeMounts": [{"name": "scratch", "mountPath": names.SCRATCH_MOUNT}],
    }
    return (
        service,
        single_pod(plan, name, component, container, **{ANNOTATION_GENERATION: plan.generation.digest}),
    )
