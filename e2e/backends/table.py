# SPDX-License-Identifier: Apache-2.0
"""What was measured, as one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("cold_ms", "hit_ms", "replica_ms")


def short(result: Mapping[str, Any]) -> str:
    """Return one case in a line."""
    return ", ".join(f"{name[:-3]} {_ms(result, name)}" for name in COLUMNS)


def markdown(found: Mapping[str, Any]) -> str:
    """Return all cases as a table."""
    head = (
        f"First token of a prompt of {found['prompt_tokens']:,} tokens in ms; hits are the median of "
        f"{found['rounds']}.\n\n"
        "| Connector | cold | hit, same engine | new engine | tokens equal | starts, s | problem |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    rows = []
    for result in found["cases"]:
        cells = [result["title"], *(_ms(result, name) for name in COLUMNS), _equal(result)]
        cells += [
            ", ".join(map(str, result.get("start_seconds", ()))),
            result.get("problem", "")[:160].replace("|", "/"),
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(rows)


def _ms(result: Mapping[str, Any], name: str) -> str:
    return f"{result[name]:.0f}" if name in result else "-"


def _equal(result: Mapping[str, Any]) -> str:
    return "-" if "same_tokens" not in result else "yes" if result["same_tokens"] else "NO"
