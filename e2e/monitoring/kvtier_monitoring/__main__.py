# SPDX-License-Identifier: Apache-2.0
"""Write or check charts/kvtier/dashboards, which `boards.yaml` describes: ``python -m kvtier_monitoring --write``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvtier_connector.contract import generated_page
from kvtier_monitoring import panels

DASHBOARDS: Final = Path(__file__).resolve().parents[3] / "charts" / "kvtier" / "dashboards"
_TIER: Final = 'namespace="$namespace", tier="$tier"'
_TEXT: Final = Path(__file__).with_name("boards.yaml").read_text(encoding="utf-8")
BOARDS: Final[dict[str, dict[str, Any]]] = yaml.safe_load(_TEXT.replace("TIER", _TIER))
"""By the name of the file."""


def render(name: str) -> str:
    """Return a dashboard as Grafana takes it."""
    described = BOARDS[name]
    shown = panels.board(f"kvtier-{name}", described["title"], described["about"], where=described["where"])
    for variable in described.get("variables", ()):
        shown.with_variable((panels.amount if "default" in variable else panels.choice)(**variable))
    for number, panel in enumerate(described["panels"], 1):
        shown.with_panel(_panel(dict(panel)).id(number))
    return JSONEncoder(sort_keys=True, indent=1).encode(shown.build()) + "\n"


def _panel(fields: dict[str, Any]) -> panels.AnyPanel:
    limits = panels.Limits(**fields.pop("limits")) if "limits" in fields else None
    if "listing" in fields:
        return panels.listing(fields.pop("listing"), **fields)
    if "figure" in fields:
        return panels.figure(fields.pop("figure"), limits=limits, **fields)
    return panels.graph(fields.pop("graph"), limits=limits, **fields)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the dashboards, or say whether they are up to date."""
    return max(_run(arguments, name) for name in BOARDS)


def _run(arguments: Sequence[str] | None, name: str) -> int:
    file = DASHBOARDS / f"{name}.json"
    return generated_page.run(arguments, prog="kvtier_monitoring", file=file, render=lambda: render(name))


if __name__ == "__main__":
    sys.exit(main())
