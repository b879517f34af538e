# SPDX-License-Identifier: Apache-2.0
"""A release accepts every spec that an earlier one stored.

`stored_specs/VERSION.json` holds the golden specs of a release, one a line. That of the version in work follows the
golden tiers (``pytest --update-golden``); the others never change again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator import __version__
from kvtier_operator.api import parse
from kvtier_operator.names import tier_ref
from kvtier_operator.plan import make_unchecked_plan

FOLDER = Path(__file__).parent / "stored_specs"
GOLDEN = Path(__file__).parent / "golden"
STORED = [
    pytest.param(json.loads(line), id=f"{file.stem}-{json.loads(line)['metadata']['name']}-{number}")
    for file in sorted(FOLDER.glob("*.json"))
    for number, line in enumerate(file.read_text().splitlines())
]


def test_the_specs_of_this_version_are_kept(request: pytest.FixtureRequest) -> None:
    bodies = [yaml.safe_load((folder / "tier.yaml").read_text()) for folder in sorted(GOLDEN.iterdir())]
    text = "".join(f"{json.dumps(body, sort_keys=True)}\n" for body in bodies)
    kept = FOLDER / f"{__version__}.json"
    if request.config.getoption("--update-golden"):
        kept.write_text(text)
    assert kept.read_text() == text


@pytest.mark.parametrize("body", STORED)
def test_a_spec_that_a_release_stored_is_accepted_and_planned(body: dict[str, Any]) -> None:
    assert make_unchecked_plan(parse(body), tier_ref(body), connector_image="connector:test")
