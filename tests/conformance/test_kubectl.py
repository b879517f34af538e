# SPDX-License-Identifier: Apache-2.0
"""The commands of kubectl that people use: what they send must be understood, what they get must be printable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from objects import GROUP, Json, Kubectl, claim, config_map, deployment, widget
from targets import Target

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

IMAGE = "--image=registry.k8s.io/pause:3.10"


@pytest.mark.parametrize(
    ("arguments", "created"), TABLES["create"], ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_kubectl_create(kubectl: Kubectl, target: Target, arguments: tuple[str, ...], created: str) -> None:
    if arguments[0] in ("cronjob", "pdb") and target.minor < 21:
        pytest.skip("its API is v1 since 1.21")
    assert kubectl("create", *arguments).strip() == f"{created} created"


def test_what_kubectl_creates_is_whole(kubectl: Kubectl) -> None:
    kubectl("create", "deployment", "d", IMAGE, "--replicas=0", "--port=8080", "--", "run", "it")
    spec = kubectl.json("get", "deployment", "d")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 0
    assert spec["strategy"]["type"] == "RollingUpdate"
    assert container["ports"] == [{"containerPort": 8080, "protocol": "TCP"}]
    assert container["command"] == ["run", "it"]
    kubectl("create", "service", "clusterip", "s", "--tcp=80:8080")
    (port,) = kubectl.json("get", "service", "s")["spec"]["ports"]
    assert port == {"name": "80-8080", "port": 80, "protocol": "TCP", "targetPort": 8080}
    kubectl("create", "secret", "generic", "g", "--from-literal=a=1")
    assert kubectl.json("get", "secret", "g")["data"] == {"a": "MQ=="}


@pytest.mark.parametrize("arguments", [("create",), ("apply",), ("apply", "--server-side")], ids=" ".join)
def test_a_list_of_objects_is_taken_apart(kubectl: Kubectl, arguments: tuple[str, ...]) -> None:
    document = {"apiVersion": "v1", "kind": "List", "items": [config_map("a"), config_map("b")]}
    kubectl(*arguments, "-f", "-", stdin=document)
    assert [item["metadata"]["name"] for item in kubectl.json("get", "configmap", "a", "b")["items"]] == ["a", "b"]


def test_a_dry_run_on_the_server_is_validated_and_not_stored(kubectl: Kubectl, widgets: str) -> None:
    created = kubectl("create", "--dry-run=server", "-f", "-", "-o", "json", stdin=widget())
    assert json.loads(created)["spec"]["mode"] == "Fast"
    assert "spec.size" in kubectl.fails("create", "--dry-run=server", "-f", "-", stdin=widget(size=99))
    assert "NotFound" in kubectl.fails("get", "widget", "a")


def test_a_diff_shows_what_an_apply_would_change(kubectl: Kubectl) -> None:
    kubectl("apply", "--server-side", "-f", "-", stdin=config_map(a="1"))
    assert kubectl.run("diff", "--server-side", "-f", "-", stdin=config_map(a="1")).returncode == 0
    changed = kubectl.run("diff", "--server-side", "-f", "-", stdin=config_map(a="2"))
    assert changed.returncode == 1
    assert '-  a: "1"\n+  a: "2"\n' in changed.stdout


@pytest.mark.parametrize(
    ("kind", "patch"),
    [("merge", {"spec": {"size": 3}}), ("json", [{"op": "replace", "path": "/spec/size", "value": 3}])],
)
def test_kubectl_patches_custom_resources(kubectl: Kubectl, widgets: str, kind: str, patch: Any) -> None:
    kubectl("create", "-f", "-", stdin=widget())
    assert "patched" in kubectl("patch", "widget", "a", f"--type={kind}", "-p", json.dumps(patch))
    assert kubectl.json("get", "widget", "a")["spec"]["size"] == 3
    assert "no change" in kubectl("patch", "widget", "a", f"--type={kind}", "-p", json.dumps(patch))


def test_kubectl_patches_built_in_kinds_strategically(kubectl: Kubectl) -> None:
    kubectl("create", "-f", "-", stdin=deployment(replicas=0))
    containers = [{"name": "side", "image": "registry.k8s.io/pause:3.9"}]
    kubectl(
        "patch", "deployment", "web", "-p", json.dumps({"spec": {"template": {"spec": {"containers": containers}}}})
    )
    found = kubectl.json("get", "deployment", "web")["spec"]["template"]["spec"]["containers"]
    assert {each["name"] for each in found} == {"main", "side"}


def test_the_columns_of_a_definition_are_printed_and_waited_for(kubectl: Kubectl, widgets: str) -> None:
    kubectl("create", "-f", "-", stdin=widget(size=3))
    assert "timed out" in kubectl.fails("wait", "--for=condition=Ready", "widget/a", "--timeout=1s")
    change = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    kubectl("patch", "widget", "a", "--subresource=status", "--type=merge", "-p", json.dumps(change))
    assert "condition met" in kubectl("wait", "--for=condition=Ready", "widget/a", "--timeout=240s")
    assert "condition met" in kubectl("wait", "--for=jsonpath={.spec.size}=3", "widget/a", "--timeout=240s")
    header, row = kubectl("get", "wdg").splitlines()
    assert header.split() == ["NAME", "SIZE", "READY", "AGE"]
    assert row.split()[:3] == ["a", "3", "True"]
    header, row = kubectl("get", "widgets", "-o", "wide").splitlines()
    assert header.split() == ["NAME", "SIZE", "READY", "MODE", "AGE"]
    assert row.split()[3] == "Fast"
    assert "deleted" in kubectl("delete", "widget", "a")
    kubectl("wait", "--for=delete", "widget/a", "--timeout=240s")


def test_a_category_shows_custom_resources_among_the_others(kubectl: Kubectl, widgets: str, tmp_path: Path) -> None:
    kubectl("create", "-f", "-", stdin=widget())
    kubectl("create", "-f", "-", stdin=deployment(replicas=0))
    shown = kubectl("get", "all", "-o", "name", f"--cache-dir={tmp_path}").split()
    assert {f"widget.{GROUP}/a", "deployment.apps/web"} <= set(shown)


@pytest.mark.parametrize(
    "manifest", [deployment(replicas=0), config_map(), claim()], ids=["deployment", "configmap", "claim"]
)
def test_built_in_kinds_have_columns(kubectl: Kubectl, target: Target, manifest: Json) -> None:
    kubectl("create", "-f", "-", stdin=manifest)
    columns = TABLES["columns"][manifest["kind"]].split()
    if target.minor < 29:
        columns = [column for column in columns if column != "VOLUMEATTRIBUTESCLASS"]
    assert kubectl("get", manifest["kind"], manifest["metadata"]["name"]).splitlines()[0].split() == columns


@pytest.mark.since(27)
def test_fields_are_explained(kubectl: Kubectl, widgets: str) -> None:
    explained = kubectl("explain", "widget.spec.size")
    assert "FIELD: size <integer>" in explained
    assert "How large it is." in explained
    assert "does not exist" in kubectl.fails("explain", "widget.spec.nothing")


def test_replacing_and_describing(kubectl: Kubectl, widgets: str) -> None:
    kubectl("create", "-f", "-", stdin=widget())
    found = kubectl.json("get", "widget", "a")
    found["spec"]["size"] = 5
    kubectl("replace", "-f", "-", stdin=found)
    described = kubectl("describe", "widget", "a")
    assert "Size:" in described
    assert "Events:" in described


def test_what_can_be_had_is_listed(kubectl: Kubectl, widgets: str) -> None:
    listed = kubectl("api-resources", f"--api-group={GROUP}", "-o", "wide")
    assert all(word in listed for word in ("widgets", "wdg", "Widget", "deletecollection"))
    assert "apps/v1" in kubectl("api-versions").split()
