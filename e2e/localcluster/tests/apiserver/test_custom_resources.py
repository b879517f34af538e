# SPDX-License-Identifier: Apache-2.0
"""What a CustomResourceDefinition does to its objects: pruning, defaults, schema, CEL, and the lint of the schema."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvtier_localcluster.apiserver import structural_problems
from kvtier_localcluster.apiserver.admission import cel, crd_schema

Http = Callable[..., tuple[int, Any]]
Make = Callable[..., dict[str, Any]]


def test_a_put_without_a_version_is_refused(http: Http, engines: str, engine: Make) -> None:
    http("POST", engines, engine())
    code, status = http("PUT", f"{engines}/a", engine())
    assert code == 422
    assert "must be specified for an update" in status["message"]


def test_every_served_version_shows_the_same_objects(
    api: Any, http: Http, engine_crd: dict[str, Any], engine: Make
) -> None:
    [first] = engine_crd["spec"]["versions"]
    engine_crd["spec"]["versions"].append({**copy.deepcopy(first), "name": "v2", "storage": False})
    api.create(engine_crd)
    http("POST", "/apis/demo.dev/v1/namespaces/default/engines", engine())
    code, shown = http("GET", "/apis/demo.dev/v2/namespaces/default/engines/a")
    assert code == 200
    assert shown["apiVersion"] == "demo.dev/v2"


def test_a_rule_reads_optional_fields_and_the_name() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "x-kubernetes-validations": [
            {"rule": "self.?x.orValue(5) == 5"},
            {"rule": "self.metadata.name == 'n'"},
        ],
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


def test_a_message_expression_builds_the_message() -> None:
    rule = {"rule": "self.x > 3", "messageExpression": "'x is ' + string(self.x)"}
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "x-kubernetes-validations": [rule]}
    assert cel.rule_problems({"x": 1}, None, schema) == ["<root>: Invalid value: x is 1"]


def test_a_nullable_field_keeps_its_null() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "nullable": True, "default": 3}}}
    value: dict[str, Any] = {"x": None}
    crd_schema.set_defaults(value, schema)
    assert value == {"x": None}
    assert crd_schema.schema_problems(value, schema, validator=crd_schema.make_validator(schema)) == []


def test_a_sound_definition_has_no_problems(engine_crd: dict[str, Any]) -> None:
    assert structural_problems(engine_crd) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": {}}, "v1.spec.x: type is required"),
        (
            {"x": {"type": "object", "additionalProperties": False}},
            "v1.spec.x: additionalProperties: false is forbidden",
        ),
        ({"x": {"$ref": "#/y", "type": "string"}}, "v1.spec.x: $ref is forbidden"),
        ({"x": {"type": "array"}}, "v1.spec.x: an array needs one schema of its items"),
        ({"x": {"type": "integer", "default": "a"}}, "v1.spec.x: default is invalid: 'a' is not of type 'integer'"),
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
def test_each_structural_mistake_is_named(engine_crd: dict[str, Any], change: dict[str, Any], problem: str) -> None:
    spec = engine_crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"].update(change)
    assert structural_problems(engine_crd) == [problem]


@pytest.mark.parametrize("rule", ["self.replicas <=", "self.replcas > 1", "nonsense(self.replicas)"])
def test_a_rule_that_cannot_work_is_named(engine_crd: dict[str, Any], rule: str) -> None:
    spec = engine_crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["x-kubernetes-validations"] = [{"rule": rule}]
    [problem] = structural_problems(engine_crd)
    assert rule in problem


def test_a_definition_with_problems_is_refused(http: Http, engine_crd: dict[str, Any]) -> None:
    engine_crd["metadata"]["name"] = "wrong"
    code, status = http("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", engine_crd)
    assert code == 422
    assert "must be engines.demo.dev" in status["message"]
