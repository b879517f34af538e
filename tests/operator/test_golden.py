# SPDX-License-Identifier: Apache-2.0
"""Golden tiers and samples render to objects that Kubernetes knows; samples say when to use them and become ready."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from chart import ROOT, tools
from chart import render as render_chart
from definition import open_definition
from healthy_tier import LATER, NOON, READY, STARTING, VIEW, varied, with_engines
from live import TIERS, Client, running
from lupa.lua51 import LuaRuntime
from waiting import until

from kvtier_cli.output import as_yaml
from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names, status
from kvtier_operator.api import parse
from kvtier_operator.api.disk_spec import SHARED
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts import keys, pods, render
from kvtier_operator.plan import TierPlan, make_unchecked_plan

OPERATOR = Path(__file__).parents[2] / "docs" / "operator.yaml"
GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())
IMAGES = {"connector_image": "ghcr.io/kvtier/connector:golden", "janitor_image": "ghcr.io/kvtier/janitor:golden"}
VERSIONS = ("1.29", "1.37")
"""The oldest Kubernetes that is supported, and the newest that is known."""


@functools.cache
def planned(case: str) -> TierPlan:
    body = yaml.safe_load((GOLDEN / case / "tier.yaml").read_text())
    return make_unchecked_plan(parse(body), names.tier_ref(body), **IMAGES)


def rendered(case: str) -> tuple[dict[str, Any], ...]:
    return render(planned(case))


PODS = sorted(
    (case, manifest["metadata"]["labels"][names.LABEL_COMPONENT])
    for case in CASES
    for manifest in rendered(case)
    if manifest["kind"] == "Deployment"
)
WITH_JANITOR = [case for case, component in PODS if component == names.COMPONENT_JANITOR]
DEVICES_BY_CLAIM = {"pod-template"}
LESS_RESTRICTED = {
    "cpu-build": ["hostPath of the volume models"],
    "pod-template": ["capabilities.add of the container engine"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_tier_renders_to_its_golden_objects(case: str, request: pytest.FixtureRequest) -> None:
    text = as_yaml(rendered(case))
    expected = GOLDEN / case / "expected.yaml"
    if request.config.getoption("--update-golden"):
        expected.write_text(text)
    assert text == expected.read_text()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field_that_is_rendered(case: str, version: str) -> None:
    if case in DEVICES_BY_CLAIM and version == VERSIONS[0]:
        pytest.skip("dynamic resource allocation had other fields then")
    for manifest in rendered(case):
        if manifest["apiVersion"] != names.INFERENCE_POOL:
            kubernetes_schemas.validate(manifest, version)


@pytest.mark.parametrize("case", CASES)
def test_what_leaves_the_restricted_standard_is_said(case: str) -> None:
    template = parse(yaml.safe_load((GOLDEN / case / "tier.yaml").read_text())).engine.pod_template
    assert list(pods.objections(template)) == LESS_RESTRICTED.get(case, [])
    assert bool(pods.warning(template)) == (case in LESS_RESTRICTED)


@pytest.mark.parametrize(("case", "component"), PODS)
def test_every_mount_has_its_volume_and_every_selector_its_pods(case: str, component: str) -> None:
    found = deployment(case, component)["spec"]
    pod, selector = found["template"]["spec"], found["selector"]["matchLabels"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = (*pod.get("initContainers", ()), *pod["containers"])
    mounts = [mount for each in containers for mount in each.get("volumeMounts", ())]
    assert {mount["name"] for mount in mounts} <= volumes
    assert selector.items() <= found["template"]["metadata"]["labels"].items()
    service = next(each for each in rendered(case) if each["kind"] == "Service" and is_of(each, component))
    assert service["spec"]["selector"] == selector
    if component == "engine":
        budget = next(each for each in rendered(case) if each["kind"] == "PodDisruptionBudget")
        assert budget["spec"]["selector"]["matchLabels"] == selector


@pytest.mark.parametrize("case", WITH_JANITOR)
def test_the_janitor_may_touch_its_lease_and_nothing_else(case: str) -> None:
    role = next(each for each in rendered(case) if each["kind"] == "Role")
    binding = next(each for each in rendered(case) if each["kind"] == "RoleBinding")
    pod = deployment(case, "janitor")["spec"]["template"]["spec"]
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {"leases"}
    assert {name for rule in role["rules"] for name in rule["resourceNames"]} == {
        each["metadata"]["name"] for each in rendered(case) if each["kind"] == "Lease"
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [pod["serviceAccountName"]]
    operator = next(each for each in yaml.safe_load_all(OPERATOR.read_text()) if each["kind"] == "ClusterRole")
    held = next(rule for rule in operator["rules"] if rule["resources"] == ["leases"])
    # The API server lets nobody grant what they may not do themselves.
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} <= set(held["verbs"])


@pytest.mark.parametrize("case", CASES)
def test_lists_that_apply_merges_by_key_have_unique_keys(case: str) -> None:
    pod = deployment(case)["spec"]["template"]["spec"]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        for field, key in (("env", "name"), ("volumeMounts", "mountPath")):
            keys = [entry[key] for entry in container.get(field, ())]
            assert len(keys) == len(set(keys))


@pytest.mark.parametrize("case", CASES)
def test_only_children_that_are_looked_for_are_rendered(case: str) -> None:
    body = yaml.safe_load((GOLDEN / case / "tier.yaml").read_text())
    assert {names.key_of(manifest) for manifest in rendered(case)} <= set(keys(body, names.tier_ref(body)))


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_shared_between_two_renderings(case: str) -> None:
    first, second = rendered(case), rendered(case)
    assert first == second
    last = [each for each in first if each["kind"] == "Deployment"][-1]
    last["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["drop"].append("X")
    assert rendered(case) == second


def deployment(case: str, component: str = "engine") -> dict[str, Any]:
    return next(each for each in rendered(case) if each["kind"] == "Deployment" and is_of(each, component))


def is_of(manifest: dict[str, Any], component: str) -> bool:
    return bool(manifest["metadata"]["labels"][names.LABEL_COMPONENT] == component)


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
    assert render_chart(values)


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
    return health({"metadata": {"generation": generation}, "status": status.report(view, {}, now=NOON)})


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


def test_argo_cd_waits_for_a_tier_that_was_not_looked_at_since_its_spec_changed() -> None:
    assert judged(VIEW, generation=VIEW.generation + 1)[0] == "Progressing"
    for resource in ({}, {"status": {}}, {"status": {"observedGeneration": 1}}):
        assert health({"metadata": {"generation": 1, "creationTimestamp": LATER}, **resource})[0] == "Progressing"
