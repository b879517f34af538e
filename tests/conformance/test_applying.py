# SPDX-License-Identifier: Apache-2.0
"""Server-side apply: who owns what, who is in whose way, and what goes when nobody wants it any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from objects import Http, Kubectl, config_map, deployment, widget

Apply = Callable[..., tuple[int, Any]]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@pytest.fixture
def apply(http: Http) -> Apply:
    def send(path: str, manifest: dict[str, Any], manager: str = "one", **query: str) -> tuple[int, Any]:
        url = f"{path}/{manifest['metadata']['name']}"
        return http("PATCH", url, manifest, media_type=APPLY, fieldManager=manager, **query)

    return send


def managers(manifest: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["manager"], each["operation"]): each for each in manifest["metadata"]["managedFields"]}


def test_applying_creates_then_changes_and_drops_what_is_applied_no_more(
    apply: Apply, http: Http, widgets: str
) -> None:
    code, refused = http("PATCH", f"{widgets}/a", widget(), media_type=APPLY)
    assert (code, refused["reason"]) == (422, "Invalid"), "it needs a field manager"
    assert apply(widgets, widget(note="x", arguments=["a"], mode="Slow"))[0] == 201
    code, changed = apply(widgets, widget(size=2))
    # A default comes back when its field is given up.
    assert (code, changed["spec"]) == (200, {"size": 2, "replicas": 1, "mode": "Fast"})
    entry = managers(changed)["one", "Apply"]
    assert entry["fieldsType"] == "FieldsV1"
    assert entry["fieldsV1"] == {"f:spec": {"f:size": {}}}
    _, same = apply(widgets, widget(size=2))
    assert same["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"]


def test_a_field_of_another_manager_is_a_conflict_that_names_it(apply: Apply, widgets: str) -> None:
    apply(widgets, widget())
    code, refused = apply(widgets, widget(size=2), manager="two")
    assert (code, refused["reason"]) == (409, "Conflict")
    cause = refused["details"]["causes"][0]
    assert cause["reason"] == "FieldManagerConflict"
    assert cause["field"] == ".spec.size"
    assert 'conflict with "one"' in cause["message"]


def test_force_takes_a_field_over(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(note="x"))
    code, taken = apply(widgets, widget(size=2), manager="two", force="true")
    assert (code, taken["spec"]["size"]) == (200, 2)
    assert managers(taken)["one", "Apply"]["fieldsV1"] == {"f:spec": {"f:note": {}}}


def test_the_same_value_of_two_managers_is_shared(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(note="x"))
    apply(widgets, widget(note="x"), manager="two")
    _, kept = apply(widgets, widget(), manager="two")
    assert kept["spec"]["note"] == "x"
    _, gone = apply(widgets, widget())
    assert "note" not in gone["spec"]


def test_what_an_update_wrote_belongs_to_the_updater(apply: Apply, http: Http, widgets: str) -> None:
    apply(widgets, widget(note="x"))
    _, changed = http("PATCH", f"{widgets}/a", {"spec": {"note": "y"}}, media_type=MERGE, fieldManager="hand")
    assert managers(changed)["hand", "Update"]["fieldsV1"] == {"f:spec": {"f:note": {}}}
    assert "f:note" not in managers(changed)["one", "Apply"]["fieldsV1"]["f:spec"]
    assert apply(widgets, widget(note="x"))[0] == 409


def test_items_of_a_list_map_belong_to_who_applied_them(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(ports=[{"name": "a", "port": 1}]))
    _, both = apply(widgets, widget(ports=[{"name": "b", "port": 2}]), manager="two")
    assert [port["name"] for port in both["spec"]["ports"]] == ["a", "b"]
    _, left = apply(widgets, widget())
    assert left["spec"]["ports"] == [{"name": "b", "port": 2}]


def test_the_fields_of_one_item_of_a_list_map_have_owners_of_their_own(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(ports=[{"name": "a", "port": 1}]))
    _, both = apply(widgets, widget(ports=[{"name": "a", "path": "/x"}]), manager="two")
    assert both["spec"]["ports"] == [{"name": "a", "port": 1, "path": "/x"}]
    keys = managers(both)["two", "Apply"]["fieldsV1"]["f:spec"]["f:ports"]
    assert keys == {'k:{"name":"a"}': {".": {}, "f:name": {}, "f:path": {}}}


def test_a_set_unites_what_its_appliers_want(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(tags=["a", "b"]))
    _, both = apply(widgets, widget(tags=["b", "c"]), manager="two")
    assert sorted(both["spec"]["tags"]) == ["a", "b", "c"]
    _, left = apply(widgets, widget())
    assert sorted(left["spec"]["tags"]) == ["b", "c"]


@pytest.mark.parametrize(
    ("field", "before", "after"), [("arguments", ["a"], ["a", "b"]), ("whole", {"a": "1"}, {"a": "1", "b": "2"})]
)
def test_what_is_atomic_is_owned_as_a_whole(apply: Apply, widgets: str, field: str, before: Any, after: Any) -> None:
    apply(widgets, widget(**{field: before}))
    assert apply(widgets, widget(**{field: after}), manager="two")[0] == 409
    assert apply(widgets, widget(**{field: after}), manager="two", force="true")[1]["spec"][field] == after


def test_the_status_has_appliers_of_its_own(apply: Apply, http: Http, widgets: str) -> None:
    apply(widgets, widget())
    manifest = {**widget(), "status": {"replicas": 3}}
    del manifest["spec"]
    code, shown = http("PATCH", f"{widgets}/a/status", manifest, media_type=APPLY, fieldManager="controller")
    assert (code, shown["status"]) == (200, {"replicas": 3})
    entry = managers(shown)["controller", "Apply"]
    assert entry["subresource"] == "status"
    assert entry["fieldsV1"] == {"f:status": {"f:replicas": {}}}


def test_a_container_is_merged_by_its_name(apply: Apply, apps: str) -> None:
    apply(apps + "/deployments", deployment())
    container = {"name": "main", "env": [{"name": "A", "value": "1"}]}
    part = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    code, merged = apply(apps + "/deployments", part, manager="two")
    assert code == 200, merged
    assert len(merged["spec"]["template"]["spec"]["containers"]) == 1
    assert merged["spec"]["template"]["spec"]["containers"][0]["image"].startswith("registry")


def test_kubectl_apply_from_the_client_takes_back_what_is_left_out(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", stdin=config_map(a="1", b="2"))
    assert "configured" in kubectl("apply", "-f", "-", stdin=config_map(a="1"))
    assert kubectl.json("get", "configmap", "c")["data"] == {"a": "1"}
    assert "unchanged" in kubectl("apply", "-f", "-", stdin=config_map(a="1"))
