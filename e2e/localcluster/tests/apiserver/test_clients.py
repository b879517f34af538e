# SPDX-License-Identifier: Apache-2.0
"""The clients that people use: kubectl where it is installed, and the official Python client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from kvtier_localcluster.apiserver import ApiServerThread

Make = Callable[..., dict[str, Any]]


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
