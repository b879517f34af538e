# SPDX-License-Identifier: Apache-2.0
"""The official Python client, whose models are strict, and a server that cannot start."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kubernetes import client

from kvtier_localcluster.apiserver import ApiServerThread

_TEMPLATE: dict[str, Any] = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "x"}]}}
_WORKLOAD: dict[str, Any] = {"selector": {"matchLabels": {"a": "b"}}, "template": _TEMPLATE}
_CLAIM: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
_SCALING: dict[str, Any] = {"maxReplicas": 2, "scaleTargetRef": {"kind": "X", "name": "y"}}
_JOB: dict[str, Any] = {"template": {"spec": {**_TEMPLATE["spec"], "restartPolicy": "Never"}}}


@pytest.mark.parametrize(
    ("kind", "body", "listing"),
    [
        ("v1 Node", {}, "CoreV1Api.list_node"),
        ("v1 Service", {"spec": {"ports": [{"port": 1}]}}, "CoreV1Api.list_service_for_all_namespaces"),
        ("v1 Event", {"involvedObject": {"name": "x"}}, "CoreV1Api.list_event_for_all_namespaces"),
        ("v1 PersistentVolumeClaim", {"spec": _CLAIM}, "CoreV1Api.list_persistent_volume_claim_for_all_namespaces"),
        ("apps/v1 ReplicaSet", {"spec": _WORKLOAD}, "AppsV1Api.list_replica_set_for_all_namespaces"),
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
