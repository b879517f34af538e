# SPDX-License-Identifier: Apache-2.0
"""The CustomResourceDefinition is one that real API servers take, and it is what the models say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_schemas
import pytest
import yaml
from healthy_tier import COMMON, PAGE, SECTIONS

from kvtier_localcluster.apiserver.admission.cel import rule_problems
from kvtier_localcluster.apiserver.admission.cel_cost import DEFINITION_LIMIT, RULE_LIMIT, costs
from kvtier_localcluster.apiserver.admission.crd_schema import set_defaults
from kvtier_localcluster.apiserver.admission.structural import structural_problems
from kvtier_operator import names
from kvtier_operator.api import crd, parse
from kvtier_operator.api.reasons import CONDITIONS, Reason
from kvtier_operator.api.tier_spec import LONGEST_NAME
from kvtier_operator.parts import PARTS

MINIMAL = Path(__file__).parents[2] / "crds" / "samples" / "minimal.yaml"
SHARE = 0.25
"""Of both limits, what the rules may take: more rules are to come."""


@pytest.fixture(scope="module")
def definition() -> dict[str, Any]:
    return crd.definition()


@pytest.fixture(scope="module")
def schema(definition: dict[str, Any]) -> dict[str, Any]:
    return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(schema: dict[str, Any], path: str = "", repeats: int = 1) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield every schema with its path and the number of times that an object can hold it."""
    yield path, schema, repeats
    for name, below in schema.get("properties", {}).items():
        yield from walk(below, f"{path}.{name}".lstrip("."), repeats)
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]", repeats * schema["maxItems"])
    if isinstance(schema.get("additionalProperties"), dict):
        yield from walk(schema["additionalProperties"], f"{path}.*", repeats * schema["maxProperties"])


@pytest.mark.parametrize("version", ["1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.37"])
def test_every_supported_kubernetes_knows_every_field_of_the_definition(
    definition: dict[str, Any], version: str
) -> None:
    kubernetes_schemas.validate(definition, version)


def test_the_schema_is_structural_and_its_rules_compile(definition: dict[str, Any]) -> None:
    assert structural_problems(definition) == []


def test_every_default_keeps_to_the_rules_before_anything_is_filled_in_below_it(schema: dict[str, Any]) -> None:
    for path, below, _ in walk(schema):
        if "default" in below:
            default = below["default"]
            assert rule_problems(default, None, below, path) + rule_problems(default, default, below, path) == [], path


def test_every_field_has_a_description_that_is_a_sentence(schema: dict[str, Any]) -> None:
    for top in ("spec", "status"):
        for path, below, _ in walk(schema["properties"][top], top):
            if not path.endswith(("[]", ".*")) or "properties" in below:
                assert below.get("description", "").endswith("."), path
                assert "\n" not in below["description"], path


def test_every_value_is_bounded_so_that_rules_have_a_bounded_cost(schema: dict[str, Any]) -> None:
    for top in ("spec", "status"):
        for path, below, _ in walk(schema["properties"][top], top):
            if "x-kubernetes-int-or-string" in below:
                continue
            if below["type"] == "string":
                assert {"maxLength", "enum"} & below.keys() or below.get("format") == "date-time", path
            if below["type"] == "array":
                assert "maxItems" in below, path
            if "additionalProperties" in below:
                assert "maxProperties" in below, path


def test_no_rule_costs_more_than_the_api_server_allows(schema: dict[str, Any]) -> None:
    found = dict(costs(schema))
    assert max(found.values()) < SHARE * RULE_LIMIT, max(found, key=lambda path: found[path])
    assert sum(found.values()) < SHARE * DEFINITION_LIMIT


def test_the_committed_files_are_fresh_and_a_stale_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert crd.main(["--check"]) == 0
    (tmp_path / "crds").mkdir()
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(crd, "ROOT", tmp_path)
    assert crd.main(["--write"]) == crd.main(["--check"]) == 0
    for name in crd.generate():
        (tmp_path / name).write_text("old")
        assert crd.main(["--check"]) == 1
        assert crd.main(["--write"]) == 0


@pytest.mark.parametrize(
    "emptied", [{}, {"engine": {"accelerator": {}, "podTemplate": {}}, "hash": {}, "disk": {"budget": {}}}]
)
def test_what_the_api_server_fills_in_is_what_the_operator_assumes(
    schema: dict[str, Any], emptied: dict[str, Any]
) -> None:
    bare, stored = (yaml.safe_load(MINIMAL.read_text()) for _ in range(2))
    stored["spec"] |= emptied
    set_defaults(stored, schema)
    assert stored != bare
    assert parse(stored) == parse(bare)
    assert not emptied or stored["spec"]["engine"]["accelerator"] == {"resource": "nvidia.com/gpu"}


def test_scale_and_columns_point_at_fields_that_exist(definition: dict[str, Any], schema: dict[str, Any]) -> None:
    version = definition["spec"]["versions"][0]
    known = {path for path, _, _ in walk(schema)} | {"metadata.creationTimestamp"}
    paths = [*version["subresources"]["scale"].values(), *(c["jsonPath"] for c in version["additionalPrinterColumns"])]
    for path in paths:
        assert re.sub(r"\[\?\(.*?\)\]", "[]", path).lstrip(".") in known, path


def test_every_condition_and_every_reason_has_its_place_on_the_page() -> None:
    assert tuple(SECTIONS) == CONDITIONS
    assert {each.kind for part in PARTS for each in part.conditions} < set(CONDITIONS)
    placed = {reason for group in SECTIONS.values() for reason in group}
    assert placed | set(COMMON) == {each.value for each in Reason}
    assert all(f"`{each}`: " in PAGE for each in COMMON)
    assert all(meaning.endswith(".") for group in SECTIONS.values() for meaning, _ in group.values())


def test_the_reference_has_a_row_for_every_field(schema: dict[str, Any]) -> None:
    page = crd.generate()["crds/API.md"]
    for path, _, _ in walk(schema["properties"]["spec"], "spec"):
        leaf = path.rsplit(".", 1)[-1].removesuffix("[]")
        assert f"`{leaf}`" in page or leaf in {"spec", "*"}, path


def test_children_of_the_longest_name_fit_into_a_dns_label() -> None:
    tier = names.TierRef(namespace="default", name="a" * LONGEST_NAME, uid="1")
    assert all(len(child) <= 63 for child in (names.engine(tier), names.config(tier), names.claim(tier)))
