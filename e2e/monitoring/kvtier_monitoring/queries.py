# SPDX-License-Identifier: Apache-2.0
"""The queries of a dashboard as Grafana sends them: with the values of its variables. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RATE_INTERVAL = "1m"
VALUES = {"namespace": "default", "tier": "demo", "price": "2.5", "gib_price": "0.16"}
"""Of the variables, for the tier of the demo."""


@dataclass(frozen=True)
class Query:
    """One query of one panel."""

    panel: str
    legend: str
    expression: str
    is_table: bool


def panels_of(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the panels that show something."""
    return [each for each in dashboard["panels"] if each["type"] != "row"]


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """Return a query with its variables replaced.

    Raises:
        KeyError: one has no value.
    """
    known = {"__rate_interval": RATE_INTERVAL, **values}
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: known[found[1] or found[2]], expression)


def queries_of(panel: Mapping[str, Any], values: Mapping[str, str]) -> Iterator[Query]:
    """Yield the queries of a panel."""
    for target in panel["targets"]:
        yield Query(panel["title"], target["legendFormat"], filled_in(target["expr"], values), panel["type"] == "table")


def name_of(legend: str, labels: Mapping[str, str]) -> str:
    """Return what Grafana calls a series."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)
