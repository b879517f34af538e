# SPDX-License-Identifier: Apache-2.0
"""Server-side apply: ownership, conflicts, removal, list maps and sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from objects import widget

from kvtier_localcluster.apiserver.registry import apply as fieldsets

Http = Callable[..., tuple[int, Any]]
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
