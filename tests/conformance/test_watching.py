# SPDX-License-Identifier: Apache-2.0
"""Lists in pages and watches: where they start and end, what they show; and what a deletion waits for and takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from objects import Http, Json, Until, Watch, claim, config_map, pod, refusal, widget
from targets import Target

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

MERGE = "application/merge-patch+json"


def labelled(name: str, **labels: str) -> Json:
    return {**config_map(name), "metadata": {"name": name, "labels": labels}}


def seen(events: Iterator[Json], count: int) -> list[tuple[str, str]]:
    found = []
    for event in events:
        name = event["object"]["metadata"].get("name")
        if event["type"] != "BOOKMARK" and name != "kube-root-ca.crt":
            found.append((event["type"], name))
        if len(found) == count:
            return found
    raise AssertionError(f"the watch ended after {found}")


def test_a_watch_goes_on_from_a_version_or_begins_with_what_there_is(http: Http, core: str, watch: Watch) -> None:
    path = f"{core}/configmaps"
    _, made = http("POST", path, config_map("a"))
    http("PATCH", f"{path}/a", {"data": {"x": "1"}}, media_type=MERGE)
    http("POST", path, config_map("b"))
    everything, one = watch(path), watch(path, fieldSelector="metadata.name=b")
    assert sorted(seen(everything, 2)) == [("ADDED", "a"), ("ADDED", "b")]
    assert seen(one, 1) == [("ADDED", "b")]
    http("DELETE", f"{path}/a")
    assert seen(everything, 1) == [("DELETED", "a")]
    events = watch(path, resourceVersion=made["metadata"]["resourceVersion"])
    assert seen(events, 3) == [("MODIFIED", "a"), ("ADDED", "b"), ("DELETED", "a")]


def test_an_object_enters_and_leaves_a_selector(http: Http, core: str, watch: Watch) -> None:
    path = f"{core}/configmaps"
    _, listed = http("GET", path)
    events = watch(path, labelSelector="a=1", resourceVersion=listed["metadata"]["resourceVersion"])
    http("POST", path, labelled("x"))
    http("PATCH", f"{path}/x", {"metadata": {"labels": {"a": "1"}}}, media_type=MERGE)
    http("PATCH", f"{path}/x", {"data": {"b": "1"}}, media_type=MERGE)
    http("PATCH", f"{path}/x", {"metadata": {"labels": {"a": "2"}}}, media_type=MERGE)
    assert seen(events, 3) == [("ADDED", "x"), ("MODIFIED", "x"), ("DELETED", "x")]


@pytest.mark.since(32)
def test_a_list_can_be_streamed_up_to_a_bookmark(http: Http, core: str, watch: Watch) -> None:
    path = f"{core}/configmaps"
    http("POST", path, config_map("a"))
    events = watch(path, sendInitialEvents="true", allowWatchBookmarks="true", resourceVersionMatch="NotOlderThan")
    for event in events:
        if event["type"] == "BOOKMARK":
            assert event["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
            assert int(event["object"]["metadata"]["resourceVersion"]) > 0
            return
        assert event["type"] == "ADDED"


def test_a_list_comes_in_pages_of_which_the_first_says_how_many_are_left(http: Http, core: str) -> None:
    path = f"{core}/configmaps"
    for name in "abcde":
        http("POST", path, labelled(name, page="1"))
    everything, first = http("GET", path)[1]["items"], http("GET", path, limit="1")[1]
    assert first["metadata"]["remainingItemCount"] == len(everything) - 1
    query = {"limit": "2", "labelSelector": "page=1"}
    _, page = http("GET", path, **query)
    assert "remainingItemCount" not in page["metadata"]
    names = [item["metadata"]["name"] for item in page["items"]]
    version = page["metadata"]["resourceVersion"]
    while token := page["metadata"].get("continue"):
        _, page = http("GET", path, **{**query, "continue": token})
        names += [item["metadata"]["name"] for item in page["items"]]
        assert page["metadata"]["resourceVersion"] == version
    assert names == list("abcde")


@pytest.mark.parametrize(
    ("query", "refused", "words"),
    TABLES["refused"],
    ids=["continue token", "version", "selector", "version of the future"],
)
def test_what_a_list_or_a_watch_cannot_be_asked_is_refused(
    http: Http, core: str, query: dict[str, str], refused: tuple[int, str], words: str
) -> None:
    assert words in refusal(http("GET", f"{core}/configmaps", **query), *refused)["message"]


@pytest.mark.needs("compaction")
def test_an_expired_continue_token_is_told_apart(http: Http, core: str, target: Target) -> None:
    path = f"{core}/configmaps"
    for name in "abc":
        http("POST", path, config_map(name))
    _, page = http("GET", path, limit="1")
    http("POST", path, config_map("d"))
    target.compact()
    refusal(http("GET", path, **{"limit": "1", "continue": page["metadata"]["continue"]}), 410, "Expired")


def test_watches_can_be_bookmarked(http: Http, core: str, watch: Watch) -> None:
    # How often is the server's business; a watch that is about to end gets one.
    _, listed = http("GET", f"{core}/configmaps")
    query = {"allowWatchBookmarks": "true", "timeoutSeconds": "5"}
    events = list(watch(f"{core}/configmaps", resourceVersion=listed["metadata"]["resourceVersion"], **query))
    bookmarks = [event for event in events if event["type"] == "BOOKMARK"]
    assert bookmarks
    assert bookmarks[-1]["object"]["kind"] == "ConfigMap"
    assert int(bookmarks[-1]["object"]["metadata"]["resourceVersion"]) >= int(listed["metadata"]["resourceVersion"])


@pytest.mark.parametrize(("selector", "names"), TABLES["selectors"])
def test_label_selectors(http: Http, core: str, selector: str, names: set[str]) -> None:
    for name, labels in {"a": {"color": "red"}, "b": {"color": "blue", "size": "1"}, "c": {"x": "y"}}.items():
        http("POST", f"{core}/secrets", labelled(name, suite="yes", **labels) | {"kind": "Secret"})
    _, found = http("GET", f"{core}/secrets", labelSelector=f"suite=yes,{selector}")
    assert [item["metadata"]["name"] for item in found["items"]] == names


def test_fields_select_that_an_index_knows(http: Http, core: str, widgets: str) -> None:
    for path, field in ((widgets, "spec.size"), (f"{core}/configmaps", "data.a"), (f"{core}/pods", "spec.priority")):
        code, refused = http("GET", path, fieldSelector=f"{field}=1")
        assert code == 400, path
        assert field in refused["message"]
    for name in "ab":
        http("POST", f"{core}/secrets", {"metadata": {"name": name}, "type": f"example.com/{name}"})
    by_name = http("GET", f"{core}/secrets", fieldSelector="metadata.name=b")[1]["items"]
    by_type = http("GET", f"{core}/secrets", fieldSelector="type=example.com/a")[1]["items"]
    assert [item["metadata"]["name"] for item in by_name + by_type] == ["b", "a"]


def owned(owner: Json, name: str = "child", *, is_blocking: bool = True, **metadata: Any) -> Json:
    reference = {field: owner["metadata"][field] for field in ("name", "uid")}
    reference |= {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "blockOwnerDeletion": is_blocking}
    manifest = config_map(name)
    return {**manifest, "metadata": {"name": name, "ownerReferences": [{**reference, "controller": True}], **metadata}}


def test_an_object_goes_when_its_last_finalizer_does_and_takes_no_new_one_before(http: Http, core: str) -> None:
    manifest = {**config_map(), "metadata": {"name": "c", "finalizers": ["a.example/x", "a.example/y"]}}
    http("POST", f"{core}/configmaps", manifest)
    code, marked = http("DELETE", f"{core}/configmaps/c")
    assert code == 200
    assert marked["metadata"]["deletionTimestamp"]
    change = {"metadata": {"finalizers": ["a.example/y"]}}
    assert http("PATCH", f"{core}/configmaps/c", change, media_type=MERGE)[0] == 200
    change = {"metadata": {"finalizers": ["a.example/y", "a.example/z"]}}
    refused = refusal(http("PATCH", f"{core}/configmaps/c", change, media_type=MERGE))
    assert "no new finalizers can be added if the object is being deleted" in refused["message"]
    assert http("GET", f"{core}/configmaps/c")[0] == 200
    http("PATCH", f"{core}/configmaps/c", {"metadata": {"finalizers": None}}, media_type=MERGE)
    assert http("GET", f"{core}/configmaps/c")[0] == 404


def test_a_deletion_can_be_meant_for_one_object_only(http: Http, core: str) -> None:
    _, made = http("POST", f"{core}/configmaps", config_map())
    for preconditions in ({"uid": "other"}, {"resourceVersion": "1"}):
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
        refusal(http("DELETE", f"{core}/configmaps/c", options), 409, "Conflict")
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
    refused = refusal(http("POST", f"{path}/configmaps", config_map("late")), 403, "Forbidden")
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
