# SPDX-License-Identifier: Apache-2.0
"""Watches and lists: order, resumption, expiry, bookmarks, selectors, pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from objects import config_map

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.apiserver.store import memory, selectors

Http = Callable[..., tuple[int, Any]]
Watch = Callable[..., Iterator[dict[str, Any]]]
PATH = "/api/v1/namespaces/default/configmaps"


def _seen(event: dict[str, Any]) -> tuple[str, str]:
    return event["type"], event["object"]["metadata"].get("name", "")


def test_a_compacted_version_is_gone_and_a_new_list_works(api: ApiServerThread, http: Http, watch: Watch) -> None:
    version = http("GET", PATH)[1]["metadata"]["resourceVersion"]
    api.compact()
    [error] = watch(PATH, resourceVersion=version)
    assert (error["type"], error["object"]["code"], error["object"]["reason"]) == ("ERROR", 410, "Expired")
    fresh = http("GET", PATH)[1]["metadata"]["resourceVersion"]
    events = watch(PATH, resourceVersion=fresh)
    api.create(config_map("a"))
    assert _seen(next(events)) == ("ADDED", "a")


def test_a_version_of_another_server_is_gone(watch: Watch) -> None:
    [error] = watch(PATH, resourceVersion="999999")
    assert error["object"]["code"] == 410


def test_dropped_watches_end(api: ApiServerThread, watch: Watch) -> None:
    api.create(config_map("a"))
    events = watch(PATH)
    next(events)
    api.drop_watches()
    assert list(events) == []


def _stored(number: int) -> dict[str, Any]:
    return {"metadata": {"name": f"o{number}", "uid": str(number)}}


def test_the_history_is_bounded_and_what_it_lost_is_gone() -> None:
    kept = memory.Storage()
    first = kept.version
    for number in range(3 * memory.HISTORY_LIMIT):
        kept.commit(memory.EventType.ADDED, ("", "things"), _stored(number))
    with pytest.raises(ApiError) as refused:
        kept.since(("", "things"), first)
    assert refused.value.code == 410
    latest = kept.since(("", "things"), kept.version - 3)
    assert [event.version for event in latest] == [kept.version - 2, kept.version - 1, kept.version]


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_selector_object_matches_what_it_says(selector: dict[str, Any] | None, *, is_match: bool) -> None:
    assert selectors.labels_match(selector, {"a": "1"}) is is_match


def test_a_label_finds_what_carries_it_now_and_nothing_else(api: ApiServerThread, http: Http) -> None:
    def selected(selector: str) -> list[str]:
        return [item["metadata"]["name"] for item in http("GET", PATH, labelSelector=selector)[1]["items"]]

    def relabel(name: str, **labels: str | None) -> None:
        http("PATCH", f"{PATH}/{name}", {"metadata": {"labels": labels}}, media_type="application/merge-patch+json")

    for name, labels in {"c": {"a": "1"}, "b": {"a": "1", "x": "y"}, "d": {}}.items():
        metadata = {"name": name, "namespace": "default", "labels": labels}
        api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    assert selected("a=1") == ["b", "c"]
    assert selected("a == 1,x in (y,z)") == ["b"]
    relabel("d", a="1")
    relabel("b", a="2")
    assert selected("a=1") == ["c", "d"]
    relabel("c", a=None)
    http("DELETE", f"{PATH}/d")
    assert selected("a=1") == []
    assert selected("a=2") == ["b"]
