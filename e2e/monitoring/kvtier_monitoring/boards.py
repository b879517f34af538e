# SPDX-License-Identifier: Apache-2.0
"""Makes the dashboards that `boards.yaml` describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml
from grafana_foundation_sdk.builders.dashboard import Dashboard

from kvtier_monitoring import panels

_TIER: Final = 'namespace="$namespace", tier="$tier"'
_TEXT: Final = Path(__file__).with_name("boards.yaml").read_text(encoding="utf-8")
BOARDS: Final[dict[str, dict[str, Any]]] = yaml.safe_load(_TEXT)
"""By the name of the file."""


def make(name: str) -> Dashboard:
    """Return a dashboard."""
    described = _filled(BOARDS[name])
    shown = panels.board(f"kvtier-{name}", described["title"], described["about"], where=described["where"])
    for variable in described.get("variables", ()):
        shown.with_variable((panels.amount if "default" in variable else panels.choice)(**variable))
    for number, panel in enumerate(described["panels"], 1):
        shown.with_panel(_panel(dict(panel)).id(number))
    return shown


def _panel(fields: dict[str, Any]) -> panels.AnyPanel:
    limits = panels.Limits(**fields.pop("limits")) if "limits" in fields else None
    if "listing" in fields:
        return panels.listing(fields.pop("listing"), **fields)
    if "figure" in fields:
        return panels.figure(fields.pop("figure"), limits=limits, **fields)
    return panels.graph(fields.pop("graph"), limits=limits, **fields)


def _filled(described: Any) -> Any:
    """Return it with the label matchers of the tier."""
    if isinstance(described, dict):
        return {name: _filled(value) for name, value in described.items()}
    if isinstance(described, list):
        return [_filled(each) for each in described]
    return described.replace("TIER", _TIER) if isinstance(described, str) else described
