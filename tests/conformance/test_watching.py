# SPDX-License-Identifier: Apache-2.0
"""Lists in pages and watches: where they start, what they show through a selector, and how they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from objects import Http, Json, Watch, config_map
from targets import Target

MERGE = "application/merge-patch+json"


def labelled(name: str, **labels: str) -> Json:
    manifest = config_map(name)
    return {**manifest, "metadata": {"name": name, "labels": labels}}


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
    names = [item["metadata"]["name"] for item in page["items"]]
    version = page["metadata"]["resourceVersion"]
    while token := page["metadata"].get("continue"):
        _, page = http("GET", path, **{**query, "continue": token})
        names += [item["metadata"]["name"] for item in page["items"]]
        assert page["metadata"]["resourceVersion"] == version
    assert names == list("abcde")


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "1", "continue": "nonsense"},
        {"watch": "true", "resourceVersion": "x"},
        {"labelSelector": "a b"},
    ],
    ids=["continue token", "version", "selector"],
)
def test_what_a_list_or_a_watch_cannot_be_asked_is_refused(http: Http, core: str, query: dict[str, str]) -> None:
    code, refused = http("GET", f"{core}/configmaps", **query)
    assert (code, refused["reason"]) == (400, "BadRequest")


@pytest.mark.needs("compaction")
def test_an_expired_continue_token_is_told_apart(http: Http, core: str, target: Target) -> None:
    path = f"{core}/configmaps"
    for name in "abc":
        http("POST", path, config_map(name))
    _, page = http("GET", path, limit="1")
    http("POST", path, config_map("d"))
    target.compact()
    code, refused = http("GET", path, **{"limit": "1", "continue": page["metadata"]["continue"]})
    assert (code, refused["reason"]) == (410, "Expired")


def test_a_version_of_the_future_is_refused(http: Http, core: str) -> None:
    code, refused = http("GET", f"{core}/configmaps", resourceVersion="9000000000000000")
    assert (code, refused["reason"]) == (504, "Timeout")
    assert "Too large resource version" in refused["message"]


def test_watches_can_be_bookmarked(http: Http, core: str, watch: Watch) -> None:
    # How often is the server's business; a watch that is about to end gets one.
    _, listed = http("GET", f"{core}/configmaps")
    query = {"allowWatchBookmarks": "true", "timeoutSeconds": "5"}
    events = list(watch(f"{core}/configmaps", resourceVersion=listed["metadata"]["resourceVersion"], **query))
    bookmarks = [event for event in events if event["type"] == "BOOKMARK"]
    assert bookmarks
    assert bookmarks[-1]["object"]["kind"] == "ConfigMap"
    assert int(bookmarks[-1]["object"]["metadata"]["resourceVersion"]) >= int(listed["metadata"]["resourceVersion"])


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("color=red", ["a"]),
        ("color!=red", ["b", "c"]),
        ("color in (red,blue)", ["a", "b"]),
        ("color notin (red,blue)", ["c"]),
        ("color", ["a", "b"]),
        ("!color", ["c"]),
        ("color=red,size=1", []),
        ("color==blue,size", ["b"]),
    ],
)
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
