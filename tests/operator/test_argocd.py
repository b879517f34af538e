# SPDX-License-Identifier: Apache-2.0
"""What Argo CD makes of a tier with the health script that we ship: run by the Lua that Argo CD speaks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from healthy_tier import LATER, NOON, READY, STARTING, VIEW, varied, with_engines
from lupa.lua51 import LuaRuntime

from kvtier_operator import status
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import SpecInvalid

PATCH = yaml.safe_load((Path(__file__).parents[2] / "docs" / "argocd.yaml").read_text())
KEY = "resource.customizations.health.kvtier.dev_KVCacheTier"


def health(resource: dict[str, Any]) -> tuple[str, str]:
    lua = LuaRuntime()
    lua.globals()["obj"] = lua.table_from(resource, recursive=True)
    found = lua.execute(PATCH["data"][KEY])
    return found["status"], found["message"]


def judged(view: Progress, *, generation: int = VIEW.generation) -> tuple[str, str]:
    said = status.report(view, {}, now=NOON)
    return health({"metadata": {"generation": generation}, "status": said})


PAUSED = varied(VIEW, spec=VIEW.spec.model_copy(update={"paused": True}) if VIEW.spec else None)


@pytest.mark.parametrize(
    ("view", "verdict", "words"),
    [
        (VIEW, "Healthy", "Ready: "),
        (with_engines(STARTING), "Progressing", "EnginesStarting: "),
        (with_engines(replace(READY, ready=1)), "Progressing", "EnginesStarting: "),
        (varied(VIEW, invalid=SpecInvalid("spec.cpu", "is wrong")), "Degraded", "SpecInvalid: spec.cpu"),
        (with_engines(STARTING, is_stalled=True), "Degraded", "RolloutStalled: "),
        (PAUSED, "Suspended", "paused"),
    ],
    ids=["ready", "starting", "one of two", "invalid", "stalled", "paused"],
)
def test_argo_cd_says_of_a_tier_what_its_conditions_say(view: Progress, verdict: str, words: str) -> None:
    found, message = judged(view)
    assert found == verdict
    assert words in message


def test_what_was_said_of_an_earlier_spec_is_not_believed() -> None:
    assert judged(VIEW, generation=VIEW.generation + 1)[0] == "Progressing"


def test_a_tier_that_nobody_has_looked_at_is_on_its_way() -> None:
    for resource in ({}, {"status": {}}, {"status": {"observedGeneration": 1}}):
        assert health({"metadata": {"generation": 1, "creationTimestamp": LATER}, **resource})[0] == "Progressing"
