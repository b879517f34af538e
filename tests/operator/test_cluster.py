# SPDX-License-Identifier: Apache-2.0
"""The real client: what it asks the API server for, and what it makes of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator import errors
from kvtier_operator.kube.client import KubernetesCluster, connect
from kvtier_operator.names import ObjectKey, TierRef

KEY = ObjectKey(api_version="v1", kind="ConfigMap", name="a")
TIER = TierRef(namespace="default", name="llama", uid="u1")


def config_map(**data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": "default", "labels": {"x": "y"}},
        "data": data,
    }


@pytest.fixture
def cluster(api: ApiServerThread) -> KubernetesCluster:
    del api
    return connect()


def test_applying_creates_then_updates_and_drops_what_is_not_applied_any_more(cluster: KubernetesCluster) -> None:
    first = cluster.apply(config_map(a="1", b="2"), over=None)
    second = cluster.apply(config_map(a="1", c="3"), over=first["metadata"]["uid"])
    assert second["data"] == {"a": "1", "c": "3"}
    third = cluster.apply(config_map(a="1", c="3"), over=first["metadata"]["uid"])
    assert third["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


def test_an_object_that_was_replaced_meanwhile_is_not_written(cluster: KubernetesCluster) -> None:
    cluster.apply(config_map(a="1"), over=None)
    with pytest.raises(errors.ClusterConflict):
        cluster.apply(config_map(a="2"), over="another")
    assert (cluster.get(KEY, "default") or {})["data"] == {"a": "1"}
    with pytest.raises(errors.ClusterConflict):
        cluster.delete(KEY, "default", uid="another")


def test_a_field_of_somebody_else_is_not_taken_when_creating(api: ApiServerThread, cluster: KubernetesCluster) -> None:
    api.create(config_map(a="theirs"))
    with pytest.raises(errors.ClusterConflict, match="conflict"):
        cluster.apply(config_map(a="ours"), over=None)


def test_lists_are_of_the_selected_and_know_their_kind(cluster: KubernetesCluster) -> None:
    cluster.apply(config_map(a="1"), over=None)
    found = cluster.list("v1", "ConfigMap", namespace="default", selector="x=y")
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [("ConfigMap", "a")]
    assert cluster.list("v1", "ConfigMap", namespace="default", selector="x=z") == []


@pytest.mark.parametrize(("count", "pages"), [(0, [0]), (2, [2]), (5, [2, 2, 1])])
def test_long_lists_are_read_in_pages_that_leave_nothing_out(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, count: int, pages: list[int]
) -> None:
    monkeypatch.setattr("kvtier_operator.kube.client.PAGE", 2)
    for number in range(count):
        body = config_map()
        cluster.apply({**body, "metadata": {**body["metadata"], "name": f"c{number}"}}, over=None)
    found = list(cluster.pages("v1", "ConfigMap", namespace="default"))
    assert [len(page) for page in found] == pages
    assert [each["metadata"]["name"] for page in found for each in page] == [f"c{number}" for number in range(count)]
    assert {each["kind"] for page in found for each in page} <= {"ConfigMap"}


def test_what_is_not_there_is_none_to_get_and_nothing_to_delete(cluster: KubernetesCluster) -> None:
    assert cluster.get(KEY, "default") is None
    cluster.delete(KEY, "default", uid="any")


def test_the_status_of_a_tier_that_is_gone_is_nobodys_business(cluster: KubernetesCluster) -> None:
    cluster.patch_status(TIER, {"replicas": 1}, resource_version="1")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, errors.ClusterRejected),
        (401, errors.ClusterForbidden),
        (403, errors.ClusterForbidden),
        (409, errors.ClusterConflict),
        (422, errors.ClusterRejected),
        (429, errors.ClusterUnavailable),
        (500, errors.ClusterUnavailable),
        (503, errors.ClusterUnavailable),
    ],
)
def test_every_answer_has_its_exception(
    api: ApiServerThread, cluster: KubernetesCluster, code: int, error: type[errors.ClusterError]
) -> None:
    api.server.faults.append(lambda request: ApiError(code, "Reason", "because"))
    with pytest.raises(error, match=rf"^cannot read ConfigMap/a: {code} because$"):
        cluster.get(KEY, "default")


def test_an_api_server_that_is_gone_is_unavailable(api: ApiServerThread, cluster: KubernetesCluster) -> None:
    api.close()
    with pytest.raises(errors.ClusterUnavailable, match="cannot read ConfigMap/a"):
        cluster.get(KEY, "default")
