# SPDX-License-Identifier: Apache-2.0
"""Server-side apply: ownership, conflicts, removal, list maps and sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_localcluster.apiserver import fieldsets

Http = Callable[..., tuple[int, Any]]
APPLY = "application/apply-patch+yaml"

_NAMES = st.sampled_from(["a", "b", "c.d/e", "x:y"])
_PATHS = st.sets(st.lists(st.tuples(st.just("f"), _NAMES), min_size=1, max_size=3).map(tuple), max_size=6)


@pytest.fixture
def apply(http: Http, engines: str, engine: Callable[..., Any]) -> Http:
    def send(manager: str, *, force: bool = False, **spec: Any) -> tuple[int, Any]:
        query = {"fieldManager": manager, **({"force": "true"} if force else {})}
        return http("PATCH", f"{engines}/a", engine(**spec), media_type=APPLY, **query)

    return send


@given(_PATHS)
def test_leaf_paths_survive_their_encoding(paths: set[Any]) -> None:
    leaves = {path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)}
    assert fieldsets.decode(fieldsets.encode(leaves)) == leaves


def test_an_apply_creates_what_does_not_exist(apply: Http) -> None:
    code, created = apply("alice")
    assert code == 201
    [entry] = created["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("alice", "Apply")
    assert entry["fieldsV1"] == {"f:spec": {"f:model": {}}}


def test_applying_twice_changes_nothing(apply: Http) -> None:
    _, first = apply("alice", replicas=2)
    code, second = apply("alice", replicas=2)
    assert code == 200
    assert second == first


def test_another_manager_with_another_value_conflicts(apply: Http) -> None:
    apply("alice", replicas=2)
    code, status = apply("bob", replicas=3)
    assert code == 409
    assert status["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "message": 'conflict with "alice"', "field": ".spec.replicas"}
    ]


def test_another_manager_with_the_same_value_shares_the_field(apply: Http) -> None:
    apply("alice", replicas=2)
    code, _ = apply("bob", replicas=2)
    assert code == 200
    _, left = apply("alice")
    assert left["spec"]["replicas"] == 2, "bob still wants it"


def test_a_forced_apply_takes_the_field_over(apply: Http) -> None:
    apply("alice", replicas=2)
    code, taken = apply("bob", force=True, replicas=3)
    assert code == 200
    assert taken["spec"]["replicas"] == 3
    assert apply("alice", replicas=2)[0] == 409


def test_a_field_that_is_no_longer_applied_is_removed(apply: Http) -> None:
    apply("alice", args=["x"])
    _, left = apply("alice")
    assert "args" not in left["spec"]


def test_a_field_that_someone_else_changed_since_is_not_removed(apply: Http, http: Http, engines: str) -> None:
    apply("alice", args=["x"])
    change = {"spec": {"args": ["y"]}}
    http("PATCH", f"{engines}/a", change, media_type="application/merge-patch+json", fieldManager="bob")
    _, left = apply("alice")
    assert left["spec"]["args"] == ["y"]


def test_managers_share_a_list_map_by_item(apply: Http) -> None:
    apply("alice", ports=[{"name": "http", "port": 80}])
    _, merged = apply("bob", ports=[{"name": "grpc", "port": 90}])
    assert [port["name"] for port in merged["spec"]["ports"]] == ["http", "grpc"]
    _, left = apply("alice")
    assert left["spec"]["ports"] == [{"name": "grpc", "port": 90}]


def test_managers_share_a_set_by_value(apply: Http) -> None:
    apply("alice", tags=["x", "y"])
    apply("bob", tags=["y", "z"])
    _, left = apply("alice", tags=["x"])
    assert sorted(left["spec"]["tags"]) == ["x", "y", "z"]


def test_an_atomic_list_has_one_owner(apply: Http) -> None:
    apply("alice", args=["x"])
    assert apply("bob", args=["x", "y"])[0] == 409


def test_an_update_takes_over_what_it_changes(apply: Http, http: Http, engines: str) -> None:
    apply("alice", replicas=2)
    change = {"spec": {"replicas": 5}}
    http("PATCH", f"{engines}/a", change, media_type="application/merge-patch+json", fieldManager="bob")
    code, status = apply("alice", replicas=2)
    assert code == 409
    assert 'conflict with "bob"' in status["message"]


def test_the_status_has_its_own_entry(apply: Http, http: Http, engines: str) -> None:
    apply("alice")
    body = {"apiVersion": "demo.dev/v1", "kind": "Engine", "metadata": {"name": "a"}, "status": {"replicas": 2}}
    code, shown = http("PATCH", f"{engines}/a/status", body, media_type=APPLY, fieldManager="alice")
    assert code == 200
    assert shown["status"] == {"replicas": 2}
    subresources = [entry.get("subresource") for entry in shown["metadata"]["managedFields"]]
    assert subresources == [None, "status"]
    _, left = apply("alice")
    assert left["status"] == {"replicas": 2}


def test_ports_of_a_service_are_identified_by_port_and_protocol(http: Http) -> None:
    path = "/api/v1/namespaces/default/services/s"
    ports = [{"name": "t", "port": 53}, {"name": "u", "port": 53, "protocol": "UDP"}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": ports}}
    assert http("PATCH", path, service, media_type=APPLY, fieldManager="alice")[0] == 201
    service["spec"] = {"ports": ports[:1]}
    code, left = http("PATCH", path, service, media_type=APPLY, fieldManager="alice")
    assert code == 200
    assert [(port["port"], port["protocol"]) for port in left["spec"]["ports"]] == [(53, "TCP")]


def test_an_apply_in_yaml_keeps_time_stamps_as_texts(http: Http) -> None:
    text = b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c, annotations: {at: 2024-01-01T00:00:00Z}}\n"
    path = "/api/v1/namespaces/default/configmaps/c"
    code, made = http("PATCH", path, text, media_type=APPLY, fieldManager="alice")
    assert code == 201
    assert made["metadata"]["annotations"] == {"at": "2024-01-01T00:00:00Z"}


def test_an_apply_without_a_manager_is_refused(http: Http, engines: str, engine: Callable[..., Any]) -> None:
    code, status = http("PATCH", f"{engines}/a", engine(), media_type=APPLY)
    assert code == 400
    assert "fieldManager" in status["message"]
