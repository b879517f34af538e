# SPDX-License-Identifier: Apache-2.0
"""The command line that the operator gives an engine of a tier, with directories of this machine in place of mounts.

So the matrix runs what a user gets: flags, chunks, identity and settings of the connector all come from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api.parse import parse
from kvtier_operator.parts import render as render_objects
from kvtier_operator.parts.connectors.rendering import OFFLOAD_MOUNT
from kvtier_operator.plan import make_unchecked_plan

PASSWORD: Final = "of-the-script"  # noqa: S105  of servers that only this machine reaches
"""Value of each variable that comes from a Secret."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Command line and environment of an engine."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    def with_ranks(self, ranks: int) -> Rendered:
        """Return what an engine of so many ranks is started with.

        Nothing else of its command line differs, and the operator gives the CPU build one rank only.
        """
        flag = "--tensor-parallel-size="
        return replace(self, argv=tuple(f"{flag}{ranks}" if word.startswith(flag) else word for word in self.argv))

    def without_tier(self) -> Rendered:
        """Return what the same engine is started with where there is no tier."""
        ours = ("--kv-transfer-config", "--scheduler-cls")
        return replace(self, argv=tuple(word for word in self.argv if not word.startswith(ours)))


def body_of(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tier of this name."""
    metadata = {"name": name, "namespace": "matrix", "uid": "0"}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "spec": dict(spec)}


def engine_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the container of a tier's engine, and the files of its ConfigMap.

    Raises:
        SpecInvalid: the operator refuses the spec.
    """
    tier = names.tier_ref(body)
    objects = render_objects(make_unchecked_plan(parse(body), tier, connector_image="kvtier"))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    containers = by_name["Deployment", names.engine(tier)]["spec"]["template"]["spec"]["containers"]
    container = next(each for each in containers if each["name"] == names.ENGINE_CONTAINER)
    return container, by_name["ConfigMap", names.config(tier)]["data"]


def render(body: Mapping[str, Any], directory: Path, *, volume: Path | None = None) -> Rendered:
    """Write what the pod would mount below ``directory`` and return the engine's command line.

    Args:
        body: the tier.
        directory: stands for what this pod mounts.
        volume: stands for the volume; a folder of ``directory`` if left out.

    Raises:
        SpecInvalid: the operator refuses the spec.
    """
    container, files = engine_of(body)
    mounts = {
        names.VOLUME_MOUNT: volume or directory / "volume",
        names.CONFIG_MOUNT: directory / "config",
        names.ENGINE_STATE: directory / "state",
        names.LORA_MOUNT: directory / "adapters",
        OFFLOAD_MOUNT: directory / "node",
    }
    for path in mounts.values():
        path.mkdir(parents=True, exist_ok=True)

    def here(text: str) -> str:
        for mount, path in mounts.items():
            text = text.replace(mount, str(path))
        return text

    for name, text in files.items():
        (directory / "config" / name).write_text(here(text))
    env = {entry["name"]: here(entry["value"]) for entry in container["env"] if "value" in entry}
    sources = {entry["name"]: entry["valueFrom"] for entry in container["env"] if "valueFrom" in entry}
    env |= {name: PASSWORD for name, source in sources.items() if "secretKeyRef" in source}
    # The package comes from this checkout, and not from a mount.
    env.pop("PYTHONPATH", None)
    return Rendered(argv=tuple(here(word) for word in container["args"]), env=env)
