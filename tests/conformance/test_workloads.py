# SPDX-License-Identifier: Apache-2.0
"""What controllers do with Deployments, ReplicaSets, Jobs and disruption budgets, watched through kubectl."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from objects import Http, Json, Kubectl, Until, deployment, pod
from targets import Target

Rollout = Callable[[Json], None]
Budgeting = Callable[..., Json]

MERGE = "application/merge-patch+json"

pytestmark = pytest.mark.needs("controllers", "node")


@pytest.fixture
def rolled_out(http: Http, apps: str, kubectl: Kubectl) -> Rollout:
    def make(manifest: Json) -> Any:
        code, answer = http("POST", f"{apps}/deployments", manifest)
        assert code == 201, answer
        kubectl("rollout", "status", "deployment", manifest["metadata"]["name"], "--timeout=60s")

    return make


def names(http: Http, path: str) -> set[str]:
    return {item["metadata"]["name"] for item in http("GET", path)[1]["items"]}


def controller(manifest: Json) -> str | None:
    references = manifest["metadata"].get("ownerReferences") or []
    return next((each["uid"] for each in references if each.get("controller")), None)


def test_a_rollout_is_waited_for(rolled_out: Rollout, http: Http, apps: str, kubectl: Kubectl) -> None:
    rolled_out(deployment())
    found = http("GET", f"{apps}/deployments/web")[1]
    assert found["status"]["availableReplicas"] == found["status"]["updatedReplicas"] == 2
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
    conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
    assert conditions == {"Available": "True", "Progressing": "True"}
    assert "successfully rolled out" in kubectl("rollout", "status", "deployment/web")
    assert "condition met" in kubectl("wait", "--for=condition=Available", "deployment/web", "--timeout=60s")


def test_an_environment_variable_rolls_the_pods(
    rolled_out: Rollout, http: Http, core: str, apps: str, kubectl: Kubectl
) -> None:
    rolled_out(deployment())
    before = names(http, f"{core}/pods")
    kubectl("set", "env", "deployment/web", "EXTRA=1")
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    pods = [item for item in http("GET", f"{core}/pods")[1]["items"] if "deletionTimestamp" not in item["metadata"]]
    assert not before & {item["metadata"]["name"] for item in pods}
    assert all(item["spec"]["containers"][0]["env"] == [{"name": "EXTRA", "value": "1"}] for item in pods)
    sets = http("GET", f"{apps}/replicasets")[1]["items"]
    assert sorted(item["spec"]["replicas"] for item in sets) == [0, 2]
    revision = "deployment.kubernetes.io/revision"
    assert sorted(item["metadata"]["annotations"][revision] for item in sets) == ["1", "2"]
    assert "EXTRA" not in kubectl("rollout", "undo", "deployment/web")
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    assert "env" not in http("GET", f"{apps}/deployments/web")[1]["spec"]["template"]["spec"]["containers"][0]


def test_scaling_makes_and_ends_pods(
    rolled_out: Rollout, http: Http, core: str, kubectl: Kubectl, until: Until
) -> None:
    rolled_out(deployment(replicas=1))
    kubectl("scale", "deployment/web", "--replicas=3")
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    assert len(names(http, f"{core}/pods")) == 3
    kubectl("scale", "deployment/web", "--replicas=0")
    until(lambda: not names(http, f"{core}/pods"))


def test_a_deployment_adopts_the_replica_set_that_another_left(
    rolled_out: Rollout, http: Http, apps: str, core: str, kubectl: Kubectl, until: Until
) -> None:
    rolled_out(deployment())
    sets, pods = names(http, f"{apps}/replicasets"), names(http, f"{core}/pods")
    kubectl("delete", "deployment", "web", "--cascade=orphan")
    orphan = until(lambda: next(iter(http("GET", f"{apps}/replicasets")[1]["items"])))
    until(lambda: controller(http("GET", f"{apps}/replicasets/{orphan['metadata']['name']}")[1]) is None)
    rolled_out(deployment())
    uid = http("GET", f"{apps}/deployments/web")[1]["metadata"]["uid"]
    until(lambda: controller(http("GET", f"{apps}/replicasets/{orphan['metadata']['name']}")[1]) == uid)
    assert names(http, f"{apps}/replicasets") == sets
    assert names(http, f"{core}/pods") == pods


def test_a_pod_whose_labels_match_is_adopted(http: Http, apps: str, core: str, until: Until) -> None:
    http("POST", f"{core}/pods", pod("lonely", labels={"app": "web"}))
    replica_set = {**deployment(replicas=1), "kind": "ReplicaSet"}
    _, made = http("POST", f"{apps}/replicasets", replica_set)
    until(lambda: controller(http("GET", f"{core}/pods/lonely")[1]) == made["metadata"]["uid"])
    until(lambda: http("GET", f"{apps}/replicasets/web")[1]["status"].get("readyReplicas") == 1)
    assert names(http, f"{core}/pods") == {"lonely"}


def test_a_pod_whose_labels_match_no_more_is_released_and_replaced(
    rolled_out: Rollout, http: Http, core: str, kubectl: Kubectl, until: Until
) -> None:
    rolled_out(deployment(replicas=1))
    (name,) = names(http, f"{core}/pods")
    kubectl("label", "pod", name, "app-")
    until(lambda: controller(http("GET", f"{core}/pods/{name}")[1]) is None)
    until(lambda: len(names(http, f"{core}/pods")) == 2)


def budget(name: str = "b", **spec: Any) -> Json:
    manifest = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": name}}
    return {**manifest, "spec": {"selector": {"matchLabels": {"app": "web"}}, **spec}}


@pytest.fixture
def budgets(namespace: str, target: Target) -> str:
    return f"/apis/policy/{'v1' if target.minor >= 21 else 'v1beta1'}/namespaces/{namespace}/poddisruptionbudgets"


def evict(http: Http, core: str, target: Target, name: str) -> tuple[int, Json]:
    version = "policy/v1" if target.minor >= 22 else "policy/v1beta1"
    body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": name}}
    return http("POST", f"{core}/pods/{name}/eviction", body)


@pytest.fixture
def with_budget(http: Http, budgets: str, until: Until) -> Budgeting:
    def make(*, healthy: int, **spec: Any) -> Any:
        manifest = budget(**spec)
        manifest["apiVersion"] = budgets.split("/namespaces", maxsplit=1)[0].removeprefix("/apis/")
        code, made = http("POST", budgets, manifest)
        assert code == 201, made
        return until(
            lambda: (
                (found := http("GET", f"{budgets}/b")[1].get("status") or {}).get("observedGeneration")
                and found["currentHealthy"] == healthy
                and found
            )
        )

    return make


@pytest.mark.parametrize(
    ("spec", "desired", "allowed"),
    [
        ({"minAvailable": 3}, 3, 1),
        ({"minAvailable": "50%"}, 2, 2),
        ({"minAvailable": "60%"}, 3, 1),
        ({"maxUnavailable": 1}, 3, 1),
        ({"maxUnavailable": "30%"}, 2, 2),
        ({"minAvailable": 9}, 9, 0),
    ],
)
def test_a_budget_says_how_many_pods_may_go(
    rolled_out: Rollout, with_budget: Budgeting, spec: Json, desired: int, allowed: int
) -> None:
    rolled_out(deployment(replicas=4))
    status = with_budget(healthy=4, **spec)
    assert status["expectedPods"] == status["currentHealthy"] == 4
    assert (status["desiredHealthy"], status["disruptionsAllowed"]) == (desired, allowed)


def test_an_eviction_beyond_the_budget_is_refused(
    rolled_out: Rollout, with_budget: Budgeting, http: Http, core: str, target: Target
) -> None:
    rolled_out(deployment(replicas=2))
    with_budget(healthy=2, minAvailable=2)
    (name, _) = names(http, f"{core}/pods")
    code, refused = evict(http, core, target, name)
    assert (code, refused["reason"]) == (429, "TooManyRequests")
    assert "violate the pod's disruption budget" in refused["message"]
    assert refused["details"]["causes"][0]["reason"] == "DisruptionBudget"
    assert "deletionTimestamp" not in http("GET", f"{core}/pods/{name}")[1]["metadata"]


def test_two_evictions_at_once_do_not_share_the_last_place(
    with_budget: Budgeting, http: Http, core: str, target: Target
) -> None:
    # Pods of nobody: one that is replaced in time would make room for another eviction.
    for name in "abc":
        http("POST", f"{core}/pods", pod(name, labels={"app": "web"}))
    with_budget(healthy=3, minAvailable=2)
    codes = [evict(http, core, target, name)[0] for name in sorted(names(http, f"{core}/pods"))]
    assert codes.count(201) == 1
    assert codes.count(429) == 2


def test_draining_a_node_keeps_to_the_budget(
    rolled_out: Rollout, with_budget: Budgeting, http: Http, core: str, kubectl: Kubectl, until: Until
) -> None:
    rolled_out(deployment(replicas=4))
    with_budget(healthy=4, maxUnavailable=1)
    node = http("GET", "/api/v1/nodes")[1]["items"][0]["metadata"]["name"]
    try:
        arguments = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=10s")
        selection = "--pod-selector=app=web"
        refused = kubectl.fails("drain", node, selection, *arguments)
        assert "violate the pod's disruption budget" in refused
        pods = http("GET", f"{core}/pods")[1]["items"]
        assert sum(item["spec"].get("nodeName") == node for item in pods) == 3
    finally:
        kubectl("uncordon", node)
    until(lambda: all(item["spec"].get("nodeName") for item in http("GET", f"{core}/pods")[1]["items"]))


def test_a_cordoned_node_takes_no_new_pods(http: Http, core: str, kubectl: Kubectl, until: Until) -> None:
    nodes = http("GET", "/api/v1/nodes")[1]["items"]
    for node in nodes:
        kubectl("cordon", node["metadata"]["name"])
    try:
        http("POST", f"{core}/pods", pod())
        conditions = until(lambda: http("GET", f"{core}/pods/p")[1]["status"].get("conditions"))
        assert (conditions[0]["type"], conditions[0]["reason"]) == ("PodScheduled", "Unschedulable")
    finally:
        for node in nodes:
            kubectl("uncordon", node["metadata"]["name"])
    kubectl("wait", "--for=condition=Ready", "pod/p", "--timeout=60s")


def test_a_job_completes(kubectl: Kubectl, target: Target) -> None:
    if target.name.startswith("the embedded") or "server of" in target.name:
        kubectl("create", "job", "once", "--image=registry.k8s.io/pause:3.10")
        kubectl("wait", "--for=condition=Complete", "job/once", "--timeout=60s")
        assert json.loads(kubectl("get", "job", "once", "-o", "json"))["status"]["succeeded"] == 1
    else:
        pytest.skip("pause never ends in a real container")


def test_a_service_finds_the_pods_that_are_ready(
    rolled_out: Rollout, http: Http, kubectl: Kubectl, namespace: str, until: Until
) -> None:
    rolled_out(deployment())
    kubectl("expose", "deployment", "web", "--port=80")
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def addresses() -> list[Json]:
        slices = http("GET", path, labelSelector="kubernetes.io/service-name=web")[1].get("items", [])
        return [e for each in slices for e in each["endpoints"] or [] if e["conditions"].get("ready")]

    if http("GET", path)[0] == 404:
        pytest.skip("EndpointSlices are v1 since 1.21")
    until(lambda: len(addresses()) == 2)
