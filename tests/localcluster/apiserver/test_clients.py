# SPDX-License-Identifier: Apache-2.0
"""The clients that people use: kubectl where it is installed, and the official Python client."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from kvtier_localcluster.apiserver import ApiServerThread

Http = Callable[..., tuple[int, Any]]
Make = Callable[..., dict[str, Any]]
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]
MERGE = "application/merge-patch+json"
DEFAULT = "/api/v1/namespaces/default"


def test_kubectl_applies_and_gets_a_custom_resource(kubectl: Kubectl, engine_crd: dict[str, Any], engine: Make) -> None:
    assert kubectl("apply", "-f", "-", stdin=engine_crd).stdout.endswith("engines.demo.dev created\n")
    assert kubectl("wait", "--for=condition=Established", "crd/engines.demo.dev").returncode == 0
    assert kubectl("apply", "-f", "-", stdin=engine()).stdout == "engine.demo.dev/a created\n"
    assert kubectl("apply", "-f", "-", stdin=engine()).stdout == "engine.demo.dev/a unchanged\n"
    assert kubectl("apply", "-f", "-", stdin=engine(replicas=2)).stdout == "engine.demo.dev/a configured\n"
    header, row = kubectl("get", "eng").stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "READY", "AGE"]
    assert row.split()[:2] == ["a", "m"]
    assert "engine.demo.dev/a" in kubectl("get", "all").stdout


def test_kubectl_reports_what_is_wrong(kubectl: Kubectl, engines: str, engine: Make) -> None:
    del engines
    unknown = kubectl("apply", "-f", "-", stdin=engine(bogus=1))
    assert unknown.returncode == 1
    assert 'unknown field "spec.bogus"' in unknown.stderr
    invalid = kubectl("apply", "-f", "-", stdin=engine(replicas=-1))
    assert "spec.replicas in body should be greater than or equal to 0" in invalid.stderr


def test_kubectl_describes_waits_and_scales(
    kubectl: Kubectl, api: ApiServerThread, http: Http, engines: str, engine: Make
) -> None:
    made = api.create(engine())
    about = {"kind": "Engine", "apiVersion": "demo.dev/v1", "name": "a", "namespace": "default"}
    about["uid"] = made["metadata"]["uid"]
    metadata = {"name": "a.1", "namespace": "default"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": about, "type": "Warning"}
    api.create({**event, "reason": "TooSmall", "message": "it is too small", "count": 1})
    described = kubectl("describe", "eng", "a").stdout
    assert "Model:" in described
    assert "TooSmall" in described
    assert "it is too small" in kubectl("get", "events").stdout
    status = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    http("PATCH", f"{engines}/a/status", status, media_type=MERGE)
    assert kubectl("wait", "eng/a", "--for=condition=Ready", "--timeout=60s").returncode == 0
    assert kubectl("wait", "eng/a", "--for=jsonpath={.spec.model}=m", "--timeout=60s").returncode == 0
    assert kubectl("scale", "eng/a", "--replicas=3").returncode == 0
    assert http("GET", f"{engines}/a")[1]["spec"]["replicas"] == 3
    assert kubectl("patch", "eng", "a", "--type=merge", "-p", '{"spec":{"mode":"Slow"}}').returncode == 0
    assert kubectl("delete", "eng", "a").stdout == 'engine.demo.dev "a" deleted\n'


def test_kubectl_follows_a_rollout_and_prints_workloads(
    kubectl: Kubectl, api: ApiServerThread, http: Http, deployment: Make, pod: Make
) -> None:
    assert kubectl("apply", "-f", "-", stdin=deployment()).returncode == 0
    counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas", "availableReplicas"), 1)
    path = "/apis/apps/v1/namespaces/default/deployments/web/status"
    http("PATCH", path, {"status": {**counts, "observedGeneration": 1}}, media_type=MERGE)
    assert "successfully rolled out" in kubectl("rollout", "status", "deploy/web", "--timeout=60s").stdout
    api.create(pod())
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"namespace": "default"}
    api.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "v", **metadata}, "spec": claim}
    )
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "sa", **metadata}})
    spec = {"maxUnavailable": 1}
    api.create(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "b", **metadata}, "spec": spec}
    )
    assert kubectl("create", "configmap", "c", "--from-literal=a=b").returncode == 0
    assert kubectl("expose", "deploy", "web", "--port=80").returncode == 0
    shown = kubectl("get", "pods,deploy,svc,pvc,cm,sa,pdb").stdout
    headers = [" ".join(line.split()) for line in shown.splitlines() if line.startswith("NAME")]
    assert headers == [
        "NAME READY STATUS RESTARTS AGE",
        "NAME READY UP-TO-DATE AVAILABLE AGE",
        "NAME TYPE CLUSTER-IP EXTERNAL-IP PORT(S) AGE",
        "NAME STATUS VOLUME CAPACITY ACCESS MODES STORAGECLASS VOLUMEATTRIBUTESCLASS AGE",
        "NAME DATA AGE",
        "NAME SECRETS AGE",
        "NAME MIN AVAILABLE MAX UNAVAILABLE ALLOWED DISRUPTIONS AGE",
    ]
    assert "web:1" in kubectl("describe", "pod", "p").stdout


def test_kubectl_shows_logs(kubectl: Kubectl, api: ApiServerThread, pod: Make) -> None:
    async def read(namespace: str, pod: str, container: str, *, tail: int | None, is_previous: bool) -> bytes:
        return f"{namespace}/{pod}/{container}/{tail}/{is_previous}\n".encode()

    api.server.pod_logs = read
    api.create(pod())
    assert kubectl("logs", "p", "--tail=5").stdout == "default/p/main/5/False\n"
    assert kubectl("logs", "p", "--previous").stdout == "default/p/main/None/True\n"


def test_kubectl_deletes_a_running_pod_once_the_kubelet_confirms(
    kubectl: Kubectl, api: ApiServerThread, http: Http, pod: Make
) -> None:
    api.create(pod(nodeName="n"))
    assert kubectl("delete", "pod", "p", "--wait=false").returncode == 0
    assert http("GET", f"{DEFAULT}/pods/p")[1]["metadata"]["deletionTimestamp"]
    assert kubectl("delete", "pod", "p", "--grace-period=0", "--force").returncode == 0
    assert http("GET", f"{DEFAULT}/pods/p")[0] == 404


def test_the_python_client_reads_every_kind_it_writes(python_client: Any, deployment: Make, pod: Make) -> None:
    apps: Any = client.AppsV1Api(python_client)
    core: Any = client.CoreV1Api(python_client)
    made = apps.create_namespaced_deployment("default", deployment())
    assert made.spec.strategy.type == "RollingUpdate"
    core.create_namespaced_pod("default", pod())
    core.patch_namespaced_pod_status("p", "default", {"status": {"phase": "Running", "podIP": "127.0.0.2"}})
    assert [(p.metadata.name, p.status.phase) for p in core.list_namespaced_pod("default").items] == [("p", "Running")]
    assert {n.metadata.name for n in core.list_namespace().items} >= {"default", "kube-system"}
    core.delete_namespaced_pod("p", "default", grace_period_seconds=0)
    with pytest.raises(ApiException) as gone:
        core.read_namespaced_pod("p", "default")
    assert gone.value.status == 404


def test_the_python_client_watches(python_client: Any, api: ApiServerThread, pod: Make) -> None:
    core = client.CoreV1Api(python_client)
    api.create(pod())
    stream = watch.Watch().stream(core.list_namespaced_pod, "default", timeout_seconds=5)
    event = next(iter(stream))
    assert (event["type"], event["object"].metadata.name) == ("ADDED", "p")


def test_the_python_client_works_on_custom_resources(python_client: Any, engines: str, engine: Make) -> None:
    del engines
    custom: Any = client.CustomObjectsApi(python_client)
    where = ("demo.dev", "v1", "default", "engines")
    custom.create_namespaced_custom_object(*where, engine())
    custom.patch_namespaced_custom_object_status(*where, "a", {"status": {"replicas": 1}})
    custom.patch_namespaced_custom_object(*where, "a", {"spec": {"replicas": 2}})
    [item] = custom.list_namespaced_custom_object(*where)["items"]
    assert (item["spec"]["replicas"], item["status"]) == (2, {"replicas": 1})


_TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {"containers": [{"name": "c", "image": "x"}]},
}
_WORKLOAD: dict[str, Any] = {"selector": {"matchLabels": {"a": "b"}}, "template": _TEMPLATE}
_CLAIM: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
_VOLUME: dict[str, Any] = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": "/x"}}
_SCALING: dict[str, Any] = {"maxReplicas": 2, "scaleTargetRef": {"kind": "X", "name": "y"}}
_JOB: dict[str, Any] = {"template": {"spec": {**_TEMPLATE["spec"], "restartPolicy": "Never"}}}


@pytest.mark.parametrize(
    ("kind", "body", "listing"),
    [
        ("v1 Node", {}, "CoreV1Api.list_node"),
        ("v1 Endpoints", {}, "CoreV1Api.list_endpoints_for_all_namespaces"),
        ("v1 Service", {"spec": {"ports": [{"port": 1}]}}, "CoreV1Api.list_service_for_all_namespaces"),
        ("v1 Event", {"involvedObject": {"name": "x"}}, "CoreV1Api.list_event_for_all_namespaces"),
        (
            "v1 PersistentVolumeClaim",
            {"spec": _CLAIM},
            "CoreV1Api.list_persistent_volume_claim_for_all_namespaces",
        ),
        ("v1 PersistentVolume", {"spec": _VOLUME}, "CoreV1Api.list_persistent_volume"),
        ("apps/v1 ReplicaSet", {"spec": _WORKLOAD}, "AppsV1Api.list_replica_set_for_all_namespaces"),
        ("apps/v1 DaemonSet", {"spec": _WORKLOAD}, "AppsV1Api.list_daemon_set_for_all_namespaces"),
        (
            "apps/v1 StatefulSet",
            {"spec": {**_WORKLOAD, "serviceName": "x"}},
            "AppsV1Api.list_stateful_set_for_all_namespaces",
        ),
        ("batch/v1 Job", {"spec": _JOB}, "BatchV1Api.list_job_for_all_namespaces"),
        ("coordination.k8s.io/v1 Lease", {"spec": {}}, "CoordinationV1Api.list_lease_for_all_namespaces"),
        (
            "policy/v1 PodDisruptionBudget",
            {"spec": {"minAvailable": 1}},
            "PolicyV1Api.list_pod_disruption_budget_for_all_namespaces",
        ),
        (
            "autoscaling/v2 HorizontalPodAutoscaler",
            {"spec": _SCALING},
            "AutoscalingV2Api.list_horizontal_pod_autoscaler_for_all_namespaces",
        ),
        (
            "discovery.k8s.io/v1 EndpointSlice",
            {"addressType": "IPv4", "endpoints": [{"addresses": ["127.0.0.2"]}]},
            "DiscoveryV1Api.list_endpoint_slice_for_all_namespaces",
        ),
        ("storage.k8s.io/v1 StorageClass", {"provisioner": "x"}, "StorageV1Api.list_storage_class"),
    ],
)
def test_the_python_clients_strict_models_accept_a_new_object(
    api: ApiServerThread, python_client: Any, kind: str, body: dict[str, Any], listing: str
) -> None:
    api_version, kind = kind.split()
    api.create({"apiVersion": api_version, "kind": kind, "metadata": {"name": "x"}, **body})
    group, method = listing.split(".")
    listed = getattr(getattr(client, group)(python_client), method)()
    assert [item.metadata.name for item in listed.items] == ["x"]


def test_a_port_that_is_taken_leaves_no_thread_behind(api: ApiServerThread) -> None:
    port = int(api.url.rpartition(":")[2])
    before = threading.active_count()
    with pytest.raises(OSError, match="in use"), ApiServerThread(port=port):
        pytest.fail("two servers on one port")
    assert threading.active_count() == before
