# SPDX-License-Identifier: Apache-2.0
"""Deletion: finalizers, preconditions, owners, namespaces, kinds, and the two steps of a running pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier_localcluster.apiserver import ApiServerThread

Http = Callable[..., tuple[int, Any]]
Make = Callable[..., dict[str, Any]]
Until = Callable[[Callable[[], Any]], Any]
MERGE = "application/merge-patch+json"
DEFAULT = "/api/v1/namespaces/default"


@pytest.fixture
def config_map(api: ApiServerThread) -> Make:
    """`config_map(name, owner=..., **metadata)` stores a ConfigMap and returns it."""

    def make(name: str, *owners: dict[str, Any], blocks: bool = True, **metadata: Any) -> dict[str, Any]:
        references = [
            {
                "apiVersion": owner["apiVersion"],
                "kind": owner["kind"],
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
                "blockOwnerDeletion": blocks,
            }
            for owner in owners
        ]
        owned = {"ownerReferences": references} if references else {}
        described = {"name": name, "namespace": "default", **owned, **metadata}
        return api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": described})

    return make


@pytest.fixture
def names(api: ApiServerThread) -> Callable[[], list[str]]:
    """`names()` returns the names of the ConfigMaps there are."""
    return lambda: [each["metadata"]["name"] for each in api.list("configmaps", "default")]


def test_an_object_without_finalizers_goes_at_once(http: Http, config_map: Make) -> None:
    config_map("a")
    code, status = http("DELETE", f"{DEFAULT}/configmaps/a")
    assert (code, status["status"]) == (200, "Success")
    assert http("GET", f"{DEFAULT}/configmaps/a")[0] == 404
    assert http("DELETE", f"{DEFAULT}/configmaps/a")[0] == 404


def test_a_finalizer_holds_an_object_until_it_is_removed(http: Http, config_map: Make) -> None:
    config_map("a", finalizers=["demo.dev/wait"])
    code, marked = http("DELETE", f"{DEFAULT}/configmaps/a")
    assert code == 200
    assert marked["metadata"]["deletionTimestamp"]
    change = {"metadata": {"finalizers": ["demo.dev/wait", "demo.dev/more"]}}
    assert http("PATCH", f"{DEFAULT}/configmaps/a", change, media_type=MERGE)[0] == 422
    assert http("DELETE", f"{DEFAULT}/configmaps/a")[1]["metadata"] == marked["metadata"]
    assert http("PATCH", f"{DEFAULT}/configmaps/a", {"metadata": {"finalizers": None}}, media_type=MERGE)[0] == 200
    assert http("GET", f"{DEFAULT}/configmaps/a")[0] == 404


def test_a_precondition_on_another_uid_conflicts(http: Http, config_map: Make) -> None:
    config_map("a")
    assert http("DELETE", f"{DEFAULT}/configmaps/a", {"preconditions": {"uid": "other"}})[0] == 409


def test_a_collection_is_deleted_by_selector(http: Http, config_map: Make, names: Callable[[], list[str]]) -> None:
    config_map("a", labels={"x": "1"})
    config_map("b", labels={"x": "2"})
    assert http("DELETE", f"{DEFAULT}/configmaps", labelSelector="x=1")[0] == 200
    assert names() == ["b"]


def test_dependents_go_with_their_owner(
    http: Http, config_map: Make, names: Callable[[], list[str]], until: Until
) -> None:
    config_map("grandchild", config_map("child", config_map("owner")))
    http("DELETE", f"{DEFAULT}/configmaps/owner")
    until(lambda: names() == [])


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


def test_orphans_stay(http: Http, config_map: Make, names: Callable[[], list[str]]) -> None:
    config_map("child", config_map("owner"))
    http("DELETE", f"{DEFAULT}/configmaps/owner", propagationPolicy="Orphan")
    assert names() == ["child"]
    assert "ownerReferences" not in http("GET", f"{DEFAULT}/configmaps/child")[1]["metadata"]


def test_an_object_whose_owner_is_gone_at_its_creation_goes_too(
    http: Http, config_map: Make, names: Callable[[], list[str]], until: Until
) -> None:
    owner = config_map("owner")
    http("DELETE", f"{DEFAULT}/configmaps/owner")
    config_map("late", owner)
    until(lambda: names() == [])


def test_an_owner_in_another_namespace_is_no_owner(
    api: ApiServerThread, config_map: Make, names: Callable[[], list[str]], until: Until
) -> None:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "far"}})
    metadata = {"name": "owner", "namespace": "far"}
    config_map("child", api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}))
    until(lambda: names() == [])


def test_a_foreground_deletion_waits_for_dependents_that_block(
    http: Http, config_map: Make, names: Callable[[], list[str]], until: Until
) -> None:
    config_map("child", config_map("owner"), finalizers=["demo.dev/wait"])
    code, marked = http("DELETE", f"{DEFAULT}/configmaps/owner", propagationPolicy="Foreground")
    assert code == 200
    assert marked["metadata"]["finalizers"] == ["foregroundDeletion"]
    until(lambda: http("GET", f"{DEFAULT}/configmaps/child")[1]["metadata"].get("deletionTimestamp"))
    assert names() == ["child", "owner"]
    http("PATCH", f"{DEFAULT}/configmaps/child", {"metadata": {"finalizers": None}}, media_type=MERGE)
    until(lambda: names() == [])


def test_a_foreground_deletion_does_not_wait_for_dependents_that_do_not_block(
    http: Http, config_map: Make, names: Callable[[], list[str]], until: Until
) -> None:
    config_map("child", config_map("owner"), blocks=False, finalizers=["demo.dev/wait"])
    http("DELETE", f"{DEFAULT}/configmaps/owner", propagationPolicy="Foreground")
    until(lambda: names() == ["child"])


def test_a_namespace_goes_when_it_is_empty(api: ApiServerThread, http: Http, until: Until) -> None:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "n"}})
    metadata = {"name": "a", "namespace": "n", "finalizers": ["demo.dev/wait"]}
    api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    _, marked = http("DELETE", "/api/v1/namespaces/n")
    assert marked["status"]["phase"] == "Terminating"
    late = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}}
    assert http("POST", "/api/v1/namespaces/n/configmaps", late)[0] == 403
    until(lambda: http("GET", "/api/v1/namespaces/n/configmaps/a")[1]["metadata"].get("deletionTimestamp"))
    assert http("GET", "/api/v1/namespaces/n")[0] == 200
    change = {"metadata": {"finalizers": None}}
    http("PATCH", "/api/v1/namespaces/n/configmaps/a", change, media_type=MERGE)
    until(lambda: http("GET", "/api/v1/namespaces/n")[0] == 404)


def test_a_definition_takes_its_objects_along_and_waits_for_them(
    api: ApiServerThread, http: Http, engines: str, engine: Make, until: Until
) -> None:
    held = engine()
    held["metadata"]["finalizers"] = ["demo.dev/wait"]
    api.create(held)
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/engines.demo.dev"
    assert http("DELETE", crd)[0] == 200
    until(lambda: http("GET", f"{engines}/a")[1]["metadata"].get("deletionTimestamp"))
    assert http("GET", crd)[0] == 200
    http("PATCH", f"{engines}/a", {"metadata": {"finalizers": None}}, media_type=MERGE)
    until(lambda: http("GET", crd)[0] == 404)
    assert http("GET", engines)[0] == 404


def test_a_pod_that_was_never_scheduled_goes_at_once(http: Http, pod: Make) -> None:
    http("POST", f"{DEFAULT}/pods", pod())
    code, gone = http("DELETE", f"{DEFAULT}/pods/p")
    assert (code, gone["kind"]) == (200, "Pod")
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404


@pytest.mark.parametrize("has_node", [True, False])
def test_a_pod_with_processes_stays_until_the_kubelet_confirms(http: Http, pod: Make, *, has_node: bool) -> None:
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


def test_a_forced_deletion_of_a_pod_is_immediate(http: Http, pod: Make) -> None:
    http("POST", f"{DEFAULT}/pods", pod(nodeName="node"))
    http("DELETE", f"{DEFAULT}/pods/p", gracePeriodSeconds="0")
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404


def test_a_grace_period_can_be_shortened_but_not_extended(http: Http, pod: Make) -> None:
    http("POST", f"{DEFAULT}/pods", pod(nodeName="node"))
    graces = []
    for asked in (20, 40, 5):
        _, marked = http("DELETE", f"{DEFAULT}/pods/p", {"gracePeriodSeconds": asked})
        graces.append(marked["metadata"]["deletionGracePeriodSeconds"])
    assert graces == [20, 20, 5]


def test_a_finished_pod_goes_at_once(http: Http, pod: Make) -> None:
    http("POST", f"{DEFAULT}/pods", pod(nodeName="node"))
    http("PATCH", f"{DEFAULT}/pods/p/status", {"status": {"phase": "Succeeded"}}, media_type=MERGE)
    http("DELETE", f"{DEFAULT}/pods/p")
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404


def test_an_eviction_respects_a_disruption_budget(api: ApiServerThread, http: Http, pod: Make) -> None:
    labelled = pod()
    labelled["metadata"]["labels"] = {"a": "b"}
    http("POST", f"{DEFAULT}/pods", labelled)
    budget = {"minAvailable": 1, "selector": {"matchLabels": {"a": "b"}}}
    metadata = {"name": "b", "namespace": "default"}
    api.create({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": budget})
    path = "/apis/policy/v1/namespaces/default/poddisruptionbudgets/b/status"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
    codes = []
    for allowed in (0, 1):
        status = {"observedGeneration": 1, "disruptionsAllowed": allowed}
        http("PATCH", path, {"status": status}, media_type=MERGE)
        codes.append(http("POST", f"{DEFAULT}/pods/p/eviction", eviction)[0])
    assert codes == [429, 201]
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404
