# SPDX-License-Identifier: Apache-2.0
"""Label and field selectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.store import selectors

Http = Callable[..., tuple[int, Any]]
PATH = "/api/v1/namespaces/default/configmaps"


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
