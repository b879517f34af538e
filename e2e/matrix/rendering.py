# SPDX-License-Identifier: Apache-2.0
"""The command line that the operator gives an engine of a tier, with directories of this machine in place of mounts.

So the matrix runs what a user gets: flags, chunks, identity and settings of the connector all come from the plan.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvtier_connector.contract import engine as contract
from kvtier_operator import names
from kvtier_operator.api.parse import parse
from kvtier_operator.names import TierRef
from kvtier_operator.parts import engine
from kvtier_operator.plan import make_unchecked_plan

IMAGE: Final = "vllm/vllm-openai:v0.32.0"
TIER: Final = "matrix"


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Command line and environment of an engine."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def render(spec: Mapping[str, Any], directory: Path) -> Rendered:
    """Write what the pod would mount below ``directory`` and return the engine's command line.

    Raises:
        SpecInvalid: the operator refuses the spec.
    """
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": TIER, "namespace": TIER, "uid": "0"},
        "spec": dict(spec),
    }
    parsed = parse(body)
    tier = TierRef(namespace=TIER, name=TIER, uid="0")
    plan = make_unchecked_plan(parsed, tier, connector_image="kvtier")
    mounts = {
        names.VOLUME_MOUNT: directory / "volume",
        names.CONFIG_MOUNT: directory / "config",
        names.ENGINE_STATE: directory / "state",
        names.LORA_MOUNT: directory / "adapters",
    }
    for path in mounts.values():
        path.mkdir(parents=True, exist_ok=True)

    def here(text: str) -> str:
        for mount, path in mounts.items():
            text = text.replace(mount, str(path))
        return text

    (directory / "config" / contract.CONFIG_FILE).write_text(here(plan.config_text))
    (directory / "config" / contract.LIVE_FILE).write_text(plan.live_text)
    (container,) = engine.deployment(plan)["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: here(entry["value"]) for entry in container["env"] if "value" in entry}
    return Rendered(argv=tuple(here(word) for word in container["args"]), env=env)


def with_ranks(rendered: Rendered, ranks: int) -> Rendered:
    """Return what an engine of so many ranks is started with.

    Nothing else of its command line differs, and the operator gives the CPU build one rank only.
    """
    flag = "--tensor-parallel-size="
    return replace(rendered, argv=tuple(f"{flag}{ranks}" if word.startswith(flag) else word for word in rendered.argv))


def without_tier(rendered: Rendered) -> Rendered:
    """Return what the same engine is started with where there is no tier."""
    return replace(rendered, argv=tuple(word for word in rendered.argv if not word.startswith("--kv-transfer-config")))


def server_arguments() -> Any:
    """Return vLLM's module for the arguments of its API server."""
    try:
        return importlib.import_module("vllm.entrypoints.common.cli_args")
    except ImportError:
        # Before 0.33.
        return importlib.import_module("vllm.entrypoints.launchers.cli_args")


def engine_arguments(argv: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """Read the command line as vLLM's API server does; return what it starts the engine with, and adapters by name."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = server_arguments()
    parsed = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv))
    cli_args.validate_parsed_serve_args(parsed)
    return EngineArgs.from_cli_args(parsed), {module.name: module.path for module in parsed.lora_modules or ()}
