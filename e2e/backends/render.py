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
from kvtier_operator.plan import make_unchecked_plan


def rendered(device: str, title: str, connector: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what a kubelet would start: words, environment, files and mounts of the engine's container."""
    return of_tier(title, cases.body(device, connector, f"case-{number}"))


def of_tier(title: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the same for a tier."""
    plan = make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:e2e")
    objects = render(plan)
    engine = next(each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("ine"))
    pod = engine["spec"]["template"]["spec"]
    container = next(each for each in pod["containers"] if each["name"] == names.ENGINE_CONTAINER)
    config = next(each for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("tor"))
    return {
        "title": title,
        "tier": body,
        # Whether a new engine can find anything at all.
        "shares": plan.spec.connector.uses_volume or "redis" in json.dumps(body["spec"]["connector"]),
        "blocks": plan.spec.connector.blocks_of or body["metadata"]["name"],
        "command": container["command"],
        "args": container["args"],
        "env": container["env"],
        "mounts": {each["name"]: each["mountPath"] for each in container["volumeMounts"]},
        "files": config["data"],
    }


def main() -> None:
    """Write the cases of a device."""
    parser = argparse.ArgumentParser(prog="python -m e2e.backends.render", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pair", action="store_true", help="the two tiers of e2e.backends.disaggregated")
    options = parser.parse_args()
    wanted = cases.CPU if options.device == "cpu" else cases.CUDA
    found = [rendered(options.device, title, connector, at) for at, (title, connector) in enumerate(wanted.items())]
    if options.pair:
        found = [of_tier(name, cases.body(options.device, each, name)) for name, each in cases.PAIR.items()]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {"device": options.device, "config": cases.model_config(options.device), "cases": found}
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
