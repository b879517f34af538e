# SPDX-License-Identifier: Apache-2.0
"""What a user adds to the pods is merged as the API server merges what it is applied, and takes nothing away."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from healthy_tier import NODE, SPEC, VIEW, check_problem, conditions, varied, with_pod
from live import Client
from tiers import engine_pod, plan_of, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.parts import engine, pods
from kvtier_operator.parts.pods import lay_over
from kvtier_operator.plan import nodes
from kvtier_operator.snapshot import ContainerStatus, Engines, Nodes

SIDECAR = {"name": "auth", "image": "envoy:1", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}


def pod_of(**template: Any) -> dict[str, Any]:
    return engine_pod(plan_of(tier(engine={"podTemplate": template})))


def container(pod: dict[str, Any], name: str = "engine") -> dict[str, Any]:
    return next(each for each in pod["containers"] if each["name"] == name)


@pytest.fixture(scope="module")
def api() -> Any:
    with ApiServerThread() as server:
        yield server


CLAIMS = [{"name": "nic", "resourceClaimName": "nic"}]
ADDED: dict[str, Any] = {
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    "ports": [{"containerPort": 8000, "protocol": "TCP", "hostPort": 80}, {"containerPort": 9, "protocol": "TCP"}],
    "resources": {"limits": {"rdma/hca": "1"}, "requests": {"rdma/hca": "1"}, "claims": [{"name": "nic"}]},
    "env": [{"name": "B", "value": "2"}, {"name": "C", "value": "3"}],
    "volumeMounts": [{"mountPath": "/b", "name": "two"}],
    "livenessProbe": {"periodSeconds": 30},
}


def test_a_container_is_merged_as_the_api_server_merges_two_who_apply_it(api: ApiServerThread) -> None:
    ours = {
        "name": "engine",
        "image": "vllm",
        "securityContext": {"capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True},
        "ports": [{"containerPort": 8000, "protocol": "TCP", "name": "http"}],
        "resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "1Gi"}},
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
        "volumeMounts": [{"mountPath": "/a", "name": "one"}],
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": 8000, "scheme": "HTTP"},
            "failureThreshold": 12,
            "timeoutSeconds": 1,
            "successThreshold": 1,
        },
    }

    def applied(container: dict[str, Any], manager: str) -> dict[str, Any]:
        labels = {"app": "x"}
        volumes = [{"name": name, "emptyDir": {}} for name in ("one", "two")]
        pod = {"containers": [container], "volumes": volumes, "resourceClaims": CLAIMS}
        template = {"metadata": {"labels": labels}, "spec": pod}
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "default"},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
        path = f"/apis/apps/v1/namespaces/default/deployments/d?force=true&fieldManager={manager}"
        found = Client(api.url).call("PATCH", path, body, "application/apply-patch+yaml")
        return dict(found["spec"]["template"]["spec"]["containers"][0])

    applied(ours, "operator")
    by_server = applied({"name": "engine", **ADDED}, "user")
    by_us = lay_over(ours, ADDED)
    assert {field: by_server[field] for field in by_us} == by_us


def test_pods_on_the_nodes_network_still_resolve_services_and_a_sidecars_context_is_its_own() -> None:
    pod = pod_of(hostNetwork=True)
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod_of(hostNetwork=True, dnsPolicy="Default")["dnsPolicy"] == "Default"
    pod = pod_of(containers=[{"name": "driver", "image": "d", "securityContext": {"privileged": True}}])
    assert container(pod, "driver")["securityContext"] == {"privileged": True}


PRIVILEGED = {**SIDECAR, "securityContext": {"privileged": True}}
IPC = {"name": "engine", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}


@pytest.mark.parametrize(
    ("template", "objection"),
    [
        ({"hostNetwork": True}, "hostNetwork"),
        ({"volumes": [{"name": "dev", "hostPath": {"path": "/dev"}}]}, "hostPath of the volume dev"),
        ({"containers": [PRIVILEGED]}, "privileged of the container auth"),
        ({"initContainers": [{"name": "i", "image": "i", "securityContext": {"runAsUser": 0}}]}, "runAsUser of the"),
        ({"containers": [IPC]}, "capabilities.add of the container engine"),
        ({"securityContext": {"runAsNonRoot": False}}, "runAsNonRoot of the pods"),
        ({"containers": [{**SIDECAR, "ports": [{"containerPort": 1, "hostPort": 1}]}]}, "hostPort of the container"),
    ],
)
def test_what_leaves_the_restricted_standard_is_said_by_its_field(template: dict[str, Any], objection: str) -> None:
    said = pods.warning(parse(tier(engine={"podTemplate": template})).engine.pod_template)
    assert objection in said
    assert "pod-security.kubernetes.io/enforce" in said


def test_nodes_must_have_every_counted_resource_and_room_for_the_sidecars() -> None:
    def limited(name: str, resource: str, amount: str, **more: str) -> dict[str, Any]:
        return {"name": name, "resources": {"limits": {resource: amount}}, **more}

    template = {
        "containers": [limited("engine", "rdma/hca", "2"), SIDECAR],
        "initContainers": [
            limited("once", "memory", "9Gi", image="i"),
            limited("log", "memory", "1Gi", image="i", restartPolicy="Always"),
        ],
    }
    asked = parse(tier(engine={"podTemplate": template}))
    assert nodes.sidecar_requests(asked) == (2 << 30, 500)
    assert not nodes.matching(asked, Nodes(nodes=(NODE,)))
    equipped = replace(NODE, devices={"nvidia.com/gpu": 8, "rdma/hca": 2})
    assert nodes.matching(asked, Nodes(nodes=(equipped,)))
    assert "2 rdma/hca" in nodes.wanted_text(asked)
    assert nodes.share_inputs(asked) != nodes.share_inputs(SPEC)


def test_a_node_without_room_for_the_sidecar_is_too_small() -> None:
    room = replace(NODE, memory_bytes=VIEW.stage.sizing.memory_bytes + (1 << 29))
    spec = parse(tier(engine={"podTemplate": {"containers": [SIDECAR]}}))
    for found, is_enough in ((SPEC, True), (spec, False)):
        snapshot = replace(VIEW.stage.snapshot, nodes=Nodes(nodes=(room,)), pods=(), engines=Engines())
        fits = conditions(varied(VIEW, spec=found, snapshot=snapshot))["SizingFits"]
        assert (fits["status"] != "False") is is_enough
    assert "spec.engine.podTemplate.containers" in fits["message"]


CRASHED = {"waiting_reason": "CrashLoopBackOff", "exit_code": 2, "exit_message": "no host"}


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (CRASHED, "ContainerCrashed", "no host"),
        ({"waiting_reason": "ImagePullBackOff"}, "ImagePullFailed", "spec.engine.podTemplate.containers"),
        ({"exit_reason": "OOMKilled", "exit_code": 137}, "OutOfMemory", "spec.engine.podTemplate.containers"),
    ],
)
def test_trouble_of_a_sidecar_names_the_sidecar_and_its_field(changes: dict[str, Any], reason: str, words: str) -> None:
    sidecar = ContainerStatus(name="auth", image="envoy", **changes)
    view = with_pod(containers=(ContainerStatus(name="engine", image="v"), sidecar))
    check_problem(view, "EnginesReady", Reason(reason), words)


def test_an_init_container_that_did_its_work_is_no_trouble() -> None:
    view = with_pod(containers=(ContainerStatus(name="fetch", image="f", exit_code=0, exit_reason="Completed"),))
    assert conditions(view)["EnginesReady"]["reason"] == "EnginesStarting"


@pytest.mark.parametrize(
    ("template", "grace", "shutdown"), [({}, 90, 60), ({"terminationGracePeriodSeconds": 180}, 180, 150)]
)
def test_what_an_engine_takes_to_end_fits_into_its_pods(template: dict[str, Any], grace: int, shutdown: int) -> None:
    pod = pod_of(**template)
    (waits,) = (int(each) for each in re.findall(r"sleep\((\d+)\)", str(container(pod)["lifecycle"]["preStop"])))

    assert pod["terminationGracePeriodSeconds"] == grace
    assert f"--shutdown-timeout={shutdown}" in container(pod)["args"]
    assert waits + shutdown + engine.TEARDOWN_SECONDS <= grace
