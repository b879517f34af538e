# SPDX-License-Identifier: Apache-2.0
"""What is read by who types a connector or a route that cannot work: kubectl, `kvtier validate` and `kvtier plan`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import tools
from definition import tier_definition
from test_bad_input import BAD, tier

from kvtier_cli.app import main
from kvtier_localcluster.apiserver import ApiServerThread

MISTAKES = {"a connector that there is not": "LMCache", "a router without a route": "set spec.routing.type to Router"}
"""By their names in test_bad_input.yaml, and what to do."""


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    place = tmp_path_factory.mktemp("kubectl")
    with ApiServerThread() as api:
        api.create(tier_definition())
        yield (str(tools.binary("kubectl")), f"--server={api.url}", f"--cache-dir={place}")


@pytest.mark.live
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_the_field_and_the_remedy_wherever_it_is_typed(
    mistake: str, kubectl: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: dict[str, Any] = next(each for each in BAD if each["mistake"] == mistake)
    file = tmp_path / "tier.yaml"
    file.write_text(yaml.safe_dump(tier({**bad["set"], "metadata.namespace": "default"})))
    done = subprocess.run([*kubectl, "apply", "-f", str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    said = [done.stderr]
    for verb in ("validate", "plan"):
        assert main([verb, str(file)]) == 1, verb
        found = capsys.readouterr()
        said.append(found.out + found.err)
    for text in said:
        assert bad["at"] in text
        assert MISTAKES[mistake] in text
