# SPDX-License-Identifier: Apache-2.0
"""Where the CRD, the chart, the samples and the rendered operator of this release are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

CHART: Final = "charts/kvtier"
CRD: Final = "crds/kvcachetier.yaml"
SAMPLES: Final = "crds/samples"
OPERATOR: Final = "docs/operator.yaml"

_HERE: Final = Path(__file__).resolve().parent


def find(name: str) -> Path:
    """Return the path of one of them.

    Raises:
        ClickException: this installation was built without.
    """
    for base in (_HERE / "carried", _HERE.parents[1]):
        if (base / name).exists():
            return base / name
    raise click.ClickException(f"{name} is not part of this installation: use the wheel, or a checkout")


def samples() -> dict[str, Path]:
    """Return the samples by name. Those in the folder `others` have kinds that a cluster need not know."""
    return {path.stem: path for path in sorted(find(SAMPLES).rglob("*.yaml"))}
