# SPDX-License-Identifier: Apache-2.0
"""`parse` turns what users write into numbers, and accepts every spec that an earlier release stored.

`stored_specs/VERSION.json` holds the golden specs of a release, one a line. That of the version in work follows the
golden tiers (``pytest --update-golden``); the others never change again.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator import __version__
from kvtier_operator.api import parse
from kvtier_operator.names import tier_ref
from kvtier_operator.plan import make_unchecked_plan

SAMPLES = Path(__file__).parents[2] / "crds" / "samples"
MINIMAL, FULL = (yaml.safe_load((SAMPLES / f"{name}.yaml").read_text()) for name in ("minimal", "full"))


def test_the_minimal_sample_is_short_and_has_the_documented_defaults() -> None:
    assert len((SAMPLES / "minimal.yaml").read_text().splitlines()) <= 12
    spec = parse(MINIMAL)
    assert (spec.replicas, spec.paused, spec.model.revision, spec.model.token_secret_ref) == (1, False, "main", None)
    assert (spec.engine.image, spec.engine.tensor_parallel) == ("vllm/vllm-openai:v0.32.0", 1)
    assert (spec.engine.accelerator.resource, spec.engine.accelerator.per_pod) == ("nvidia.com/gpu", 1)
    assert (spec.engine.memory, spec.engine.memory_bytes, spec.engine.cpu) == ("16Gi", 16 << 30, "4")
    assert (spec.hash.seed, spec.hash.algorithm) == ("0", "sha256_cbor")
    assert (spec.cpu.size_bytes, spec.cpu.eviction_policy, spec.cpu.offload_prompt_only) == (4 << 30, "lru", True)
    assert (spec.volume.claim.size_bytes, spec.volume.claim.access_modes) == (20 << 30, ("ReadWriteOnce",))
    assert (spec.volume.existing_claim, spec.volume.path, spec.volume.deletion_policy) == (None, "", "Retain")
    assert spec.disk.mode == "ReadWrite"
    budget = spec.disk.budget
    assert (budget.max_bytes, budget.min_bytes, budget.ttl_seconds) == (None, None, 7 * 24 * 3600)
    assert (budget.high_fraction, budget.low_fraction, budget.min_free_fraction) == (0.9, 0.75, 0.05)
    assert (spec.generations.keep_previous, spec.janitor.enabled, spec.janitor.image) == (1, True, None)


def test_the_full_sample_has_every_field() -> None:
    def unset(value: Any, path: str) -> list[str]:
        if not hasattr(value, "model_fields_set"):
            return []
        missing = [f"{path}.{name}" for name in type(value).model_fields if name not in value.model_fields_set]
        return missing + [
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


def test_a_null_is_a_field_left_out() -> None:
    body = copy.deepcopy(MINIMAL)
    body["spec"] |= {"replicas": None, "engine": {"args": None, "podTemplate": None}, "hash": {"seed": None}}
    body["spec"]["volume"] |= {"existingClaim": None, "path": None}
    assert parse(body) == parse(MINIMAL)


def test_a_spec_survives_a_round_trip_through_json() -> None:
    spec = parse(FULL)
    assert parse({"spec": spec.to_manifest()}) == spec


FOLDER = Path(__file__).parent / "stored_specs"
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
