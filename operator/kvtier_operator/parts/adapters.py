# SPDX-License-Identifier: Apache-2.0
"""How the adapters of a model reach its engines: vLLM's flags, and the claims that hold the files. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api.tier_spec import Model
from kvtier_operator.names import Manifest

_MOST_AT_ONCE: Final = 8
"""Adapters that are computed together where nobody said: each takes memory of the devices."""


def args(model: Model) -> list[str]:
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


def volumes(model: Model) -> list[Manifest]:
    """Return a volume for each claim."""
    return [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, name in _claims(model).items()
    ]


def mounts(model: Model) -> list[Manifest]:
    """Return where the engine finds each claim."""
    return [
        {"name": name, "mountPath": f"{names.LORA_MOUNT}/{claim}", "readOnly": True}
        for claim, name in _claims(model).items()
    ]


def _claims(model: Model) -> dict[str, str]:
    """Return the volume of each claim. A claim may have a longer name than a volume, so they are numbered."""
    found = sorted({lora["source"]["claim"] for lora in model.loras if "claim" in lora["source"]})
    return {claim: f"kvtier-lora-{number}" for number, claim in enumerate(found)}


def _path(source: Mapping[str, Any]) -> str:
    if "hub" in source:
        return str(source["hub"])
    return "/".join(filter(None, (names.LORA_MOUNT, source["claim"], source.get("path", ""))))
