# SPDX-License-Identifier: Apache-2.0
"""Writes or checks connector/METRICS.md: ``python .ci/metrics.py --write``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvtier_connector.contract import generated_page
from kvtier_connector.janitor.metrics import METRICS as JANITOR_METRICS
from kvtier_connector.vllm_adapter import connector
from kvtier_connector.vllm_adapter.metrics import METRICS

REFERENCE = Path(__file__).parents[1] / "connector" / "METRICS.md"

_HEAD = """\
# Metrics of the disk tier

vLLM's `/metrics` endpoint serves them with its own labels (`model_name`, `engine`) added. The chart's monitors add
`namespace` and `tier` ([docs/operations.md](../docs/operations.md#watch)). Written by
`python .ci/metrics.py --write`; do not edit.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
"""

_JANITOR = """
# Metrics of the janitor

The janitor's own `/metrics`, port 9400, serves them, and `process_*` of the janitor itself. All of these have the
labels `namespace` and `tier`, the name of the KVCacheTier.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
"""


def render() -> str:
    """Return the document."""
    release = _row(connector.RELEASE_METRIC, connector.RELEASE_DOCUMENTATION, connector.RELEASE_LABELS, is_gauge=True)
    of_tier = "".join(_row(each.name, each.documentation, each.labels, is_gauge=each.is_gauge) for each in METRICS)
    of_janitor = "".join(
        _row(each.name, each.documentation, (each.label,) if each.label else (), is_gauge=each.is_gauge)
        for each in JANITOR_METRICS
    )
    return _HEAD + release + of_tier + _JANITOR + of_janitor


def main(arguments: list[str] | None = None) -> int:
    """Write the document, or say whether it is up to date."""
    return generated_page.run(arguments, prog="metrics.py", file=REFERENCE, render=render)


def _row(name: str, documentation: str, labels: Sequence[str], *, is_gauge: bool) -> str:
    full_name = name if is_gauge else f"{name}_total"
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{full_name}` | {'gauge' if is_gauge else 'counter'} | {shown} | {documentation} |\n"


if __name__ == "__main__":
    sys.exit(main())
