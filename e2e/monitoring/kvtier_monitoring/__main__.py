# SPDX-License-Identifier: Apache-2.0
"""Write or check charts/kvtier/dashboards: ``python -m kvtier_monitoring --write``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvtier_connector.contract import generated_page
from kvtier_monitoring.boards import BOARDS, make

DASHBOARDS = Path(__file__).resolve().parents[3] / "charts" / "kvtier" / "dashboards"


def render(name: str) -> str:
    """Return a dashboard as Grafana takes it."""
    return JSONEncoder(sort_keys=True, indent=1).encode(make(name).build()) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the dashboards, or say whether they are up to date."""
    return max(_run(arguments, name) for name in BOARDS)


def _run(arguments: Sequence[str] | None, name: str) -> int:
    file = DASHBOARDS / f"{name}.json"
    return generated_page.run(arguments, prog="kvtier_monitoring", file=file, render=lambda: render(name))


if __name__ == "__main__":
    sys.exit(main())
