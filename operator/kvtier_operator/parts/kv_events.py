# SPDX-License-Identifier: Apache-2.0
"""What ``spec.kvEvents`` adds to the pods of engines and janitor: flags, variables, ports. Pure."""

from __future__ import annotations

import json

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.events_spec import EVENTS_PORT, REPLAY_PORT
from kvtier_operator.names import Manifest

_ADDRESS = "KVTIER_POD_IP"
_PORTS = {"kv-events": EVENTS_PORT, "kv-replay": REPLAY_PORT}


def args(spec: TierSpec) -> list[str]:
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


def env(spec: TierSpec) -> list[Manifest]:
    """Return the engine's variables."""
    if spec.kv_events is None:
        return []
    is_integer = spec.kv_events.block_hashes == "Integers"
    return [
        {"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "value": str(int(is_integer))},
    ]


def ports(spec: TierSpec) -> list[Manifest]:
    """Return the ports of a container that publishes."""
    if spec.kv_events is None:
        return []
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _PORTS.items()]


def service_ports(spec: TierSpec) -> list[Manifest]:
    """Return the ports of the Service before it."""
    if spec.kv_events is None:
        return []
    return [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in _PORTS.items()]
