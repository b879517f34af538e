# SPDX-License-Identifier: Apache-2.0
"""Render each case with the operator's own planner, for a machine that has vLLM and not the operator."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from e2e.backends import cases

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.parts import render
from kvtier_operator.parts.connectors.rendering import ON_CPU_BUILD, ON_DEVICE
from kvtier_operator.plan import make_unchecked_plan

CPU = "VLLM_CPU_KVCACHE_SPACE"
"""A variable that engines on the CPU build have."""
ABSENT = f"redis://127.0.0.1:{cases.ABSENT_PORT}"


def rendered(device: str, title: str, connector: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what a kubelet would start: words, environment, files and mounts of the engine's container."""
    return of_tier(title, cases.body(device, connector, f"case-{number}"))


def of_tier(title: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the same for a tier."""
    plan = make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:e2e")
    objects = render(plan)
    container = engine_of(list(objects))
    config = next(each for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("tor"))
    # On the CPU build LMCache has nothing to copy with in the engine's process.
    needs_memcpy = "LMCacheConnectorV1" in json.dumps(container["args"]) and CPU in json.dumps(container["env"])
    return {
        "title": title,
        "tier": body,
        # Whether a new engine can find anything at all.
        "shares": plan.spec.connector.uses_volume or _finds_redis(body["spec"]["connector"]),
        "blocks": plan.spec.connector.blocks_of or body["metadata"]["name"],
        "command": container["command"],
        "args": [_copied_on_cpu(word) if needs_memcpy else word for word in container["args"]],
        "env": container["env"],
        "mounts": {each["name"]: each["mountPath"] for each in container["volumeMounts"]},
        "files": config["data"],
        "needs_memcpy": needs_memcpy,
    }


def _copied_on_cpu(word: str) -> str:
    """Return a word in which vLLM's tier in host memory, beside LMCache, is the one for its CPU build."""
    device, cpu = (json.dumps(spec, sort_keys=True, separators=(",", ":"))[1:-1] for spec in (ON_DEVICE, ON_CPU_BUILD))
    return word.replace(device, cpu)


def engine_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the engine's container of what was rendered."""
    engine = next(each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("ine"))
    pod = engine["spec"]["template"]["spec"]
    return dict(next(each for each in pod["containers"] if each["name"] == names.ENGINE_CONTAINER))


def _finds_redis(connector: dict[str, Any]) -> bool:
    return "redis" in json.dumps(connector) and ABSENT not in json.dumps(connector)


def main() -> None:
    """Write the cases of a device."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends.render", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lmcache", action="store_true", help="LMCache on the CPU build, where a class of ours copies")
    parser.add_argument("--pair", action="store_true", help="the two tiers of e2e.backends.disaggregated")
    options = parser.parse_args()
    wanted = cases.CPU if options.device == "cpu" else cases.CUDA
    if options.lmcache:
        wanted = cases.LMCACHE
    found = [rendered(options.device, title, connector, at) for at, (title, connector) in enumerate(wanted.items())]
    if options.pair:
        found = [of_tier(name, cases.body(options.device, each, name)) for name, each in cases.PAIR.items()]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"device": options.device, "config": cases.model_config(options.device), "cases": found}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
