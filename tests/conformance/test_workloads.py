# SPDX-License-Identifier: Apache-2.0
"""What controllers do with Deployments, ReplicaSets, Jobs and Services, watched through kubectl."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from objects import Http, Json, Kubectl, Until, deployment, pod
from targets import Target

Rollout = Callable[[Json], None]


pytestmark = pytest.mark.needs("controllers", "node")


@pytest.fixture
def rolled_out(http: Http, apps: str, kubectl: Kubectl) -> Rollout:
    def make(manifest: Json) -> Any:
        code, answer = http("POST", f"{apps}/deployments", manifest)
        assert code == 201, answer
        kubectl("rollout", "status", "deployment", manifest["metadata"]["name"], "--timeout=240s")

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
    assert "condition met" in kubectl("wait", "--for=condition=Available", "deployment/web", "--timeout=240s")


def test_a_variable_rolls_the_pods(rolled_out: Rollout, http: Http, core: str, apps: str, kubectl: Kubectl) -> None:
    rolled_out(deployment())
    before = names(http, f"{core}/pods")
    kubectl("set", "env", "deployment/web", "EXTRA=1")
    kubectl("rollout", "status", "deployment/web", "--timeout=240s")
    pods = [item for item in http("GET", f"{core}/pods")[1]["items"] if "deletionTimestamp" not in item["metadata"]]
    assert not before & {item["metadata"]["name"] for item in pods}
    assert all(item["spec"]["containers"][0]["env"] == [{"name": "EXTRA", "value": "1"}] for item in pods)
    sets = http("GET", f"{apps}/replicasets")[1]["items"]
    assert sorted(item["spec"]["replicas"] for item in sets) == [0, 2]
    revision = "deployment.kubernetes.io/revision"
    assert sorted(item["metadata"]["annotations"][revision] for item in sets) == ["1", "2"]
    assert "EXTRA" not in kubectl("rollout", "undo", "deployment/web")
    kubectl("rollout", "status", "deployment/web", "--timeout=240s")
    assert "env" not in http("GET", f"{apps}/deployments/web")[1]["spec"]["template"]["spec"]["containers"][0]


def test_scaling_makes_or_ends_pods(rolled_out: Rollout, http: Http, core: str, kubectl: Kubectl, until: Until) -> None:
    rolled_out(deployment(replicas=1))
    kubectl("scale", "deployment/web", "--replicas=3")
    kubectl("rollout", "status", "deployment/web", "--timeout=240s")
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
    _, made = http("POST", f"{apps}/replicasets", {**deployment(replicas=1), "kind": "ReplicaSet"})
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
    kubectl("wait", "--for=condition=Ready", "pod/p", "--timeout=240s")


def test_a_job_completes(kubectl: Kubectl, target: Target) -> None:
    if target.name.startswith("the embedded") or "server of" in target.name:
        kubectl("create", "job", "once", "--image=registry.k8s.io/pause:3.10")
        kubectl("wait", "--for=condition=Complete", "job/once", "--timeout=240s")
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
