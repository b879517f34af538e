# SPDX-License-Identifier: Apache-2.0
"""A linter rule or a type error that is silenced needs a reason in the same line, or `make check` fails."""

from __future__ import annotations

from pathlib import Path

import ci_tools
import pytest

suppressions = ci_tools.load("suppressions")


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa",
        "# noqa: S104",
        "#noqa:S104",
        "# NOQA : S104",
        "# noqa: PLR0913, PLR0917",
        "# noqa: PLR0913 PLR0917 -",
        "# ruff: noqa: E501",
        "# type: ignore",
        "# type: ignore[arg-type, return-value]",
        "# type: ignore[no-untyped-def] # noqa: ANN202",
    ],
)
def test_what_is_silenced_without_a_reason_is_found_with_its_line(comment: str) -> None:
    assert suppressions.unexplained(f'"""Text."""\nvalue = 1  {comment}\n') == [(2, comment)]


@pytest.mark.parametrize(
    "comment",
    [
        "# noqa: S104  the kubelet is outside",
        "# noqa: PLR0913, PLR0917 - vLLM's signature",
        "# noqa: PLR2004 (plural, name, subresource)",
        "# noqa: PLR2004  1m",
        "# ruff: noqa: E501  a table",
        "# type: ignore[misc]  # frozen, as the test says",
        "# type: ignore[no-untyped-def] # noqa: ANN202  the library's",
        "# nothing is silenced here",
    ],
)
def test_a_reason_in_the_same_line_is_enough(comment: str) -> None:
    assert suppressions.unexplained(f"value = 1  {comment}\n") == []


def test_what_a_text_says_silences_nothing() -> None:
    assert suppressions.unexplained('value = "# noqa: S104"\n"""\n# type: ignore\n"""\n') == []


def test_the_command_names_the_place_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("import os  # noqa: F401  a name for others\n")
    bad.write_text("import sys\nimport os  # noqa: F401\n")
    assert suppressions.main([str(good)]) == 0
    assert suppressions.main([str(good), str(bad)]) == 1
    assert f"{bad}:2: # noqa: F401\n" in capsys.readouterr().err
