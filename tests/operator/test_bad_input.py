# SPDX-License-Identifier: Apache-2.0
"""What users read when they apply what cannot work, field by field; the operator outlives any nonsense in a tier."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import tiers
import yaml
from definition import tier_definition
from fake_cluster import FakeCluster
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live import APPS, TIERS, Client, body, running
from tiers import TIER, TIER_KEY
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.admission.validation import Validator
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.resources import Registry, Resource
from kvtier_operator.api import TierSpec, connector_spec, crd, parse
from kvtier_operator.api.parse import document
from kvtier_operator.api.pod_template import REFUSED
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.plan import diff
from kvtier_operator.reconcile import Inputs, reconcile

TABLES = yaml.safe_load(Path(__file__).with_name("good_input.yaml").read_text())

GOLDEN = Path(__file__).parent / "golden"
ABSENT = "~remove"


class Admission:
    """The admission of the local API server: what `kubectl apply` would be answered."""

    def __init__(self) -> None:
        registry = Registry()
        registry.sync_crd(crd.definition(), is_deleted=False)
        self.resource: Resource = registry.named("kvcachetiers")
        self.validator = Validator()

    def refusals(self, new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
        """Return the field and message of every cause of a refusal; empty where the object is accepted."""
        stored = copy.deepcopy(old)
        if stored is not None:
            self.validator.settle(self.resource, stored, None, field_validation="Strict")
        try:
            self.validator.settle(self.resource, copy.deepcopy(new), stored, field_validation="Strict")
        except ApiError as error:
            causes = error.status()["details"].get("causes")
            if causes is None:
                return [("", error.status()["message"])]
            return [(cause["field"], cause["message"].removeprefix("Invalid value: ")) for cause in causes]
        return []


@pytest.fixture(scope="module")
def server() -> Admission:
    return Admission()


def tier(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a good body with some fields set (`spec.engine.args`) or removed."""
    body = yaml.safe_load((GOLDEN / "minimal" / "tier.yaml").read_text())
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        at = body
        for name in parents:
            at = at.setdefault(name, {})
        if value == ABSENT:
            del at[last]
        else:
            at[last] = value
    return body


def both_take(server: Admission, body: dict[str, Any]) -> TierSpec:
    """Return the spec of a body that API server and operator accept."""
    assert server.refusals(body) == []
    return parse(body)


def both_refuse(server: Admission, body: dict[str, Any]) -> tuple[str, str]:
    """Return the field and the message by which API server and operator refuse a body."""
    refused = _invalid(body)
    assert refused is not None
    found = refused.field, refused.message
    assert server.refusals(body) == [found]
    return found


BAD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad["mistake"])
def test_a_mistake_is_refused_with_the_field_and_the_remedy(bad: dict[str, Any], server: Admission) -> None:
    body = tier(bad["set"])
    refusals, refused = server.refusals(body), _invalid(body)
    assert refused is not None
    assert (refused.field, refused.message) == (bad["at"], bad["says"])
    if bad.get("admitted"):
        assert refusals == []
        return
    at = "<root>" if bad["at"] == "metadata.name" else bad.get("server_at", bad["at"])
    assert (at, bad.get("server", bad["says"])) in refusals
    assert len(refusals) == 1 or bad["at"] == "metadata.name", refusals


def test_off_without_quotes_is_told_to_be_a_boolean() -> None:
    says = "must be 'Auto' or 'Off' in quotes: YAML takes On and Off without them for booleans"
    assert _invalid(tier({"spec.disk.splitHits": False})).message == says


@pytest.mark.parametrize("path", REFUSED, ids=".".join)
def test_the_template_cannot_change_what_the_operator_sets(path: tuple[str, ...], server: Admission) -> None:
    values = {"image": "mine:1", "command": ["sh"], "args": ["--port=1"], "env": [], "volumeMounts": []}
    value: Any = values.get(path[-1], "1Gi" if path[0] == "resources" else {})
    for key in reversed(path):
        value = {key: value}
    body = tier({"spec.engine.podTemplate.containers": [{"name": "engine", **value}]})
    says = f"{'.'.join(path)} of the container engine is not yours to set here: {REFUSED[path]}"
    assert both_refuse(server, body) == ("spec.engine.podTemplate.containers", says)


@pytest.mark.parametrize(
    "context",
    [
        {"runAsUser": 0, "runAsNonRoot": False},
        {"runAsUser": 1000},
        {"runAsNonRoot": False},
        {"fsGroup": 0, "seLinuxOptions": {"level": "s0"}},
    ],
    ids=str,
)
def test_who_the_pods_run_as_is_kept_as_it_was_written(context: dict[str, Any], server: Admission) -> None:
    body = tier({"spec.engine.podTemplate.securityContext": context})
    assert both_take(server, body).engine.pod_template.security_context == context


@pytest.mark.parametrize(("changes", "at", "says"), TABLES["offline"])
def test_what_is_read_offline_is_refused_as_by_a_strict_server(changes: Mapping[str, Any], at: str, says: str) -> None:
    refused = _invalid(tier(changes))
    assert refused is not None
    assert (refused.field, refused.message) == (at, says)


GOOD = TABLES["accepted"]


@pytest.mark.parametrize("changes", GOOD, ids=str)
def test_what_can_work_is_accepted(changes: Mapping[str, Any], server: Admission) -> None:
    both_take(server, tier(changes))


SHRINK = (
    "cannot shrink, because a PersistentVolumeClaim cannot: restore the old size; to use less of it, set "
    "spec.disk.budget.maxBytes"
)
MOVE = (
    "cannot change after creation: create another KVCacheTier for the new place and delete this one when its blocks "
    "are no longer needed"
)


def refusals_told(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what `kvtier plan --diff` tells of refusals, by changed field."""
    found = diff.differences(*(document(parse(tier(changes))) for changes in (before, after)))
    return [diff.why_refused(".".join(path), was, becomes) for path, was, becomes in found]


@pytest.mark.parametrize(("before", "after", "at", "says"), TABLES["moves"])
def test_the_place_of_the_blocks_cannot_change(
    before: Mapping[str, Any], after: Mapping[str, Any], at: str, says: str, server: Admission
) -> None:
    assert server.refusals(tier(after), tier(before)) == [(at, says.format(at=at, move=MOVE, shrink=SHRINK))]
    assert any(refusals_told(before, after))


@pytest.mark.parametrize(("before", "after"), TABLES["edits"])
def test_everything_else_can_change(before: Mapping[str, Any], after: Mapping[str, Any], server: Admission) -> None:
    assert server.refusals(tier(after), tier(before)) == []
    assert not any(refusals_told(before, after))


TEXTS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=12)
VALUES = (
    TEXTS
    | st.integers()
    | st.booleans()
    | st.lists(TEXTS, max_size=2)
    | st.dictionaries(TEXTS, TEXTS, max_size=2)
    | st.sampled_from(["1Gi", "none", "0", "4", "Delete", "a/b", "--port", "-tp"])
)


def fields(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, below in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from fields(below, f"{path}.{name}")


BY_THE_OPERATOR_ALONE = {f"spec.engine.disruptionBudget.{each}" for each in ("maxUnavailable", "minAvailable")}
FIELDS = sorted({*fields(crd.structural_schema(TierSpec), "spec")} - BY_THE_OPERATOR_ALONE)


@settings(max_examples=600, deadline=None)
@given(path=st.sampled_from(FIELDS), value=VALUES)
def test_the_operator_refuses_just_what_the_api_server_refuses(path: str, value: Any, server: Admission) -> None:
    body = tier({path: value})
    assert bool(server.refusals(body)) == (_invalid(body) is not None), body


NATIVE = ("Bundled", "VLLMOffloading", "VLLMTiering")
ALL = (*NATIVE, "SimpleCPU", "LMCache")
BY_FIELD: dict[str, Any] = TABLES["by_field"]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("path", connector_spec.LIMITED)
def test_a_field_is_honoured_or_refused_by_name(path: str, kind: str, server: Admission) -> None:
    body = tier({"spec.connector": {"type": kind}, f"spec.{path}": BY_FIELD[path]})
    if path in next(row for row in connector_spec.KINDS if row.type == kind).honours:
        both_take(server, body)
        return
    at, message = both_refuse(server, body)
    assert at == f"spec.{path}"
    assert "is not honoured by this spec.connector.type" in message
    assert "Bundled" in message


def test_behind_nixl_kvtiers_own_connector_honours_what_it_always_does(server: Admission) -> None:
    for path, value in BY_FIELD.items():
        both_take(server, tier({"spec.connector": {"type": "Hybrid", "hybrid": {"nixl": {}}}, f"spec.{path}": value}))


ON_DISK = {"localDisk": {"size": "100Gi"}}


@pytest.mark.parametrize(
    ("connector", "at"),
    [
        ({"type": "LMCache", "lmcache": ON_DISK}, "spec.connector.lmcache.localDisk"),
        ({"type": "Hybrid", "hybrid": {"lmcache": ON_DISK}}, "spec.connector.hybrid.lmcache.localDisk"),
    ],
)
@pytest.mark.parametrize(("args", "is_taken"), TABLES["data_parallel"], ids=str)
def test_engine_cores_of_one_pod_do_not_write_into_one_directory(
    connector: dict[str, Any], at: str, args: list[str], is_taken: bool, server: Admission
) -> None:
    body = tier({"spec.connector": connector, "spec.engine.args": args})
    if is_taken:
        both_take(server, body)
        return
    found, message = both_refuse(server, body)
    assert (found, "raise spec.replicas instead" in message) == (at, True)


def test_a_volume_cannot_be_taken_away_and_may_be_added(server: Admission) -> None:
    simple: dict[str, Any] = {"spec.connector": {"type": "SimpleCPU"}}
    bare = {**simple, "spec.volume": ABSENT}
    with_volume, without = tier(simple), tier(bare)
    assert server.refusals(without) == []
    ((at, message),) = server.refusals(without, with_volume)
    assert at == "spec.volume"
    assert message.startswith("cannot be removed: the claim holds blocks")
    assert server.refusals(with_volume, without) == []
    assert (any(refusals_told(simple, bare)), any(refusals_told(bare, simple))) == (True, False)


@pytest.mark.parametrize(("image", "mode", "is_taken"), TABLES["images_of_lmcache"])
def test_an_image_whose_lmcache_cannot_start_its_cache_server_is_refused(
    image: str, mode: str, is_taken: bool, server: Admission
) -> None:
    body = tier({"spec.connector": {"type": "LMCache", "lmcache": {"mode": mode}}, "spec.engine.image": image})
    if is_taken:
        both_take(server, body)
        return
    at, message = both_refuse(server, body)
    assert (at, "LMCache 0.5.6" in message) == ("spec.engine.image", True)


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
    body = {**tiers.tier(), "spec": spec}
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


NONSENSE = [*TABLES["nonsense"], *({**tiers.tier()["spec"], **each} for each in TABLES["nonsense_fields"])]


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
        file = str(server.write_kubeconfig(tmp_path / "kubeconfig"))
        monkeypatch.setenv("KUBECONFIG", file)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", file)
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
