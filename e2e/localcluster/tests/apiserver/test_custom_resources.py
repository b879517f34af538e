# SPDX-License-Identifier: Apache-2.0
"""A CustomResourceDefinition: pruning, defaults, schema, CEL, the lint of the schema, and the costs of rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from objects import GROUP, Json, widget

from kvtier_localcluster.apiserver import structural_problems
from kvtier_localcluster.apiserver.admission import cel
from kvtier_localcluster.apiserver.admission.cel_cost import costs

Http = Callable[..., tuple[int, Any]]


def test_a_put_without_a_version_is_refused(http: Http, widgets: str) -> None:
    http("POST", widgets, widget())
    code, status = http("PUT", f"{widgets}/a", widget())
    assert code == 422
    assert "must be specified for an update" in status["message"]


def test_every_served_version_shows_the_same_objects(api: Any, http: Http, crd: Json) -> None:
    [first] = crd["spec"]["versions"]
    crd["spec"]["versions"].append({**copy.deepcopy(first), "name": "v2", "storage": False})
    api.create(crd)
    http("POST", f"/apis/{GROUP}/v1/namespaces/default/widgets", widget())
    code, shown = http("GET", f"/apis/{GROUP}/v2/namespaces/default/widgets/a")
    assert (code, shown["apiVersion"]) == (200, f"{GROUP}/v2")


def test_a_rule_reads_optional_fields_and_the_name() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "x-kubernetes-validations": [{"rule": "self.?x.orValue(5) == 5"}, {"rule": "self.metadata.name == 'n'"}],
    }
    assert cel.rule_problems({"metadata": {"name": "n"}}, None, schema) == []
    assert len(cel.rule_problems({"metadata": {"name": "other"}, "x": 1}, None, schema)) == 2


def test_items_of_a_list_map_meet_their_former_selves() -> None:
    rule = {"rule": "self.v >= oldSelf.v", "message": "v may only grow"}
    item = {
        "type": "object",
        "properties": {"k": {"type": "string"}, "v": {"type": "integer"}},
        "x-kubernetes-validations": [rule],
    }
    schema = {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"], "items": item}
    old = [{"k": "a", "v": 5}, {"k": "b", "v": 1}]
    assert cel.rule_problems([{"k": "b", "v": 2}, {"k": "c", "v": 0}], old, schema) == []
    assert cel.rule_problems([{"k": "a", "v": 4}], old, schema) == ["[0]: Invalid value: v may only grow"]


def test_names_that_are_no_identifiers_are_escaped_in_rules() -> None:
    schema = {
        "type": "object",
        "properties": {"a-b": {"type": "integer"}, "namespace": {"type": "string"}},
        "x-kubernetes-validations": [{"rule": "self.a__dash__b == 1 && self.__namespace__ == 'n'"}],
    }
    assert cel.rule_problems({"a-b": 1, "namespace": "n"}, None, schema) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"x": {"type": "object", "additionalProperties": False}},
            "v1.spec.x: additionalProperties: false is forbidden",
        ),
        ({"x": {"$ref": "#/y", "type": "string"}}, "v1.spec.x: $ref is forbidden"),
        (
            {
                "x": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"k": {"type": "string"}}},
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["k"],
                }
            },
            "v1.spec.x: list-map key k must be required or have a default",
        ),
        (
            {"x": {"type": "string", "anyOf": [{"type": "string"}]}},
            "v1.spec.x.anyOf[0]: type is forbidden inside allOf, anyOf, oneOf and not",
        ),
    ],
)
def test_each_structural_mistake_is_named(crd: Json, change: dict[str, Any], problem: str) -> None:
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"].update(change)
    assert structural_problems(crd) == [problem]


REAL: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "cel_costs.yaml").read_text())
"""What a real API server estimates."""


def over(rule: str) -> dict[str, Any]:
    return {"type": "object", "properties": REAL["properties"], "x-kubernetes-validations": [{"rule": rule}]}


@pytest.mark.parametrize(("rule", "cost"), REAL["costs"].items())
def test_a_rule_is_estimated_as_a_real_server_does_and_never_below(rule: str, cost: int) -> None:
    [(_, found)] = costs(over(rule))
    assert cost <= found <= max(cost + 1, 1.1 * cost)


def test_a_rule_of_a_nested_value_costs_as_often_as_the_value_may_occur() -> None:
    found = {
        path.split(".x-kubernetes")[0]
        .replace(".properties[", ".")
        .replace("]", "")
        .replace(".items", "[]")
        .replace(".additionalProperties", ".*"): cost
        for path, cost in costs(REAL["nested"]["schema"])
    }
    assert found == REAL["nested"]["costs"]
