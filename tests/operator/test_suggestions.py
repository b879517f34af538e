# SPDX-License-Identifier: Apache-2.0
"""Words of other products, of another level and with a typo: what was meant is named; what is harmless is taken."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiers import tier

from kvtier_operator import names
from kvtier_operator.api import parse, suggestions
from kvtier_operator.api.parse import problems
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts.engine import deployment
from kvtier_operator.plan import make_unchecked_plan


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("spec.modelName", "spec.model.name"),
        ("spec.storageUri", "spec.model.name, with the weights on a volume of spec.engine.podTemplate"),
        ("spec.model.uri", "spec.model.name, with the weights on a volume of spec.engine.podTemplate"),
        ("spec.model.id", "spec.model.name"),
        ("spec.engine.tensorParallelSize", "spec.engine.tensorParallel"),
        ("spec.tensor_parallel_size", "spec.engine.tensorParallel"),
        ("spec.nodeSelector", "spec.engine.podTemplate.nodeSelector"),
        ("spec.engine.tolerations", "spec.engine.podTemplate.tolerations"),
        ("spec.image", "spec.engine.image"),
        ("spec.max_local_cpu_size", "spec.cpu.size"),
        ("spec.disk.ttl", "spec.disk.budget.ttl"),
        ("spec.maxBytes", "spec.disk.budget.maxBytes"),
        ("spec.volume.claim.storageClass", "spec.volume.claim.storageClassName"),
        ("spec.enigne", "spec.engine"),
        ("spec.model.revison", "spec.model.revision"),
        ("spec.kvTransferConfig", "spec.cpu and spec.volume, from which the operator renders it"),
    ],
)
def test_what_was_meant_is_named(path: str, meant: str) -> None:
    assert suggestions.hint(path) == f"did you mean {meant}?"


def test_every_field_that_is_named_is_there() -> None:
    there = suggestions._fields()
    for meant in suggestions._KNOWN.values():
        for path in re.findall(r"spec\.[A-Za-z.]+[A-Za-z]", meant):
            assert path in there, path


def test_a_flag_of_vllm_is_told_where_it_goes() -> None:
    for path in ("spec.maxModelLen", "spec.engine.max_model_len"):
        assert suggestions.hint(path) == "it is a flag of vLLM, which goes into spec.engine.args as --max-model-len"
    assert suggestions.hint("spec.zzz") == ""


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
