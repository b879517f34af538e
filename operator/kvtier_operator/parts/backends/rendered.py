# SPDX-License-Identifier: Apache-2.0
"""What a connector asks of the engine's pod, and the pieces that several connectors are made of. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan

BOTH: Final = "kv_both"

OFFLOAD_MOUNT: Final = "/var/cache/kvtier"
"""Directory on the node's disk for connectors that keep blocks there; it goes with the pod."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """What the engine gets for its connector."""

    transfer: Mapping[str, Any]
    """Document of ``--kv-transfer-config``."""
    args: tuple[str, ...] = ()
    """More flags."""
    env: tuple[Manifest, ...] = ()
    ports: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Entries of the ConfigMap beside those of kvtier's own connector."""
    init: tuple[Manifest, ...] = ()
    """Containers that run before the engine."""
    needs_package: bool = False
    """Whether the engine imports a module of kvtier's package."""

    @property
    def transfer_text(self) -> str:
        """Return the value of ``--kv-transfer-config``."""
        return json.dumps(self.transfer, sort_keys=True, separators=(",", ":"))


def connector(name: str, extra: Mapping[str, Any] | None = None, *, role: str = BOTH) -> dict[str, Any]:
    """Return one of vLLM's connectors by its name, alone or as a child of MultiConnector."""
    return {
        "kv_connector": name,
        "kv_role": role,
        **({"kv_connector_extra_config": dict(extra)} if extra else {}),
    }


def alone(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a connector that stands for itself."""
    # What cannot be loaded costs its computing; vLLM's default ends the request.
    return {**document, "kv_load_failure_policy": "recompute"}


def multi(*children: Mapping[str, Any]) -> dict[str, Any]:
    """Return several connectors as one: stored by all, loaded from the first that has it."""
    return alone(connector("MultiConnector", {"connectors": [dict(child) for child in children]}))


def variable(name: str, value: str) -> Manifest:
    """Return one environment variable."""
    return {"name": name, "value": value}


def node_disk(plan: TierPlan, size_bytes: int) -> tuple[Manifest, Manifest]:
    """Return a volume on the node's disk for so many bytes of blocks of each engine in the pod, and its mount."""
    # What the directory itself takes must not end the pod.
    limit = quantity.format_bytes(plan.sizing.engines_per_pod * size_bytes + (1 << 30))
    return (
        {"name": "kvtier-offload", "emptyDir": {"sizeLimit": limit}},
        {"name": "kvtier-offload", "mountPath": OFFLOAD_MOUNT},
    )


def own_files(plan: TierPlan) -> tuple[Manifest, Manifest]:
    """Return the volume with the files of the tier's ConfigMap, and its mount."""
    return (
        {"name": "config", "configMap": {"name": names.config(plan.tier)}},
        {"name": "config", "mountPath": names.CONFIG_MOUNT, "readOnly": True},
    )
