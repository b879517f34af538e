# SPDX-License-Identifier: Apache-2.0
"""docs/faults.md names tests, metrics and fields that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/faults.md").read_text()


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 20
    missing = [f"{path}::{name}" for path, name in named if name not in functions_in(ROOT / path)]
    assert missing == []


def test_every_fault_of_the_page_is_proved_by_a_test() -> None:
    rows = [line for line in PAGE.split("## Faults")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    assert [row for row in rows if "`tests/" not in row] == []


def test_every_metric_that_the_page_names_is_served() -> None:
    served = (ROOT / "connector/METRICS.md").read_text()
    named = set(re.findall(r"vllm:kvtier_\w+", PAGE))
    assert [name for name in named if f"`{name}`" not in served] == []


def test_every_cause_that_the_page_names_is_one_the_connector_counts() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "connector/kvtier_connector").rglob("*.py"))
    causes = set(re.findall(r'cause="(\w+)"', PAGE))
    assert len(causes) > 8
    assert [cause for cause in causes if f'"{cause}"' not in sources] == []


def test_every_condition_that_the_page_names_is_reported() -> None:
    reported = (ROOT / "docs/conditions.md").read_text()
    named = set(re.findall(r"condition `(\w+)`", PAGE))
    assert named
    assert [name for name in named if f"## {name}\n" not in reported] == []
