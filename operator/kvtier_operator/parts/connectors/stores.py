# SPDX-License-Identifier: Apache-2.0
"""Servers that the operator makes for a connector: a Redis for trying LMCache, and Mooncake's master. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import names, quantity
from kvtier_operator.api.connector_spec import LMCacheRedis, MooncakeMaster
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.plan import TierPlan

ANNOTATION_GENERATION: Final = f"{names.GROUP}/generation"
"""On the pod: LMCache's keys name neither revision nor weights, so another generation must find an empty Redis."""

_FIRST_PORT: Final = 10_000
_PORTS: Final = 50_000


def servers(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the Services and Deployments of the servers that the tier needs."""
    return (*_redis(plan), *_mooncake_master(plan))


def redis_url(plan: TierPlan, redis: LMCacheRedis) -> str:
    """Return the address of the Redis: the user's, or that of the one that the operator makes."""
    if redis.url is not None:
        return redis.url
    return f"redis://{names.redis(plan.tier)}.{plan.tier.namespace}.svc:{_redis_port(plan)}"


def mooncake_address(plan: TierPlan, master: MooncakeMaster) -> str:
    """Return the address of Mooncake's master."""
    return f"{names.mooncake_master(plan.tier)}.{plan.tier.namespace}.svc:{master.port}"


def _redis_port(plan: TierPlan) -> int:
    """Return the port of the Redis of this generation.

    Engines of the generation before run on while the new ones start. They must not find the new Redis: the new engines
    would take what they write there for theirs.
    """
    return _FIRST_PORT + int(plan.generation.digest[:8], 16) % _PORTS


def _redis(plan: TierPlan) -> tuple[Manifest, ...]:
    lmcache = plan.spec.connector.used_lmcache
    trial = None if lmcache is None or lmcache.redis is None else lmcache.redis.trial
    if trial is None:
        return ()
    port = _redis_port(plan)
    memory = quantity.format_bytes(trial.memory_bytes + trial.memory_bytes // 4)
    container = {
        "name": "redis",
        "image": trial.image,
        "command": [trial.command],
        "args": [
            *("--port", str(port)),
            *("--dir", names.SCRATCH_MOUNT),
            # Nothing on disk: it is a cache, and one that may be lost.
            *("--save", "", "--appendonly", "no"),
            *("--maxmemory", str(trial.memory_bytes), "--maxmemory-policy", "allkeys-lru"),
            # Reached by the Service alone; without a password it would otherwise answer this machine only.
            *("--protected-mode", "no"),
        ],
        "ports": [{"name": "redis", "containerPort": port, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": memory}, "limits": {"memory": memory}},
    }
    # By number: the pod of the generation before has a port of the same name.
    listens = {"name": "redis", "port": port, "targetPort": port, "protocol": "TCP"}
    annotations = {ANNOTATION_GENERATION: plan.generation.digest}
    return _server(plan, names.redis(plan.tier), container, listens, annotations)


def _mooncake_master(plan: TierPlan) -> tuple[Manifest, ...]:
    settings = plan.spec.connector.mooncake
    if settings is None or settings.master is None:
        return ()
    master = settings.master
    container = {
        "name": "mooncake-master",
        "image": master.image or plan.spec.engine.image,
        "command": ["mooncake_master"],
        "args": [f"--port={master.port}", *master.args],
        "ports": [{"name": "rpc", "containerPort": master.port, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    }
    listens = {"name": "rpc", "port": master.port, "targetPort": "rpc", "protocol": "TCP"}
    return _server(plan, names.mooncake_master(plan.tier), container, listens, {})


def _server(
    plan: TierPlan, name: str, container: Manifest, listens: Manifest, annotations: dict[str, str]
) -> tuple[Manifest, Manifest]:
    """Return the Service and the Deployment of one pod without a volume that outlives it."""
    template, component = plan.spec.engine.pod_template, names.COMPONENT_STORE
    pull_secrets = list(template.image_pull_secrets)
    selector = names.selector(plan.tier, component)
    probed = {
        **container,
        "readinessProbe": {"tcpSocket": {"port": listens["name"]}, "periodSeconds": 5},
        "securityContext": pods.hardened(),
        "volumeMounts": [{"name": "scratch", "mountPath": names.SCRATCH_MOUNT}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(plan.tier, name, component=component),
        "spec": {"type": "ClusterIP", "selector": selector, "ports": [listens]},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(plan.tier, name, component=component),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": names.selector(plan.tier, component)},
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": {
                    "labels": names.labels(plan.tier, component),
                    **({"annotations": annotations} if annotations else {}),
                },
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": pods.security_context(template),
                    **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
                    "containers": [probed],
                    "volumes": [{"name": "scratch", "emptyDir": {}}],
                },
            },
        },
    }
    return (service, deployment)
