# SPDX-License-Identifier: Apache-2.0
"""Writes or checks METRICS.md, of tier and janitor: ``python -m kvtier_connector.tier.metrics_reference --write``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_connector.janitor.metrics import METRICS as JANITOR_METRICS
from kvtier_connector.tier.metrics import METRICS

REFERENCE = Path(__file__).parents[2] / "METRICS.md"

_HEAD = """\
# Metrics of the disk tier

vLLM's `/metrics` endpoint serves them with its own labels (`model_name`, `engine`) added. Written by
`python -m kvtier_connector.tier.metrics_reference --write`; do not edit.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
"""

_JANITOR = """
# Metrics of the janitor

The janitor's own `/metrics`, port 9400, serves them. All have the label `tier`: `<namespace>/<name>`.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
"""


def render() -> str:
    """Return the document."""
    of_tier = "".join(_row(each.name, each.documentation, each.labels, is_gauge=each.is_gauge) for each in METRICS)
    of_janitor = "".join(
        _row(each.name, each.documentation, (each.label,) if each.label else (), is_gauge=each.is_gauge)
        for each in JANITOR_METRICS
    )
    return _HEAD + of_tier + _JANITOR + of_janitor


def main(arguments: list[str] | None = None) -> int:
    """Write the document, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="metrics_reference", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help=f"write {REFERENCE.name}")
    action.add_argument("--check", action="store_true", help="exit with 1 if it would change")
    if parser.parse_args(arguments).write:
        REFERENCE.write_text(render(), encoding="utf-8")
        return 0
    is_fresh = REFERENCE.is_file() and REFERENCE.read_text(encoding="utf-8") == render()
    if not is_fresh:
        sys.stderr.write(f"{REFERENCE} is stale; run this with --write\n")
    return 0 if is_fresh else 1


def _row(name: str, documentation: str, labels: Sequence[str], *, is_gauge: bool) -> str:
    full_name = name if is_gauge else f"{name}_total"
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{full_name}` | {'gauge' if is_gauge else 'counter'} | {shown} | {documentation} |\n"


if __name__ == "__main__":
    sys.exit(main())
