# SPDX-License-Identifier: Apache-2.0
"""What every object has in common: versions, subresources, dry runs, refusals, and who owns what is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from objects import Http, Json, Kubectl, claim, config_map, deployment, pod, refusal, widget

MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def test_a_new_object_has_an_identity_and_a_name_can_be_generated(http: Http, core: str) -> None:
    code, made = http("POST", f"{core}/configmaps", config_map())
    assert code == 201
    assert {"uid", "resourceVersion", "creationTimestamp"} <= made["metadata"].keys()
    assert http("POST", f"{core}/configmaps", config_map())[1]["reason"] == "AlreadyExists"
    _, made = http("POST", f"{core}/configmaps", {"metadata": {"generateName": "made-"}})
    assert made["metadata"]["name"].startswith("made-")
    assert len(made["metadata"]["name"]) == len("made-") + 5


def test_a_write_that_changes_nothing_leaves_the_version_and_a_late_one_is_refused(http: Http, core: str) -> None:
    _, made = http("POST", f"{core}/configmaps", config_map(a="1"))
    _, same = http("PATCH", f"{core}/configmaps/c", {"data": {"a": "1"}}, media_type=MERGE)
    assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    http("PATCH", f"{core}/configmaps/c", {"data": {"a": "2"}}, media_type=MERGE)
    refused = refusal(http("PUT", f"{core}/configmaps/c", {**made, "data": {"a": "3"}}), 409, "Conflict")
    assert "the object has been modified; please apply your changes to the latest version" in refused["message"]


def test_the_generation_counts_changes_of_the_spec_only(http: Http, widgets: str) -> None:
    _, made = http("POST", widgets, widget())
    assert made["metadata"]["generation"] == 1
    changes = (
        ("", {"metadata": {"labels": {"a": "b"}}}, 1),
        ("/status", {"status": {"replicas": 1}}, 1),
        ("", {"spec": {"size": 2}}, 2),
        ("", {"spec": {"size": 2}}, 2),
        ("", {"metadata": {"finalizers": ["a.example/b"]}}, 2),
    )
    for suffix, change, generation in changes:
        _, changed = http("PATCH", f"{widgets}/a{suffix}", change, media_type=MERGE)
        assert changed["metadata"]["generation"] == generation, change
    _, marked = http("DELETE", f"{widgets}/a")
    assert marked["metadata"]["generation"] == 3
    http("PATCH", f"{widgets}/a", {"metadata": {"finalizers": None}}, media_type=MERGE)


def test_the_status_is_written_through_its_own_path_only(http: Http, widgets: str) -> None:
    _, made = http("POST", widgets, {**widget(), "status": {"replicas": 9}})
    assert "status" not in made
    _, changed = http("PATCH", f"{widgets}/a", {"status": {"replicas": 9}, "spec": {"size": 2}}, media_type=MERGE)
    assert "status" not in changed
    change = {"status": {"replicas": 4}, "spec": {"size": 5}}
    _, reported = http("PATCH", f"{widgets}/a/status", change, media_type=MERGE)
    assert (reported["status"], reported["spec"]["size"]) == ({"replicas": 4}, 2)


def test_a_scale_shows_and_sets_the_replicas(http: Http, widgets: str) -> None:
    http("POST", widgets, widget())
    http("PATCH", f"{widgets}/a/status", {"status": {"replicas": 1, "selector": "a=b"}}, media_type=MERGE)
    _, scale = http("GET", f"{widgets}/a/scale")
    assert (scale["kind"], scale["apiVersion"], scale["spec"]) == ("Scale", "autoscaling/v1", {"replicas": 1})
    assert scale["status"] == {"replicas": 1, "selector": "a=b"}
    code, scaled = http("PUT", f"{widgets}/a/scale", {**scale, "spec": {"replicas": 3}})
    assert (code, scaled["spec"]["replicas"]) == (200, 3)
    code, scaled = http("PATCH", f"{widgets}/a/scale", {"spec": {"replicas": 0}}, media_type=MERGE)
    assert code == 200
    _, found = http("GET", f"{widgets}/a")
    assert (found["spec"]["replicas"], found["metadata"]["generation"]) == (0, 3)


GRACE: Json = {"terminationGracePeriodSeconds": 5}
WITH_ENV: Json = {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}], **GRACE}


@pytest.mark.parametrize(
    ("media_type", "patch"),
    [
        (MERGE, {"spec": {"template": {"spec": GRACE}}}),
        (JSON_PATCH, [{"op": "replace", "path": "/spec/template/spec/terminationGracePeriodSeconds", "value": 5}]),
        (STRATEGIC, {"spec": {"template": {"spec": WITH_ENV}}}),
    ],
    ids=["merge", "json", "strategic"],
)
def test_patches_of_three_kinds(http: Http, apps: str, media_type: str, patch: Any) -> None:
    http("POST", f"{apps}/deployments", deployment(replicas=0))
    code, patched = http("PATCH", f"{apps}/deployments/web", patch, media_type=media_type)
    assert code == 200, patched
    template = patched["spec"]["template"]["spec"]
    assert template["terminationGracePeriodSeconds"] == 5
    assert template["containers"][0]["image"].startswith("registry")


def test_a_json_patch_whose_test_fails_changes_nothing(http: Http, core: str) -> None:
    http("POST", f"{core}/configmaps", config_map(a="1"))
    patch = [{"op": "test", "path": "/data/a", "value": "2"}, {"op": "remove", "path": "/data/a"}]
    assert http("PATCH", f"{core}/configmaps/c", patch, media_type=JSON_PATCH)[0] == 422
    assert http("GET", f"{core}/configmaps/c")[1]["data"] == {"a": "1"}


def test_custom_resources_take_no_strategic_patches(http: Http, widgets: str) -> None:
    http("POST", widgets, widget())
    refusal(http("PATCH", f"{widgets}/a", {"spec": {"size": 2}}, media_type=STRATEGIC), 415, "UnsupportedMediaType")


def test_a_dry_run_answers_and_stores_nothing(http: Http, core: str) -> None:
    code, shown = http("POST", f"{core}/configmaps", config_map(), dryRun="All")
    assert code == 201
    assert shown["metadata"]["name"] == "c"
    assert http("GET", f"{core}/configmaps/c")[0] == 404
    http("POST", f"{core}/configmaps", config_map(a="1"))
    _, shown = http("PATCH", f"{core}/configmaps/c", {"data": {"a": "2"}}, media_type=MERGE, dryRun="All")
    assert shown["data"] == {"a": "2"}
    assert http("DELETE", f"{core}/configmaps/c", dryRun="All")[0] == 200
    assert http("GET", f"{core}/configmaps/c")[1]["data"] == {"a": "1"}


@pytest.mark.since(25)
def test_unknown_fields_are_refused_warned_of_or_dropped_as_asked(http: Http, core: str, kubectl: Kubectl) -> None:
    wrong = {**config_map("wrong"), "dta": {"a": "1"}}
    code, refused = http("POST", f"{core}/configmaps", wrong, fieldValidation="Strict")
    assert code == 400
    assert 'unknown field "dta"' in refused["message"]
    assert http("POST", f"{core}/configmaps", wrong, fieldValidation="Ignore")[0] == 201
    assert 'unknown field "dta"' in kubectl.fails("create", "-f", "-", stdin={**wrong, "metadata": {"name": "w2"}})


@pytest.mark.parametrize(
    ("manifest", "kind", "change"),
    [
        (deployment(replicas=0), "deployments", {"spec": {"selector": {"matchLabels": {"app": "other"}}}}),
        (claim(), "persistentvolumeclaims", {"spec": {"accessModes": ["ReadWriteMany"]}}),
        (pod(nodeSelector={"no": "such"}), "pods", {"spec": {"restartPolicy": "Never"}}),
        ({**config_map(a="1"), "immutable": True}, "configmaps", {"data": {"a": "2"}}),
    ],
    ids=["selector", "claim", "pod", "immutable"],
)
def test_what_is_immutable_stays(http: Http, core: str, apps: str, manifest: Json, kind: str, change: Json) -> None:
    path = f"{apps if kind == 'deployments' else core}/{kind}"
    code, made = http("POST", path, manifest)
    assert code == 201, made
    refusal(http("PATCH", f"{path}/{made['metadata']['name']}", change, media_type=MERGE))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"spec": {"selector": {"matchLabels": {"app": "other"}}}}, "spec.template.metadata.labels"),
        ({"spec": {"template": {"spec": {"containers": []}}}}, "spec.template.spec.containers"),
        ({"metadata": {"name": "No"}}, "metadata.name"),
        ({"metadata": {"labels": {"a": "not a label"}}}, "metadata.labels"),
    ],
)
def test_a_refusal_names_the_field(http: Http, apps: str, change: Json, field: str) -> None:
    def merged(into: Json, what: Json) -> Json:
        return {**into, **{k: merged(into.get(k, {}), v) if isinstance(v, dict) else v for k, v in what.items()}}

    refused = refusal(http("POST", f"{apps}/deployments", merged(deployment(replicas=0), change)))
    assert field in [cause["field"] for cause in refused["details"]["causes"]]


def test_events_can_be_written_and_found_by_what_they_are_about(http: Http, core: str, kubectl: Kubectl) -> None:
    event = {
        "metadata": {"name": "e", "namespace": kubectl.namespace},
        "involvedObject": {"kind": "Widget", "name": "a", "namespace": kubectl.namespace, "uid": "u"},
        "reason": "Tested",
        "message": "it was",
        "type": "Normal",
        "firstTimestamp": "2026-01-01T00:00:00Z",
        "lastTimestamp": "2026-01-01T00:00:00Z",
        "count": 1,
    }
    code, made = http("POST", f"{core}/events", event)
    assert code == 201, made
    _, found = http("GET", f"{core}/events", fieldSelector="involvedObject.name=a,reason=Tested")
    assert [item["metadata"]["name"] for item in found["items"]] == ["e"]
    assert http("GET", f"{core}/events", fieldSelector="involvedObject.name=b")[1]["items"] == []
    assert "Tested" in kubectl("get", "events")


def test_what_does_not_exist_is_said_by_name(http: Http, core: str, kubectl: Kubectl) -> None:
    assert refusal(http("GET", f"{core}/configmaps/none"), 404, "NotFound")["message"] == 'configmaps "none" not found'
    assert "Error from server (NotFound)" in kubectl.fails("get", "configmap", "none")


Apply = Callable[..., tuple[int, Any]]

APPLY = "application/apply-patch+yaml"


@pytest.fixture
def apply(http: Http) -> Apply:
    def send(path: str, manifest: dict[str, Any], manager: str = "one", **query: str) -> tuple[int, Any]:
        url = f"{path}/{manifest['metadata']['name']}"
        return http("PATCH", url, manifest, media_type=APPLY, fieldManager=manager, **query)

    return send


def managers(manifest: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["manager"], each["operation"]): each for each in manifest["metadata"]["managedFields"]}


def test_applying_creates_changes_and_drops_what_is_applied_no_more(apply: Apply, http: Http, widgets: str) -> None:
    refusal(http("PATCH", f"{widgets}/a", widget(), media_type=APPLY))  # it needs a field manager
    assert apply(widgets, widget(note="x", arguments=["a"], mode="Slow"))[0] == 201
    code, changed = apply(widgets, widget(size=2))
    # A default comes back when its field is given up.
    assert (code, changed["spec"]) == (200, {"size": 2, "replicas": 1, "mode": "Fast"})
    entry = managers(changed)["one", "Apply"]
    assert entry["fieldsType"] == "FieldsV1"
    assert entry["fieldsV1"] == {"f:spec": {"f:size": {}}}
    _, same = apply(widgets, widget(size=2))
    assert same["metadata"]["resourceVersion"] == changed["metadata"]["resourceVersion"]


def test_a_field_of_another_manager_is_a_conflict_that_names_it_unless_forced(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(note="x"))
    cause = refusal(apply(widgets, widget(size=2), manager="two"), 409, "Conflict")["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldManagerConflict", ".spec.size")
    assert 'conflict with "one"' in cause["message"]
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


def test_items_of_a_list_map_and_of_a_set_belong_to_who_applied_them(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(ports=[{"name": "a", "port": 1}], tags=["a", "b"]))
    _, both = apply(widgets, widget(ports=[{"name": "b", "port": 2}], tags=["b", "c"]), manager="two")
    assert [port["name"] for port in both["spec"]["ports"]] == ["a", "b"]
    assert sorted(both["spec"]["tags"]) == ["a", "b", "c"]
    _, left = apply(widgets, widget())
    assert (left["spec"]["ports"], sorted(left["spec"]["tags"])) == ([{"name": "b", "port": 2}], ["b", "c"])


def test_the_fields_of_one_item_of_a_list_map_have_owners_of_their_own(apply: Apply, widgets: str) -> None:
    apply(widgets, widget(ports=[{"name": "a", "port": 1}]))
    _, both = apply(widgets, widget(ports=[{"name": "a", "path": "/x"}]), manager="two")
    assert both["spec"]["ports"] == [{"name": "a", "port": 1, "path": "/x"}]
    keys = managers(both)["two", "Apply"]["fieldsV1"]["f:spec"]["f:ports"]
    assert keys == {'k:{"name":"a"}': {".": {}, "f:name": {}, "f:path": {}}}


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
    part = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {"template": {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}}},
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
