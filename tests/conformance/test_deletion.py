# SPDX-License-Identifier: Apache-2.0
"""What holds a deletion up, and what goes along with it."""

from __future__ import annotations

from typing import Any

import pytest
from objects import Http, Json, Until, claim, config_map, pod, widget

MERGE = "application/merge-patch+json"


def owned(owner: Json, name: str = "child", *, is_blocking: bool = True, **metadata: Any) -> Json:
    reference = {field: owner["metadata"][field] for field in ("name", "uid")}
    reference |= {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "blockOwnerDeletion": is_blocking}
    manifest = config_map(name)
    return {**manifest, "metadata": {"name": name, "ownerReferences": [{**reference, "controller": True}], **metadata}}


def test_an_object_goes_when_its_last_finalizer_does(http: Http, core: str) -> None:
    manifest = {**config_map(), "metadata": {"name": "c", "finalizers": ["a.example/x", "a.example/y"]}}
    http("POST", f"{core}/configmaps", manifest)
    code, marked = http("DELETE", f"{core}/configmaps/c")
    assert code == 200
    assert marked["metadata"]["deletionTimestamp"]
    change = {"metadata": {"finalizers": ["a.example/y"]}}
    assert http("PATCH", f"{core}/configmaps/c", change, media_type=MERGE)[0] == 200
    assert http("GET", f"{core}/configmaps/c")[0] == 200
    http("PATCH", f"{core}/configmaps/c", {"metadata": {"finalizers": None}}, media_type=MERGE)
    assert http("GET", f"{core}/configmaps/c")[0] == 404


def test_an_object_that_is_going_takes_no_new_finalizer(http: Http, core: str) -> None:
    manifest = {**config_map(), "metadata": {"name": "c", "finalizers": ["a.example/x"]}}
    http("POST", f"{core}/configmaps", manifest)
    http("DELETE", f"{core}/configmaps/c")
    change = {"metadata": {"finalizers": ["a.example/x", "a.example/z"]}}
    code, refused = http("PATCH", f"{core}/configmaps/c", change, media_type=MERGE)
    assert (code, refused["reason"]) == (422, "Invalid")
    assert "no new finalizers can be added if the object is being deleted" in refused["message"]
    http("PATCH", f"{core}/configmaps/c", {"metadata": {"finalizers": None}}, media_type=MERGE)


def test_a_deletion_can_be_meant_for_one_object_only(http: Http, core: str) -> None:
    _, made = http("POST", f"{core}/configmaps", config_map())
    for preconditions in ({"uid": "other"}, {"resourceVersion": "1"}):
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        code, refused = http("DELETE", f"{core}/configmaps/c", options)
        assert (code, refused["reason"]) == (409, "Conflict")
    options["preconditions"] = {"uid": made["metadata"]["uid"]}
    assert http("DELETE", f"{core}/configmaps/c", options)[0] == 200


def test_a_selection_can_be_deleted_at_once(http: Http, core: str) -> None:
    for name, label in (("a", "x"), ("b", "x"), ("c", "y")):
        http("POST", f"{core}/secrets", {"metadata": {"name": name, "labels": {"l": label}}})
    assert http("DELETE", f"{core}/secrets", labelSelector="l=x")[0] == 200
    left = http("GET", f"{core}/secrets", labelSelector="l")[1]["items"]
    assert [item["metadata"]["name"] for item in left] == ["c"]


@pytest.mark.needs("controllers")
def test_in_the_background_the_owner_goes_first(http: Http, core: str, until: Until) -> None:
    _, owner = http("POST", f"{core}/configmaps", config_map("owner"))
    http("POST", f"{core}/configmaps", owned(owner, finalizers=["a.example/x"]))
    http("DELETE", f"{core}/configmaps/owner", propagationPolicy="Background")
    assert http("GET", f"{core}/configmaps/owner")[0] == 404
    until(lambda: http("GET", f"{core}/configmaps/child")[1]["metadata"].get("deletionTimestamp"))
    http("PATCH", f"{core}/configmaps/child", {"metadata": {"finalizers": None}}, media_type=MERGE)
    until(lambda: http("GET", f"{core}/configmaps/child")[0] == 404)


@pytest.mark.needs("controllers")
def test_orphans_stay_and_forget_their_owner(http: Http, core: str, until: Until) -> None:
    _, owner = http("POST", f"{core}/configmaps", config_map("owner"))
    http("POST", f"{core}/configmaps", owned(owner))
    http("DELETE", f"{core}/configmaps/owner", propagationPolicy="Orphan")
    until(lambda: http("GET", f"{core}/configmaps/owner")[0] == 404)
    code, child = http("GET", f"{core}/configmaps/child")
    assert code == 200
    assert "ownerReferences" not in child["metadata"]


@pytest.mark.needs("controllers")
def test_what_an_owner_leaves_that_went_or_never_was_goes(http: Http, core: str, widgets: str, until: Until) -> None:
    ghost = {**config_map("owner"), "metadata": {"name": "owner", "uid": "00000000-0000-0000-0000-000000000000"}}
    _, owner = http("POST", widgets, widget())
    for name, parent in (("child", owner), ("orphan", ghost)):
        http("POST", f"{core}/configmaps", owned(parent, name))
    http("DELETE", f"{widgets}/a")
    until(lambda: {http("GET", f"{core}/configmaps/{name}")[0] for name in ("child", "orphan")} == {404})


@pytest.mark.needs("controllers")
def test_a_namespace_goes_with_all_that_is_in_it(http: Http, until: Until) -> None:
    name = "conformance-going"
    until(lambda: http("POST", "/api/v1/namespaces", {"metadata": {"name": name}})[0] == 201)
    path = f"/api/v1/namespaces/{name}"
    http("POST", f"{path}/configmaps", {**config_map(), "metadata": {"name": "c", "finalizers": ["a.example/x"]}})
    http("DELETE", path)
    until(lambda: http("GET", f"{path}/configmaps/c")[1]["metadata"].get("deletionTimestamp"))
    code, refused = http("POST", f"{path}/configmaps", config_map("late"))
    assert (code, refused["reason"]) == (403, "Forbidden")
    assert "because it is being terminated" in refused["message"]
    http("PATCH", f"{path}/configmaps/c", {"metadata": {"finalizers": None}}, media_type=MERGE)
    until(lambda: http("GET", path)[0] == 404)


@pytest.mark.needs("controllers", "node")
def test_a_claim_in_use_waits_for_its_pod(http: Http, core: str, until: Until) -> None:
    claims = f"{core}/persistentvolumeclaims"
    for name in ("data", "unused"):
        http("POST", claims, claim(name))
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    http("POST", f"{core}/pods", pod(volumes=volumes, nodeName=node_of(http)))
    assert http("GET", f"{claims}/data")[1]["metadata"]["finalizers"] == ["kubernetes.io/pvc-protection"]
    for name in ("data", "unused"):
        assert http("DELETE", f"{claims}/{name}")[0] == 200
    until(lambda: http("GET", f"{claims}/unused")[0] == 404)
    code, kept = http("GET", f"{claims}/data")
    assert code == 200
    assert kept["metadata"]["deletionTimestamp"]
    http("DELETE", f"{core}/pods/p", gracePeriodSeconds="0")
    until(lambda: http("GET", f"{claims}/data")[0] == 404)


@pytest.mark.needs("node")
def test_a_running_pod_ends_gracefully(http: Http, core: str, until: Until) -> None:
    http("POST", f"{core}/pods", pod(terminationGracePeriodSeconds=30, nodeName=node_of(http)))
    until(lambda: http("GET", f"{core}/pods/p")[1]["status"]["phase"] == "Running")
    code, going = http("DELETE", f"{core}/pods/p")
    assert code == 200
    assert going["metadata"]["deletionGracePeriodSeconds"] == 30
    until(lambda: http("GET", f"{core}/pods/p")[0] == 404)


def test_a_pod_that_no_node_has_goes_at_once(http: Http, core: str) -> None:
    http("POST", f"{core}/pods", pod(nodeSelector={"no": "such"}))
    http("DELETE", f"{core}/pods/p")
    assert http("GET", f"{core}/pods/p")[0] == 404


def node_of(http: Http) -> str:
    return http("GET", "/api/v1/nodes")[1]["items"][0]["metadata"]["name"]
