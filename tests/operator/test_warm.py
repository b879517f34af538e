# SPDX-License-Identifier: Apache-2.0
"""The prompts of spec.warm: when they are sent, and what of it is kept and told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from healthy_tier import HEALTHY, READY, REF, VIEW, conditions
from tiers import tier

from kvtier_operator import names, status
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts import render, warm
from kvtier_operator.plan import TierPlan, make_unchecked_plan
from kvtier_operator.problems import State, Warming
from kvtier_operator.snapshot import Live, SeenJob, Snapshot

PROMPTS = {"configMap": {"name": "prompts"}}
DONE = {"prompts": 3, "warm": 3, "blocks": 12, "bytes": 12000, "missing": 0, "failed": 0, "problem": ""}


def spec_with(**given: Any) -> TierSpec:
    return parse(tier(warm={"prompts": PROMPTS, **given}))


def standing(spec: TierSpec, **engine: Any) -> Snapshot:
    """Return a cluster with what the operator made of a spec."""
    body = tier(engine=engine)
    objects = render(make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:7"))
    live = {names.key_of(each): Live(uid="u", resource_version="1", content=each) for each in objects}
    return replace(HEALTHY, live=live, tier=REF)


def plan_with(found: TierSpec, generation: str = "") -> TierPlan:
    """Return what becomes of a spec, of a generation of this name."""
    plan = make_unchecked_plan(found, REF, connector_image="connector:7")
    return replace(plan, generation=replace(plan.generation, digest=generation or plan.generation.digest))


def remembered(found: TierSpec, snapshot: Snapshot, generation: str, kept: dict[str, Any]) -> Warming | None:
    return warm.remembered(plan_with(found, generation), snapshot, kept, is_replaced=False)


def ended(key: str, code: int, document: dict[str, Any]) -> SeenJob:
    return SeenJob(key=key, uid="u", exit_code=code, message=json.dumps(document))


def view(found: Warming, spec: TierSpec) -> status.View:
    return replace(VIEW, spec=spec, warming=found)


def test_prompts_wait_for_an_engine_of_this_spec() -> None:
    spec = spec_with()
    snapshot = standing(spec)
    assert remembered(spec, snapshot, "g", {}) is None
    starting = replace(snapshot, engines=replace(READY, ready=0))
    found = remembered(spec, starting, "g", {})
    assert found is not None
    assert found.state is State.WAITING


def test_they_are_sent_once_for_each_generation_and_each_list() -> None:
    spec = spec_with()
    key = warm.key_of(spec, "g")
    kept = {"key": key, "blocks": 12}
    snapshot = standing(spec)
    found = remembered(spec, snapshot, "g", kept)
    assert found is not None
    assert found.state is State.PASSED
    assert remembered(spec, snapshot, "h", kept) is None
    assert remembered(spec_with(revision="2"), snapshot, "g", kept) is None
    assert remembered(spec, snapshot, "g", {**kept, "problem": "x"}) is None


def test_the_job_is_a_neighbour_of_the_engines_that_can_only_read() -> None:
    env = [{"name": "VLLM_API_KEY", "value": "k"}, {"name": "OTHER", "value": "o"}]
    spec = spec_with(concurrency=9)
    job = warm.job(plan_with(spec), standing(spec, env=env), "key", {})
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "connector:7"
    assert container["env"] == [{"name": "VLLM_API_KEY", "value": "k"}]
    assert "--concurrency=9" in container["args"]
    mounts = {each["name"]: each.get("readOnly", False) for each in container["volumeMounts"]}
    assert mounts == {"blocks": True, "config": True, "prompts": True, "scratch": False}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["automountServiceAccountToken"] is False
    assert {"name": "prompts", "configMap": {"name": "prompts"}} in pod["volumes"]


def test_prompts_may_lie_on_a_claim() -> None:
    spec = parse(tier(warm={"prompts": {"claim": {"name": "data", "path": "sets/a.jsonl.gz"}}}))
    job = warm.job(plan_with(spec), standing(spec), "key", {})
    pod = job["spec"]["template"]["spec"]
    assert {"name": "prompts", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}} in pod["volumes"]
    assert any(each.endswith("/sets/a.jsonl.gz") for each in pod["containers"][0]["args"])


def test_the_job_runs_where_engines_with_devices_do() -> None:
    spec = spec_with()
    own = {"key": "team", "operator": "Equal", "value": "llm"}
    snapshot = standing(spec, podTemplate={"nodeSelector": {"accelerator": "h100"}, "tolerations": [own]})
    pod = warm.job(plan_with(spec), snapshot, "key", {})["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"accelerator": "h100"}
    # Kubernetes adds the second one to pods that ask for the device, and to no other.
    assert pod["tolerations"] == [own, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    again = standing(spec, podTemplate={"tolerations": pod["tolerations"]})
    assert warm.job(plan_with(spec), again, "key", {})["spec"]["template"]["spec"]["tolerations"] == pod["tolerations"]


@pytest.mark.parametrize(
    ("is_on_one_node", "kind"),
    [
        (True, "requiredDuringSchedulingIgnoredDuringExecution"),
        (False, "preferredDuringSchedulingIgnoredDuringExecution"),
    ],
)
def test_a_volume_of_one_node_is_mounted_where_an_engine_runs(is_on_one_node: bool, kind: str) -> None:
    spec = spec_with()
    plan = replace(plan_with(spec), is_on_one_node=is_on_one_node)
    affinity = warm.job(plan, standing(spec), "key", {})["spec"]["template"]["spec"]["affinity"]
    assert list(affinity["podAffinity"]) == [kind]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 0}, "spec.replicas is 0"),
        ({"disk": {"mode": "ReadOnly"}}, "spec.disk.mode is ReadOnly"),
        ({"disk": {"mode": "Bypass"}}, "spec.disk.mode is Bypass"),
    ],
)
def test_nobody_waits_for_prompts_that_no_engine_can_write(given: dict[str, Any], said: str) -> None:
    spec = parse(tier(warm={"prompts": PROMPTS, "required": True}, **given))
    found = remembered(spec, standing(spec), "g", {})
    assert found is not None
    before = {"warm": {"key": "another", "blocks": 12}}
    told = conditions(view(found, spec), before)
    assert (told["Warm"]["status"], told["Warm"]["reason"]) == ("Unknown", "PromptsHeld")
    assert said in told["Warm"]["message"]
    assert told["Ready"]["reason"] not in {"PromptsHeld", "PromptsPending"}
    assert status.report(view(found, spec), before, now="2026-01-01T12:00:00Z")["warm"] == before["warm"]
    # What is warm stays so.
    kept = {"key": warm.key_of(spec, "g"), "blocks": 12}
    passed = remembered(spec, standing(spec), "g", kept)
    assert passed is not None
    assert passed.state is State.PASSED


def test_prompts_that_wait_are_not_said_to_be_sent() -> None:
    spec = spec_with(required=True)
    found = remembered(spec, replace(standing(spec), engines=replace(READY, ready=0)), "g", {})
    assert found is not None
    told = conditions(view(found, spec))["Warm"]
    assert told["message"] == "the prompts of spec.warm are not sent yet: no engine of this spec serves yet"
    assert told["reason"] == "PromptsPending"


@pytest.mark.parametrize("prompts", [{}, {"configMap": {"name": "a"}, "claim": {"name": "b"}}])
def test_exactly_one_place_is_named(prompts: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalid, match="exactly one of configMap and claim"):
        parse(tier(warm={"prompts": prompts}))


def test_what_a_job_has_shown_is_kept_and_told() -> None:
    spec = spec_with(required=True)
    found = warm.outcome("k", {}, ended("k", 0, DONE))
    report = status.report(view(found, spec), {}, now="2026-01-01T12:00:00Z")
    assert report["warm"] == {"key": "k", "prompts": 3, "warm": 3, "blocks": 12, "bytes": 12000, "missing": 0}
    told = conditions(view(found, spec))["Warm"]
    assert (told["status"], told["reason"]) == ("True", "PromptsWarm")
    # An operator that has just begun knows it from the status.
    later = conditions(view(Warming(state=State.PASSED, key="k"), spec), report)["Warm"]
    assert later["message"] == told["message"]


@pytest.mark.parametrize(("is_required", "ready"), [(True, "PromptsFailed"), (False, "Ready")])
def test_ready_waits_where_it_is_to(is_required: bool, ready: str) -> None:
    spec = spec_with(required=is_required)
    failed = warm.outcome("k", {}, ended("k", 1, {**DONE, "missing": 2, "problem": "line 4: 2 blocks did not come"}))
    found = conditions(view(failed, spec))
    assert found["Warm"]["status"] == "False"
    assert "line 4" in found["Warm"]["message"]
    assert found["Ready"]["reason"] == ready
    pending = conditions(view(Warming(state=State.RUNNING, key="k"), spec))
    assert pending["Warm"]["status"] == ("False" if is_required else "Unknown")
    assert pending["Ready"]["reason"] == ("PromptsPending" if is_required else "Ready")


def test_last_words_that_are_no_result_are_not_repeated() -> None:
    found = warm.outcome("k", {}, SeenJob(key="k", uid="u", exit_code=137, message="a prompt, perhaps"))
    assert found.detail == "it ended with exit code 137"
