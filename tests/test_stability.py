# SPDX-License-Identifier: Apache-2.0
"""The promise of stability by field names fields that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from definition import tier_definition

PAGE = (Path(__file__).resolve().parents[1] / "docs/support.md").read_text()
TABLE = PAGE.split("## Stability by field")[1].split("\n## ")[0]
EXPERIMENTAL = re.findall(r"`((?:spec|status)\.[A-Za-z.]+)`", TABLE)
(VERSION,) = tier_definition()["spec"]["versions"]


@pytest.mark.parametrize("path", EXPERIMENTAL)
def test_an_experimental_field_is_a_field(path: str) -> None:
    node: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        node = node["properties"][name]
    assert node["description"]


def test_the_promise_is_of_the_served_version() -> None:
    assert (VERSION["served"], VERSION["storage"]) == (True, True)
    assert f"`{VERSION['name']}` is served until" in TABLE
    assert len(EXPERIMENTAL) > 8
