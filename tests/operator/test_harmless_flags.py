# SPDX-License-Identifier: Apache-2.0
"""All problems of a spec are listed at once, and flags that repeat the operator's own value are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.parse import problems
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts.engine import deployment
from kvtier_operator.plan import make_unchecked_plan


def test_all_that_is_wrong_is_told_at_once() -> None:
    body = tier(modelName="x", cpu={"size": "64GB"}, engine={"nodeSelector": {}})
    found = {each.field: each.message for each in problems(body)}
    assert set(found) == {"spec.modelName", "spec.cpu.size", "spec.engine.nodeSelector"}
    assert 'or "64G" for what is sold as 64GB' in found["spec.cpu.size"]


@pytest.mark.parametrize(
    ("engine", "devices"),
    [
        ({"tensorParallel": 4}, 4),
        ({"tensorParallel": 4, "accelerator": {"resource": "amd.com/gpu"}}, 4),
        ({"tensorParallel": 2, "accelerator": {"perPod": 4}}, 4),
        ({"tensorParallel": 2, "accelerator": {"resource": "none"}}, 1),
        ({}, 1),
    ],
)
def test_a_pod_has_as_many_devices_as_the_model_is_split_over(engine: dict[str, object], devices: int) -> None:
    assert parse(tier(engine=engine)).engine.accelerator.per_pod == devices


SAME = ["--enable-prefix-caching", "--port=8000", "--host=0.0.0.0"]


@pytest.mark.parametrize("args", [[each] for each in SAME] + [[*SAME, "--max-model-len=4096"]])
def test_a_flag_that_the_operator_sets_to_the_same_is_taken_and_changes_nothing(args: list[str]) -> None:
    def rendered(*given: str) -> dict[str, Any]:
        body = tier(engine={"args": list(given)})
        plan = make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="c")
        return {"pods": deployment(plan)["spec"]["template"], "generation": plan.generation.digest}

    assert list(parse(tier(engine={"args": args})).engine.args) == args
    assert rendered(*args) == rendered(*(each for each in args if each not in SAME))


@pytest.mark.parametrize(
    "args", [["--port=8001"], ["--port", "8000"], ["--host=127.0.0.1"], ["--no-enable-prefix-caching"]]
)
def test_any_other_value_of_it_is_refused(args: list[str]) -> None:
    with pytest.raises(SpecInvalid, match="is not yours to set here"):
        parse(tier(engine={"args": args}))
