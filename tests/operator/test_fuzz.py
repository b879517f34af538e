# SPDX-License-Identifier: Apache-2.0
"""Nonsense in a tier: the operator never crashes, never loops, and names the field."""

from __future__ import annotations

import copy
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from definition import tier_definition
from fake_cluster import FakeCluster
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live import APPS, TIERS, Client, body, running
from tiers import TIER, TIER_KEY, tier
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.reconcile import Inputs, reconcile

FULL = yaml.safe_load((Path(__file__).parents[2] / "crds" / "samples" / "full.yaml").read_text())["spec"]
CRD = tier_definition()
SPEC = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
NOW = datetime(2026, 11, 21, tzinfo=UTC)
MOST_PASSES = 6

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(
        ["", "0", "-1", "1Ti", "64Gi", "999999999999999999999Ei", "1e400", "90%", "NaN", "\0", "a" * 300, "☃"]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def from_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that are shaped like the schema asks for, with amounts and words that seldom are."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: from_schema(each) for name, each in schema["properties"].items()}
        required = {name: fields[name] for name in schema.get("required", ()) if name in fields}
        optional = {name: each for name, each in fields.items() if name not in required}
        return st.fixed_dictionaries(required, optional=optional)
    if kind == "object":
        return st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers(), max_size=2)
    if kind == "array":
        return st.lists(from_schema(schema.get("items", {})), max_size=2)
    if kind == "integer":
        return st.integers(schema.get("minimum", -3), schema.get("maximum", 2**40))
    if kind == "boolean":
        return st.booleans()
    if kind == "string":
        return st.sampled_from(["", "a", "1Gi", "64Gi", "10%", "168h", "auto", "x/y", "model-1"]) | st.text(max_size=8)
    return JSON


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        found += places(below, (*path, key))
    return found


def put(body: Any, path: tuple[str | int, ...], value: Any) -> Any:
    changed = copy.deepcopy(body)
    at = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return changed


def passes_until_quiet(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Reconcile as the work queue does until a pass writes nothing; return how many passes that took, and the tier."""
    cluster = FakeCluster(body)
    for number in range(1, MOST_PASSES + 1):
        before = len(cluster.writes())
        reconcile(cluster, TIER, Inputs(connector_image="c:1", clock=lambda: NOW))
        changed = [call for call in cluster.writes()[before:] if call[0] != "apply"]
        if not changed:
            found = cluster.look(TIER_KEY)
            assert found is not None
            return number, found
    return MOST_PASSES + 1, {}


def check(spec: Any) -> None:
    body = {**tier(), "spec": spec}
    count, found = passes_until_quiet(body)
    assert count <= MOST_PASSES, "the operator goes on and on"
    ready = {each["type"]: each for each in found["status"]["conditions"]}["Ready"]
    invalid = _invalid(body)
    if invalid is not None:
        assert ready["reason"] == "SpecInvalid"
        assert ready["message"].startswith(invalid.field)
        assert re.match(r"^spec\b", invalid.field)


def _invalid(body: dict[str, Any]) -> SpecInvalid | None:
    try:
        parse(body)
    except SpecInvalid as error:
        return error
    return None


ANY_SPEC = from_schema(SPEC) | st.builds(put, st.just(FULL), st.sampled_from(places(FULL)), JSON) | JSON
"""What is shaped as the schema asks for, what has one value that is nonsense, and anything at all."""


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ANY_SPEC)
@example(None)
@example([])
@example({"model": {"name": "m"}, "cpu": {"size": "9" * 5000}})
def test_whatever_stands_for_a_spec_is_served_or_refused_by_its_field(spec: Any) -> None:
    check(spec)


NONSENSE: tuple[Any, ...] = (
    None,
    [],
    "spec",
    {},
    {"model": None},
    {"model": {"name": 7}},
    {"model": {"name": "m"}, "cpu": {"size": "lots"}},
    {**tier()["spec"], "replicas": -1},
    {**tier()["spec"], "replicas": 2**40},
    {**tier()["spec"], "engine": {"args": [[["--x"]]]}},
    {**tier()["spec"], "engine": {"podTemplate": {"nodeSelector": ["a"]}}},
    {**tier()["spec"], "volume": {"claim": {"size": "-1Gi"}}},
    {**tier()["spec"], "unknown": {"deep": [1, 2, {"3": None}]}},
    {**tier()["spec"], "disk": {"budget": {"maxBytes": "99999999999999999999999Ei"}}},
)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An API server whose CRD lets everything through, as one of another version might."""
    crd = copy.deepcopy(CRD)
    # Rules of the whole resource look into the spec that is taken out.
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].pop("x-kubernetes-validations")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["spec"] = {"x-kubernetes-preserve-unknown-fields": True}
    with ApiServerThread() as server:
        server.create(crd)
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


def test_a_running_operator_outlives_nonsense_and_comes_to_rest(api: ApiServerThread) -> None:
    kubectl = Client(api.url)
    with running() as metrics:

        def passes() -> float:
            return sum(
                metrics.registry.get_sample_value("kvtier_operator_reconcile_total", {"outcome": outcome}) or 0
                for outcome in ("ok", "failed")
            )

        for number, spec in enumerate(NONSENSE):
            kubectl.apply_tier({**body(f"n{number}"), "spec": spec})
        for number in range(len(NONSENSE)):
            until(lambda name=f"n{number}": kubectl.condition("Ready", name))
        kubectl.apply_tier(body("good"))
        until(lambda: kubectl.get(APPS, "deployments", "good-engine"))
        # Each was looked at when it came and when its status was written, and a few times more at most.
        assert passes() < 6 * (len(NONSENSE) + 4)
    for number in range(len(NONSENSE)):
        ready = kubectl.condition("Ready", f"n{number}")
        assert (ready["reason"], ready["message"].startswith("spec")) == ("SpecInvalid", True), NONSENSE[number]
    assert {item["metadata"]["name"] for item in kubectl.items(TIERS, "kvcachetiers")} >= {"good"}
