# SPDX-License-Identifier: Apache-2.0
"""Deletion: finalizers, preconditions, owners, namespaces, kinds, and the two steps of a running pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from objects import pod

from kvtier_localcluster.apiserver import ApiServerThread

Http = Callable[..., tuple[int, Any]]
Make = Callable[..., dict[str, Any]]
Until = Callable[[Callable[[], Any]], Any]
MERGE = "application/merge-patch+json"
DEFAULT = "/api/v1/namespaces/default"


@pytest.fixture
def config_map(api: ApiServerThread) -> Make:
    """`config_map(name, *owners)` stores a ConfigMap and returns it."""

    def make(name: str, *owners: dict[str, Any]) -> dict[str, Any]:
        references = [
            {"apiVersion": "v1", "kind": "ConfigMap", **{field: owner["metadata"][field] for field in ("name", "uid")}}
            for owner in owners
        ]
        described = {"name": name, "namespace": "default", "ownerReferences": references}
        return api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": described})

    return make


@pytest.fixture
def names(api: ApiServerThread) -> Callable[[], list[str]]:
    """`names()` returns the names of the ConfigMaps there are."""
    return lambda: [each["metadata"]["name"] for each in api.list("configmaps", "default")]


def test_a_dependent_with_another_owner_stays_and_forgets_the_lost_one(
    api: ApiServerThread, http: Http, config_map: Make, until: Until
) -> None:
    config_map("child", config_map("one"), config_map("two"))
    http("DELETE", f"{DEFAULT}/configmaps/one")

    def owners() -> list[str]:
        child = api.get("configmaps", "default", "child")
        assert child is not None
        return [reference["name"] for reference in child["metadata"]["ownerReferences"]]

    until(lambda: owners() == ["two"])


def test_an_owner_in_another_namespace_is_no_owner(
    api: ApiServerThread, config_map: Make, names: Callable[[], list[str]], until: Until
) -> None:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "far"}})
    metadata = {"name": "owner", "namespace": "far"}
    config_map("child", api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}))
    until(lambda: names() == [])


@pytest.mark.parametrize("has_node", [True, False])
def test_a_pod_with_processes_stays_until_the_kubelet_confirms(http: Http, *, has_node: bool) -> None:
    spec = {"terminationGracePeriodSeconds": 7, **({"nodeName": "node"} if has_node else {})}
    http("POST", f"{DEFAULT}/pods", pod(**spec))
    if not has_node:
        http("PATCH", f"{DEFAULT}/pods/p/status", {"status": {"phase": "Running"}}, media_type=MERGE)
    _, marked = http("DELETE", f"{DEFAULT}/pods/p")
    assert marked["metadata"]["deletionTimestamp"]
    assert marked["metadata"]["deletionGracePeriodSeconds"] == 7
    assert http("PATCH", f"{DEFAULT}/pods/p/status", {"status": {"phase": "Running"}}, media_type=MERGE)[0] == 200
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 200
    assert http("DELETE", f"{DEFAULT}/pods/p", {"gracePeriodSeconds": 0})[0] == 200
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404


def test_a_grace_period_can_be_shortened_but_not_extended(http: Http) -> None:
    http("POST", f"{DEFAULT}/pods", pod(nodeName="node"))
    graces = []
    for asked in (20, 40, 5):
        _, marked = http("DELETE", f"{DEFAULT}/pods/p", {"gracePeriodSeconds": asked})
        graces.append(marked["metadata"]["deletionGracePeriodSeconds"])
    assert graces == [20, 20, 5]


def test_a_finished_pod_goes_at_once(http: Http) -> None:
    http("POST", f"{DEFAULT}/pods", pod(nodeName="node"))
    http("PATCH", f"{DEFAULT}/pods/p/status", {"status": {"phase": "Succeeded"}}, media_type=MERGE)
    http("DELETE", f"{DEFAULT}/pods/p")
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404
