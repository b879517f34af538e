# SPDX-License-Identifier: Apache-2.0
"""Every sample is what the API takes, becomes ready, says when to use it; Argo CD tells how a tier stands."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from chart import ROOT, render, tools
from definition import open_definition
from healthy_tier import LATER, NOON, READY, STARTING, VIEW, varied, with_engines
from live import TIERS, Client, running
from lupa.lua51 import LuaRuntime
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import status
from kvtier_operator.api import parse
from kvtier_operator.api.disk_spec import SHARED
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import SpecInvalid

FOLDER = ROOT / "crds" / "samples"
OTHERS = FOLDER / "others"
"""Samples with kinds that a cluster need not know."""
SAMPLES = sorted(FOLDER.rglob("*.yaml"))
REFERRING = {"full"}
"""Names Secrets, claims and adapters that somebody else makes, so its tier never becomes ready by itself."""
KUBECTL = tools.binary("kubectl")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def tiers(path: Path) -> list[dict[str, Any]]:
    return [each for each in documents(path) if each["kind"] == "KVCacheTier"]


def apply(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # The namespace of the sample, if it names one, is made by whoever applies it.
    command = [KUBECTL, "apply", "--server-side", "--validate=strict", *options, f"--filename={path}"]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_samples_say_when_to_use_them_and_can_be_tried_one_after_the_other(api: ApiServerThread) -> None:
    del api
    assert [path.stem for path in SAMPLES if not path.read_text().startswith("# ")] == []
    found = [each["metadata"] for path in SAMPLES for each in tiers(path)]
    assert len({(each["name"], each.get("namespace")) for each in found}) == len(found)
    shared = parse(tiers(ROOT / "crds/samples/shared.yaml")[0])
    assert (shared.replicas, SHARED in shared.volume.claim.access_modes) == (2, True)
    done = apply(FOLDER)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("controllers", "api")
@pytest.mark.parametrize(
    "path", [each for each in sorted(FOLDER.glob("*.yaml")) if each.stem not in REFERRING], ids=lambda path: path.stem
)
def test_kubectl_applies_a_sample_and_it_becomes_ready(path: Path, kubectl: Client) -> None:
    (sample,) = tiers(path)
    with running():
        done = apply(path)
        assert done.returncode == 0, done.stderr
        until(lambda: kubectl.is_ready(sample["metadata"]["name"]))
        assert kubectl.get(TIERS, "kvcachetiers", sample["metadata"]["name"]) is not None


@pytest.mark.parametrize("name", ["argocd", "flux"])
def test_a_gitops_sample_is_applied_and_installs_a_chart_that_is_there_with_values_that_it_knows(
    name: str, api: ApiServerThread
) -> None:
    path = OTHERS / f"{name}.yaml"
    found = documents(path)
    for namespace in {each["metadata"]["namespace"] for each in found}:
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    for group_version, kind in {(each["apiVersion"], each["kind"]) for each in found}:
        group, _, version = group_version.partition("/")
        api.create(open_definition(group, kind, version))
    until(lambda: apply(path).returncode == 0)
    charts = [
        (each["spec"]["source"]["path"], each["spec"]["source"]["helm"]["valuesObject"])
        for each in found
        if "helm" in each["spec"].get("source", {})
    ] + [
        (each["spec"]["chart"]["spec"]["chart"], each["spec"]["values"])
        for each in found
        if each["kind"] == "HelmRelease"
    ]
    ((chart, values),) = charts
    assert (ROOT / chart / "Chart.yaml").exists()
    assert render(values)


@pytest.mark.parametrize("path", [FOLDER / "hpa.yaml", OTHERS / "keda.yaml"], ids=lambda path: path.stem)
def test_an_autoscaler_scales_the_tier_of_its_sample(path: Path) -> None:
    (tier,) = tiers(path)
    parse(tier)
    (scaler,) = (each for each in documents(path) if each["kind"] != "KVCacheTier")
    target = scaler["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": tier["apiVersion"], "kind": tier["kind"], "name": tier["metadata"]["name"]}
    if path.stem == "hpa":
        kubernetes_schemas.validate(scaler, "1.37")
    assert "num_requests_waiting" in str(scaler)
    assert "kv_cache_usage_perc" in str(scaler)


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
