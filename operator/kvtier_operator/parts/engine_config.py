# SPDX-License-Identifier: Apache-2.0
"""Configuration of the engine: the connector's ConfigMap, and the flags of LoRA adapters and of KV events. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvtier_connector.contract import engine
from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.model_spec import ModelSpec
from kvtier_operator.api.routing_spec import EVENTS_PORT, REPLAY_PORT
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.parts import claim, connectors
from kvtier_operator.parts.part import Work
from kvtier_operator.plan import TierPlan, live_text

PART: Final = "config"


def wanted(work: Work) -> tuple[Manifest, ...]:
    """Return the ConfigMap; engines that run without their claim get new live settings and nothing else."""
    plan, live = work.plan, work.snapshot.live
    if claim.PART not in work.missing or names.deployment_key(names.engine(plan.tier)) not in live:
        return (config(plan),)
    found = live.get(key_of(plan.tier))
    return () if found is None else (with_live_settings(found.content, plan.spec, plan.tier),)


def key_of(tier: TierRef) -> ObjectKey:
    """Return the ConfigMap."""
    return ObjectKey(api_version="v1", kind="ConfigMap", name=names.config(tier))


def config(plan: TierPlan) -> Manifest:
    """Return the ConfigMap with the connector's settings."""
    metadata = names.metadata(plan.tier, names.config(plan.tier), component=names.COMPONENT_ENGINE)
    if plan.spec.engine.external is not None:
        # There is no Deployment of ours to carry them.
        metadata["annotations"] = {
            names.ANNOTATION_DECISIONS: plan.decisions.encode(),
            names.ANNOTATION_IMAGE: plan.connector_image,
        }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {
            engine.CONFIG_FILE: plan.config_text,
            engine.LIVE_FILE: plan.live_text,
            **connectors.render(plan).files,
        },
    }


def with_live_settings(live: Mapping[str, Any], spec: TierSpec, tier: TierRef) -> Manifest:
    """Return the live ConfigMap with the live settings of a spec that cannot be carried out in full.

    Running pods were made for its other settings, and read them again when they are restarted.
    """
    metadata = names.metadata(tier, names.config(tier), component=names.COMPONENT_ENGINE)
    noted = live.get("metadata", {}).get("annotations") or {}
    if kept := {key: noted[key] for key in (names.ANNOTATION_DECISIONS, names.ANNOTATION_IMAGE) if key in noted}:
        metadata["annotations"] = kept
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {**live.get("data", {}), engine.LIVE_FILE: live_text(spec)},
    }


_MOST_AT_ONCE: Final = 8
"""Default of adapters that are computed together: each takes memory of the devices."""


def adapter_args(model: ModelSpec) -> list[str]:
    """Return the flags of vLLM; none without adapters."""
    if not model.loras:
        return []
    modules = [
        {"name": lora["name"], "path": _path(lora["source"]), "base_model_name": model.name} for lora in model.loras
    ]
    return [
        "--enable-lora",
        f"--max-lora-rank={model.max_lora_rank}",
        f"--max-loras={model.max_loras_at_once or min(len(modules), _MOST_AT_ONCE)}",
        "--lora-modules",
        *(json.dumps(module, sort_keys=True, separators=(",", ":")) for module in modules),
    ]


def adapter_volumes(model: ModelSpec) -> list[Manifest]:
    """Return a volume for each claim."""
    return [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, name in _claims(model).items()
    ]


def adapter_mounts(model: ModelSpec) -> list[Manifest]:
    """Return where the engine finds each claim."""
    return [
        {"name": name, "mountPath": f"{names.LORA_MOUNT}/{claim}", "readOnly": True}
        for claim, name in _claims(model).items()
    ]


def _claims(model: ModelSpec) -> dict[str, str]:
    """Return the volume of each claim. A claim may have a longer name than a volume, so they are numbered."""
    found = sorted({lora["source"]["claim"] for lora in model.loras if "claim" in lora["source"]})
    return {claim: f"kvtier-lora-{number}" for number, claim in enumerate(found)}


def _path(source: Mapping[str, Any]) -> str:
    if "hub" in source:
        return str(source["hub"])
    return "/".join(filter(None, (names.LORA_MOUNT, source["claim"], source.get("path", ""))))


_ADDRESS = "KVTIER_POD_IP"


def events_args(spec: TierSpec) -> list[str]:
    """Return the engine's flags."""
    if spec.kv_events is None:
        return []
    document = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        # vLLM binds what has a star in it, and connects to everything else.
        "endpoint": f"tcp://*:{EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
        # The kubelet puts in the address, by which llm-d's picker knows the pod.
        "topic": f"kv@$({_ADDRESS}):{names.HTTP_PORT}@{spec.model.name}",
    }
    return [f"--kv-events-config={json.dumps(document, sort_keys=True, separators=(',', ':'))}"]


def events_env(spec: TierSpec) -> list[Manifest]:
    """Return the engine's variables."""
    if spec.kv_events is None:
        return []
    return [
        {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "value": str(int(spec.kv_events.block_hashes == "Integers"))},
    ]


def events_ports(spec: TierSpec) -> list[Manifest]:
    """Return the ports of an engine that publishes."""
    if spec.kv_events is None:
        return []
    ports = {"kv-events": EVENTS_PORT, "kv-replay": REPLAY_PORT}
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]
