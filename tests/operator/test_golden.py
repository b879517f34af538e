# SPDX-License-Identifier: Apache-2.0
"""The objects of each kind of tier, whole, as a reviewer reads them.

A folder of golden/ is a case: the first line of its tier.yaml says why it exists. ``pytest --update-golden`` rewrites
expected.yaml; the diff of that file is what a reviewer judges.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml

from kvtier_cli.output import as_yaml
from kvtier_operator import names
from kvtier_operator.api import parse
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
    manifests = yaml.safe_load_all(OPERATOR.read_text())
    operator = next(each for each in manifests if each["kind"] == "ClusterRole")
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
