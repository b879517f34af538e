# SPDX-License-Identifier: Apache-2.0
"""The definition is one that real API servers take, is what the models say, and those accept every stored spec."""

from __future__ import annotations

import copy
import json
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
from kvtier_operator import __version__, names
from kvtier_operator.api import crd, parse
from kvtier_operator.api.reasons import CONDITIONS, Reason
from kvtier_operator.api.tier_spec import LONGEST_NAME
from kvtier_operator.names import tier_ref
from kvtier_operator.parts import PARTS
from kvtier_operator.plan import make_unchecked_plan

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
def test_each_supported_kubernetes_knows_all_fields_of_the_definition(definition: dict[str, Any], version: str) -> None:
    kubernetes_schemas.validate(definition, version)


def test_the_schema_is_structural_and_its_rules_compile(definition: dict[str, Any]) -> None:
    assert structural_problems(definition) == []


def test_defaults_keep_to_the_rules_and_fields_have_a_sentence_each(schema: dict[str, Any]) -> None:
    for path, below, _ in walk(schema):
        if "default" in below:
            default = below["default"]
            assert rule_problems(default, None, below, path) + rule_problems(default, default, below, path) == [], path
    for top in ("spec", "status"):
        for path, below, _ in walk(schema["properties"][top], top):
            if not path.endswith(("[]", ".*")) or "properties" in below:
                assert below.get("description", "").endswith("."), path
                assert "\n" not in below["description"], path


def test_every_value_is_bounded_so_that_no_rule_costs_more_than_is_allowed(schema: dict[str, Any]) -> None:
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
    found = dict(costs(schema))
    assert max(found.values()) < SHARE * RULE_LIMIT, max(found, key=lambda path: found[path])
    assert sum(found.values()) < SHARE * DEFINITION_LIMIT


def test_committed_files_are_fresh_and_a_stale_one_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_the_operator_assumes_what_the_api_server_fills_in(schema: dict[str, Any], emptied: dict[str, Any]) -> None:
    bare, stored = copy.deepcopy(MINIMAL), copy.deepcopy(MINIMAL)
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
        assert {*re.findall(r'@\.type=="(\w+)"', path)} <= {*CONDITIONS}, path


def test_every_condition_and_every_reason_has_its_place_on_the_page() -> None:
    assert tuple(SECTIONS) == CONDITIONS
    assert {each.kind for part in PARTS for each in part.conditions} < set(CONDITIONS)
    assert {reason for group in SECTIONS.values() for reason in group} | set(COMMON) == {each.value for each in Reason}
    assert all(f"`{each}`: " in PAGE for each in COMMON)
    assert all(meaning.endswith(".") for group in SECTIONS.values() for meaning, _ in group.values())


def test_the_reference_has_a_row_for_every_field(schema: dict[str, Any]) -> None:
    page = crd.generate()["crds/API.md"]
    for path, _, _ in walk(schema["properties"]["spec"], "spec"):
        leaf = path.rsplit(".", 1)[-1].removesuffix("[]")
        assert f"`{leaf}`" in page or leaf in {"spec", "*"}, path


def test_the_minimal_sample_is_short_and_children_of_the_longest_name_fit_into_a_label() -> None:
    tier = names.TierRef(namespace="default", name="a" * LONGEST_NAME, uid="1")
    assert all(len(child) <= 63 for child in (names.engine(tier), names.config(tier), names.claim(tier)))
    assert len((SAMPLES / "minimal.yaml").read_text().splitlines()) <= 12


SAMPLES = Path(__file__).parents[2] / "crds" / "samples"
MINIMAL, FULL = (yaml.safe_load((SAMPLES / f"{name}.yaml").read_text()) for name in ("minimal", "full"))


def test_the_full_sample_has_every_field() -> None:
    def unset(value: Any, path: str) -> list[str]:
        if not hasattr(value, "model_fields_set"):
            return []
        return [f"{path}.{name}" for name in type(value).model_fields if name not in value.model_fields_set] + [
            gap for name in value.model_fields_set for gap in unset(getattr(value, name), f"{path}.{name}")
        ]

    # Only one of the two claims, of the two ways to size the CPU tier, of the two budgets, of the two places of
    # prompts, of two ways to route, and of two owners of engines, can be given; the settings of other connectors stand
    # in samples of their own; and who applies the sample has no operator of a class.
    assert sorted(unset(parse(FULL), "spec")) == [
        *(f"spec.connector.{name}" for name in ("custom", "flex_kv", "hybrid", "lmcache", "mooncake", "simple_cpu")),
        "spec.connector.vllm_offloading",
        "spec.connector.vllm_tiering",
        "spec.cpu.fraction",
        "spec.engine.disruption_budget.min_available",
        "spec.engine.external",
        "spec.operator_class_name",
        "spec.routing.client_ip",
        "spec.volume.existing_claim",
    ]


def test_a_null_is_a_field_left_out_and_a_spec_survives_a_round_trip_through_json() -> None:
    body = copy.deepcopy(MINIMAL)
    body["spec"] |= {"replicas": None, "engine": {"args": None, "podTemplate": None}, "hash": {"seed": None}}
    body["spec"]["volume"] |= {"existingClaim": None, "path": None}
    assert parse(body) == parse(MINIMAL)
    spec = parse(FULL)
    assert parse({"spec": spec.to_manifest()}) == spec


FOLDER = Path(__file__).parent / "stored_specs"
"""VERSION.json holds the golden specs of a release, one a line. That of the version in work follows the golden tiers
(``pytest --update-golden``); the others never change again."""
GOLDEN = Path(__file__).parent / "golden"
STORED = [
    pytest.param(json.loads(line), id=f"{file.stem}-{json.loads(line)['metadata']['name']}-{number}")
    for file in sorted(FOLDER.glob("*.json"))
    for number, line in enumerate(file.read_text().splitlines())
]


def test_the_specs_of_this_version_are_kept(request: pytest.FixtureRequest) -> None:
    bodies = [yaml.safe_load((folder / "tier.yaml").read_text()) for folder in sorted(GOLDEN.iterdir())]
    text = "".join(f"{json.dumps(body, sort_keys=True)}\n" for body in bodies)
    kept = FOLDER / f"{__version__}.json"
    if request.config.getoption("--update-golden"):
        kept.write_text(text)
    assert kept.read_text() == text


@pytest.mark.parametrize("body", STORED)
def test_a_spec_that_a_release_stored_is_accepted_and_planned(body: dict[str, Any]) -> None:
    assert make_unchecked_plan(parse(body), tier_ref(body), connector_image="connector:test")
