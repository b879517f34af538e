# SPDX-License-Identifier: Apache-2.0
"""The README of the embedded cluster promises what the suite tests, file by file."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parents[1] / "e2e" / "localcluster" / "README.md"


def test_the_readme_promises_what_is_tested() -> None:
    files = [path for path in sorted(HERE.glob("test_*.py")) if path != Path(__file__)]
    wanted = [f"| {path.stem} | {ast.get_docstring(ast.parse(path.read_text()))} |" for path in files]
    assert [line for line in README.read_text().splitlines() if line.startswith("| test_")] == wanted
