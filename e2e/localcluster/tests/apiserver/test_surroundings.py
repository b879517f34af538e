# SPDX-License-Identifier: Apache-2.0
"""What tests do around the API: faults, audit log, pod logs, Protobuf, discovery, the Python client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes import client
from objects import pod

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.apiserver.store import protobuf

Http = Callable[..., tuple[int, Any]]
PODS = "/api/v1/namespaces/default/pods"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}


def test_a_fault_answers_in_the_servers_place_until_it_is_removed(api: ApiServerThread, http: Http) -> None:
    def fault(request: web.Request) -> ApiError | None:
        return ApiError(503, "ServiceUnavailable", "injected") if request.method == "POST" else None

    api.server.faults.append(fault)
    code, status = http("POST", CONFIG_MAPS, CONFIG_MAP)
    assert (code, status["reason"], status["message"]) == (503, "ServiceUnavailable", "injected")
    assert http("GET", CONFIG_MAPS)[0] == 200
    api.server.faults.remove(fault)
    assert http("POST", CONFIG_MAPS, CONFIG_MAP)[0] == 201


def test_the_audit_log_speaks_in_terms_of_rbac(api: ApiServerThread, http: Http) -> None:
    http("GET", "/apis/apps/v1/namespaces/default/deployments/web/scale")
    http("GET", PODS, labelSelector="a=b")
    http("DELETE", PODS)
    http("PATCH", "/api/v1/namespaces/default/status", {}, media_type="application/merge-patch+json")
    http("GET", "/version")
    scale, listing, clearing, namespace, version = api.server.audit[-5:]
    assert scale.target is not None
    assert (scale.verb, scale.target.group, scale.target.plural) == ("get", "apps", "deployments")
    assert (scale.target.namespace, scale.target.name, scale.target.subresource) == ("default", "web", "scale")
    assert (listing.verb, listing.query, listing.user_agent) == ("list", "labelSelector=a%3Db", "tester/1")
    assert clearing.verb == "deletecollection"
    assert namespace.target is not None
    assert (namespace.target.plural, namespace.target.name) == ("namespaces", "default")
    assert version.target is None


def test_pod_logs_come_from_the_runner(api: ApiServerThread, http: Http) -> None:
    asked = []

    async def read(namespace: str, name: str, container: str, tail: int | None, is_previous: bool) -> bytes | None:
        asked.append((namespace, name, container, tail))
        return None if is_previous else b"line\n"

    http("POST", PODS, pod())
    assert http("GET", f"{PODS}/p/log") == (200, "")
    api.server.pod_logs = read
    assert http("GET", f"{PODS}/p/log", tailLines="3", follow="true") == (200, "line\n")
    assert asked == [("default", "p", "main", 3)]
    code, status = http("GET", f"{PODS}/p/log", previous="true")
    assert (code, status["message"]) == (400, 'previous terminated container "main" in pod "p" not found')
    assert http("GET", f"{PODS}/p/log", container="gone")[0] == 400


def test_logs_of_a_pod_with_several_containers_need_a_name(http: Http) -> None:
    http("POST", PODS, pod(containers=[{"name": "a", "image": "x"}, {"name": "b", "image": "x"}]))
    code, status = http("GET", f"{PODS}/p/log")
    assert code == 400
    assert "a container name must be specified" in status["message"]


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def test_a_protobuf_body_of_another_kind_is_refused_by_name() -> None:
    type_meta = _field(1, b"v1") + _field(2, b"Node")
    with pytest.raises(ApiError, match="Node") as refused:
        protobuf.decode(protobuf.MAGIC + _field(1, type_meta))
    assert refused.value.code == 415


@pytest.mark.parametrize("body", [b"not json", b'{"metadata": "text"}', b"[]"])
def test_a_body_that_is_no_object_is_refused(http: Http, body: bytes) -> None:
    assert http("POST", CONFIG_MAPS, body)[0] == 400


def test_unknown_paths_are_not_found(http: Http) -> None:
    for path in ("/apis/nothing.dev/v1", "/api/v1/things", "/apis/apps/v1/namespaces/default/deployments/a/exec"):
        assert http("GET", path)[0] == 404


def test_every_request_may_do_everything_and_none_in_the_name_of_somebody_else(http: Http) -> None:
    review = {"kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": {"verb": "delete", "resource": "pods"}}}
    code, answer = http("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    assert (code, answer["status"]) == (201, {"allowed": True})
    code, refused = http("GET", PODS, headers={"Impersonate-User": "alice"})
    assert (code, refused["reason"]) == (501, "NotImplemented")
    assert "impersonation is not emulated" in refused["message"]


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
