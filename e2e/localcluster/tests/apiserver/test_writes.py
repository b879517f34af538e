# SPDX-License-Identifier: Apache-2.0
"""Create, replace, patch and apply: identity, ownership, status, defaults and refusals of built-in kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import objects
import pytest
from hypothesis import given
from hypothesis import strategies as st
from objects import config_map, pod, widget

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.registry import apply as fieldsets
from kvtier_localcluster.apiserver.registry import patches
from kvtier_localcluster.apiserver.store import schemas

Http = Callable[..., tuple[int, Any]]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
DEFAULT = "/api/v1/namespaces/default"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
SCHEMA = schemas.builtin_schema("apps", "v1", "Deployment")


def deployment(name: str = "web", /, **container: Any) -> objects.Json:
    made = objects.deployment(name)
    made["spec"]["template"]["spec"]["containers"][0] |= container
    return made


def _claim(size: str = "1Gi", **spec: Any) -> dict[str, Any]:
    wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}, **spec}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "v"}, "spec": wanted}


def test_a_missing_namespace_is_refused(http: Http) -> None:
    code, status = http("POST", "/api/v1/namespaces/nowhere/configmaps", config_map())
    assert code == 404
    assert 'namespaces "nowhere" not found' in status["message"]


@pytest.mark.parametrize("name", ["Upper", "under_score", "-dash", "a..b", "x" * 254])
def test_a_name_that_is_no_subdomain_is_refused(http: Http, name: str) -> None:
    assert http("POST", f"{DEFAULT}/configmaps", config_map(name))[0] == 422


def test_a_patch_that_names_an_older_version_conflicts(http: Http) -> None:
    _, first = http("POST", f"{DEFAULT}/configmaps", config_map(a="1"))
    http("PATCH", f"{DEFAULT}/configmaps/c", {"data": {"a": "2"}}, media_type=MERGE)
    change = {"metadata": {"resourceVersion": first["metadata"]["resourceVersion"]}, "data": {"a": "3"}}
    assert http("PATCH", f"{DEFAULT}/configmaps/c", change, media_type=MERGE)[0] == 409


def test_built_in_defaults_are_filled_in(http: Http) -> None:
    _, made = http(
        "POST", DEPLOYMENTS, deployment(livenessProbe={"httpGet": {"port": 1}}, ports=[{"containerPort": 1}])
    )
    assert made["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": "25%"}
    [container] = made["spec"]["template"]["spec"]["containers"]
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["livenessProbe"]["periodSeconds"] == 10
    assert container["ports"] == [{"containerPort": 1, "protocol": "TCP"}]


def test_nulls_and_unknown_fields_of_built_in_kinds_are_dropped(http: Http) -> None:
    manifest = deployment(bogus=1, workingDir=None)
    manifest["spec"]["template"]["metadata"]["creationTimestamp"] = None
    code, made = http("POST", DEPLOYMENTS, manifest)
    assert code == 201
    [container] = made["spec"]["template"]["spec"]["containers"]
    assert not {"bogus", "workingDir"} & container.keys()
    assert http("POST", DEPLOYMENTS, deployment("other", bogus=1), fieldValidation="Strict")[0] == 400


@pytest.mark.parametrize(
    ("container", "field"),
    [
        ({"image": None}, "image"),
        ({"imagePullPolicy": "Sometimes"}, "imagePullPolicy"),
        ({"volumeMounts": [{"name": "gone", "mountPath": "/x"}]}, "volumeMounts[0].name"),
        ({"resources": {"limits": {"memory": "lots"}}}, "resources.limits.memory"),
        ({"resources": {"limits": {"cpu": 1}, "requests": {"cpu": 2}}}, "resources.requests"),
        ({"ports": [{"containerPort": 70000}]}, "ports[0].containerPort"),
        ({"name": "Main"}, "name"),
        ({"env": [{"value": "x"}]}, "env[0].name"),
        ({"args": "one string"}, "args"),
    ],
)
def test_a_container_that_cannot_run_is_refused(http: Http, container: dict[str, Any], field: str) -> None:
    code, status = http("POST", DEPLOYMENTS, deployment(**container))
    assert code == 422
    assert [cause["field"] for cause in status["details"]["causes"]] == [f"spec.template.spec.containers[0].{field}"]


def test_a_claim_can_only_grow(http: Http) -> None:
    path = f"{DEFAULT}/persistentvolumeclaims"
    _, made = http("POST", path, _claim("2Gi"))
    assert made["status"] == {"phase": "Pending"}

    def patch(spec: dict[str, Any]) -> int:
        return http("PATCH", f"{path}/v", {"spec": spec}, media_type=MERGE)[0]

    assert patch({"resources": {"requests": {"storage": "3Gi"}}}) == 200
    assert patch({"resources": {"requests": {"storage": "1Gi"}}}) == 422
    assert patch({"accessModes": ["ReadWriteOnce"]}) == 422
    assert patch({"volumeName": "pv-1"}) == 200, "the binder sets it once"
    assert patch({"volumeName": "pv-2"}) == 422


def test_string_data_of_a_secret_becomes_data(http: Http) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "text"}}
    _, made = http("POST", f"{DEFAULT}/secrets", secret)
    assert (made["data"], made["type"]) == ({"a": "dGV4dA=="}, "Opaque")
    assert "stringData" not in made


def test_the_spec_of_a_pod_is_fixed_but_for_its_node_and_images(http: Http) -> None:
    _, made = http("POST", f"{DEFAULT}/pods", pod())
    assert made["status"] == {"phase": "Pending"}
    one = f"{DEFAULT}/pods/p"
    assert http("PATCH", one, {"spec": {"nodeName": "node"}}, media_type=MERGE)[0] == 200
    assert http("PATCH", one, {"spec": {"nodeName": "elsewhere"}}, media_type=MERGE)[0] == 422
    assert http("PATCH", one, {"spec": {"restartPolicy": "Never"}}, media_type=MERGE)[0] == 422
    change = {"spec": {"containers": [{"name": "main", "image": "web:2"}]}}
    assert http("PATCH", one, change, media_type=STRATEGIC)[0] == 200


def _service(name: str, **spec: Any) -> dict[str, Any]:
    ports = {"ports": [{"port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {**ports, **spec}}


def test_every_service_gets_its_own_address_of_the_range(http: Http) -> None:
    made = [http("POST", f"{DEFAULT}/services", _service(f"s{n}"))[1]["spec"] for n in range(5)]
    addresses = {spec["clusterIP"] for spec in made}
    assert len(addresses) == 5
    assert all(address.startswith("127.96.") for address in addresses)
    assert made[0]["clusterIPs"] == [made[0]["clusterIP"]]
    assert made[0]["ports"] == [{"port": 80, "protocol": "TCP", "targetPort": 80}]


def test_a_range_that_is_full_says_so() -> None:
    with ApiServerThread(service_cidr="127.97.0.0/30") as small:
        addresses = [small.create(_service(f"s{n}"))["spec"]["clusterIP"] for n in range(2)]
        assert addresses == ["127.97.0.1", "127.97.0.2"]
        with pytest.raises(Exception, match="is full"):
            small.create(_service("s3"))


def test_a_service_keeps_its_address_when_replaced_and_may_have_none(http: Http) -> None:
    _, made = http("POST", f"{DEFAULT}/services", _service("a"))
    replacement = _service("a", selector={"x": "y"})
    _, replaced = http("PUT", f"{DEFAULT}/services/a", replacement)
    assert replaced["spec"]["clusterIP"] == made["spec"]["clusterIP"]
    assert http("PUT", f"{DEFAULT}/services/a", _service("a", clusterIP="127.96.9.9"))[0] == 422
    assert http("POST", f"{DEFAULT}/services", _service("b", clusterIP=made["spec"]["clusterIP"]))[0] == 422
    _, headless = http("POST", f"{DEFAULT}/services", _service("c", clusterIP="None"))
    assert headless["spec"]["clusterIP"] == "None"


def test_what_a_caller_gets_is_a_copy(api: ApiServerThread) -> None:
    api.create(config_map(a="1"))
    shown = api.get("configmaps", "default", "c")
    assert shown is not None
    before = copy.deepcopy(shown)
    shown["data"]["a"] = "changed"
    assert api.get("configmaps", "default", "c") == before


def _containers(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": list(containers)}}}}


ONE = _containers({"name": "a", "image": "1"})
ROLLING = {"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}
RETAINED = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
WITHOUT = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a/b"], "finalizers": ["e/f"]}}


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        (ONE, _containers({"name": "a", "$patch": "delete"}, {"name": "c"}), _containers({"name": "c"})),
        (ONE, _containers({"$patch": "replace"}, {"name": "b"}), _containers({"name": "b"})),
        (
            _containers({"name": "a", "args": ["x"]}),
            _containers({"name": "a", "args": ["y"]}),
            _containers({"name": "a", "args": ["y"]}),
        ),
        (ROLLING, RETAINED, {"spec": {"strategy": {"type": "Recreate"}}}),
        ({"metadata": {"finalizers": ["a/b", "c/d"]}}, WITHOUT, {"metadata": {"finalizers": ["c/d", "e/f"]}}),
    ],
    ids=["items by their key", "the whole list", "a list without a key", "named keys", "a list of scalars"],
)
def test_a_strategic_patch_changes_what_it_says(
    before: dict[str, Any], change: dict[str, Any], after: dict[str, Any]
) -> None:
    assert patches.strategic_merge_patch(before, change, SCHEMA) == after


APPLY = "application/apply-patch+yaml"

_NAMES = st.sampled_from(["a", "b", "c.d/e", "x:y"])
_PATHS = st.sets(st.lists(st.tuples(st.just("f"), _NAMES), min_size=1, max_size=3).map(tuple), max_size=6)


@pytest.fixture
def apply(http: Http, widgets: str) -> Http:
    def send(manager: str, *, force: bool = False, **spec: Any) -> tuple[int, Any]:
        query = {"fieldManager": manager, **({"force": "true"} if force else {})}
        return http("PATCH", f"{widgets}/a", widget(**spec), media_type=APPLY, **query)

    return send


@given(_PATHS)
def test_leaf_paths_survive_their_encoding(paths: set[Any]) -> None:
    leaves = {path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)}
    assert fieldsets.decode_fields(fieldsets.encode_fields(leaves)) == leaves


def test_a_field_that_someone_else_changed_since_is_not_removed(apply: Http, http: Http, widgets: str) -> None:
    apply("alice", arguments=["x"])
    change = {"spec": {"arguments": ["y"]}}
    http("PATCH", f"{widgets}/a", change, media_type="application/merge-patch+json", fieldManager="bob")
    _, left = apply("alice")
    assert left["spec"]["arguments"] == ["y"]


def test_ports_of_a_service_are_identified_by_port_and_protocol(http: Http) -> None:
    path = "/api/v1/namespaces/default/services/s"
    ports = [{"name": "t", "port": 53}, {"name": "u", "port": 53, "protocol": "UDP"}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": ports}}
    assert http("PATCH", path, service, media_type=APPLY, fieldManager="alice")[0] == 201
    service["spec"] = {"ports": ports[:1]}
    code, left = http("PATCH", path, service, media_type=APPLY, fieldManager="alice")
    assert code == 200
    assert [(port["port"], port["protocol"]) for port in left["spec"]["ports"]] == [(53, "TCP")]
