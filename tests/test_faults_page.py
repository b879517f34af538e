# SPDX-License-Identifier: Apache-2.0
"""The page of faults names metrics and conditions that exist, and each of its faults is proved by tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
PROOFS = (ROOT / "tests/connector/faults/README.md").read_text()


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_fault_of_the_page_is_proved_by_tests_that_exist() -> None:
    faults = rows(PAGE.split("## Faults")[1].split("\n## ")[0])
    assert [cells[0] for cells in faults] == [cells[0] for cells in rows(PROOFS)]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[1]) for cells in rows(PROOFS)]
    assert all(named)
    missing = [f"{path}::{name}" for each in named for path, name in each if name not in functions_in(ROOT / path)]
    assert missing == []


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
