# SPDX-License-Identifier: Apache-2.0
"""Servers that the operator makes for a connector: a Redis for trying LMCache, and Mooncake's master. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Final

from kvtier_operator import names, quantity
from kvtier_operator.api.connector_spec import LMCacheRedis
from kvtier_operator.api.parse import read_leniently
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule, Problem, ReadStage, Status, met, unknown
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts import pods
from kvtier_operator.parts.part import Component, Work, component_problem
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.decisions import decode_rendered, make_rendered

ANNOTATION_GENERATION: Final = f"{names.GROUP}/generation"
"""On the pod: LMCache's keys name neither revision nor weights, so another generation must find an empty Redis."""

_FIRST_PORT: Final = 10_000
_PORTS: Final = 50_000


def wanted(work: Work) -> tuple[Manifest, ...]:
    """Return the servers. One that runs keeps its pod while the spec still asks for it: its data are in memory."""
    if not work.plan.is_recorded:
        return servers(work.plan)
    return tuple(_kept(each, work) if each["kind"] == "Deployment" else each for each in servers(work.plan))


def _kept(made: Manifest, work: Work) -> Manifest:
    """Return a Deployment with the template of its pod, where today's code renders the same of the spec it is from."""
    plan, key = work.plan, names.key_of(made)
    live, template = work.snapshot.live.get(key), made["spec"]["template"]
    annotations = {} if live is None else live.content["metadata"].get("annotations") or {}
    note = decode_rendered(annotations.get(names.ANNOTATION_RENDERED, ""))
    spec = None if note is None else read_leniently(note.spec, instead={})
    if note is not None and spec is not None and note.generation == plan.generation.digest:
        before = {names.key_of(each): each for each in servers(replace(plan, spec=spec))}.get(key)
        if before is not None and before["spec"]["template"] == template:
            template = dict(note.template)
    config = json.dumps({"digest": plan.generation.digest})
    rendered = make_rendered(plan.spec, restart="", config=config, template=template).encode()
    return {
        **made,
        "metadata": {**made["metadata"], "annotations": {names.ANNOTATION_RENDERED: rendered}},
        "spec": {**made["spec"], "template": template},
    }


_OF_MESSAGES: Final = Component(
    name="store",
    effect=", so engines serve without the blocks of others",
    image_fields="the image of the store in spec.connector",
    resources_field="the memory of the store in spec.connector",
)


def _judge(stage: ReadStage, _previous: Status) -> Problem:
    """The servers that the operator makes for the connector run."""
    spec, tier = stage.spec, stage.tier
    lmcache, mooncake = spec.connector.used_lmcache, spec.connector.mooncake
    names_of = [
        *([names.redis(tier)] if lmcache is not None and lmcache.redis is not None and lmcache.redis.trial else []),
        *([names.mooncake_master(tier)] if mooncake is not None and mooncake.master is not None else []),
    ]
    if not names_of:
        return unknown(Reason.NOT_APPLICABLE, "the connector needs no server that the operator makes")
    (name,) = names_of
    live = stage.snapshot.live.get(ObjectKey(api_version="apps/v1", kind="Deployment", name=name))
    found = component_problem(_OF_MESSAGES, stage.snapshot.stores, None if live is None else live.content)
    if found is not None:
        return found
    if any(pod.is_ready and not pod.is_terminating for pod in stage.snapshot.stores):
        return met(Reason.STORE_READY, f"Service/{name} answers")
    return Problem(
        Reason.STORE_STARTING,
        f"no pod of Deployment/{name} is ready yet: `kubectl describe deployment/{name}` says why",
    )


STORE_READY: Final = ConditionRule(kind="StoreReady", needs=ReadStage, judge=_judge)


def servers(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the Services and Deployments of the servers that the tier needs."""
    return (*_redis(plan), *_mooncake_master(plan))


def redis_url(plan: TierPlan, redis: LMCacheRedis) -> str:
    """Return the address of the Redis: the user's, or that of the one that the operator makes."""
    if redis.url is not None:
        return redis.url
    return f"redis://{names.redis(plan.tier)}.{plan.tier.namespace}.svc:{_redis_port(plan)}"


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
    listens = pods.port("redis", port, port)
    return _server(plan, names.redis(plan.tier), container, listens, {ANNOTATION_GENERATION: plan.generation.digest})


def _mooncake_master(plan: TierPlan) -> tuple[Manifest, ...]:
    settings = plan.spec.connector.mooncake
    if settings is None or settings.master is None:
        return ()
    master = settings.master
    has_flag = any(word.lstrip("-").startswith("enable_offload") for word in master.args)
    offloads = ["--enable_offload=true"] if settings.config.get("enable_offload") and not has_flag else []
    container = {
        "name": "mooncake-master",
        "image": master.image or plan.spec.engine.image,
        "command": ["mooncake_master"],
        "args": [f"--port={master.port}", *offloads, *master.args],
        "ports": [{"name": "rpc", "containerPort": master.port, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
    }
    return _server(plan, names.mooncake_master(plan.tier), container, pods.port("rpc", master.port, "rpc"), {})


def _server(
    plan: TierPlan, name: str, container: Manifest, listens: Manifest, annotations: dict[str, str]
) -> tuple[Manifest, Manifest]:
    """Return the Service and the Deployment of one pod without a volume that outlives it."""
    template, component = plan.spec.engine.pod_template, names.COMPONENT_STORE
    probed = {
        **container,
        "readinessProbe": {"tcpSocket": {"port": listens["name"]}, "periodSeconds": 5},
        "securityContext": pods.hardened(),
        "volumeMounts": [{"name": "scratch", "mountPath": names.SCRATCH_MOUNT}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.security_context(template),
        **pods.pull_secrets(template),
        "containers": [probed],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    return (
        pods.service(plan.tier, name, component, [listens]),
        pods.deployment(plan.tier, name, component, pod, annotations=annotations),
    )
