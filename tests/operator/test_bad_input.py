# SPDX-License-Identifier: Apache-2.0
"""What users read when they apply what cannot work: from the API server and from the operator, field by field."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_localcluster.apiserver.admission.validation import Validator
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.resources import Registry, Resource
from kvtier_operator.api import TierSpec, connector_spec, crd, parse
from kvtier_operator.api.pod_template import REFUSED
from kvtier_operator.errors import SpecInvalid

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
    with pytest.raises(SpecInvalid) as refused:
        parse(body)
    found = refused.value.field, refused.value.message
    assert server.refusals(body) == [found]
    return found


BAD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad["mistake"])
def test_a_mistake_is_refused_with_the_field_and_the_remedy(bad: dict[str, Any], server: Admission) -> None:
    body = tier(bad["set"])

    refusals = server.refusals(body)
    with pytest.raises(SpecInvalid) as refused:
        parse(body)

    assert (refused.value.field, refused.value.message) == (bad["at"], bad["says"])
    if bad.get("admitted"):
        assert refusals == []
        return
    at = "<root>" if bad["at"] == "metadata.name" else bad.get("server_at", bad["at"])
    assert (at, bad.get("server", bad["says"])) in refusals
    assert len(refusals) == 1 or bad["at"] == "metadata.name", refusals


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


ENCODER = (
    "is that of an encoder-decoder model: vLLM has no prefix cache for one and starts none with a KV connector; serve "
    "it without a KVCacheTier"
)


@pytest.mark.parametrize(("changes", "at", "says"), TABLES["offline"])
def test_what_is_read_offline_is_refused_as_by_a_strict_server(changes: Mapping[str, Any], at: str, says: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        parse(tier(changes))
    assert (refused.value.field, refused.value.message) == (at, says)


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
EXISTING = {"spec.volume": {"existingClaim": "kv"}}


@pytest.mark.parametrize(
    ("before", "after", "at", "says"),
    [
        ({}, {"spec.volume.claim.size": "1Ti"}, "spec.volume.claim.size", SHRINK),
        ({}, {"spec.volume.claim.accessModes": ["ReadWriteOnce"]}, "spec.volume.claim.accessModes", "{} " + MOVE),
        ({}, {"spec.volume.claim.storageClassName": "nfs"}, "spec.volume.claim", "{}.storageClassName " + MOVE),
        (
            {"spec.volume.claim.storageClassName": "cephfs"},
            {"spec.volume.claim.storageClassName": "nfs"},
            "spec.volume.claim",
            "{}.storageClassName " + MOVE,
        ),
        ({"spec.volume.claim.storageClassName": "cephfs"}, {}, "spec.volume.claim", "{}.storageClassName " + MOVE),
        ({}, {"spec.volume.path": "kv"}, "spec.volume.path", "{} " + MOVE),
        ({"spec.volume.path": "kv"}, {}, "spec.volume.path", "{} " + MOVE),
        (EXISTING, {"spec.volume": {"existingClaim": "other"}}, "spec.volume.existingClaim", "{} " + MOVE),
        (EXISTING, {}, "spec.volume", "the choice between spec.volume.claim and spec.volume.existingClaim " + MOVE),
        ({}, EXISTING, "spec.volume", "the choice between spec.volume.claim and spec.volume.existingClaim " + MOVE),
    ],
)
def test_the_place_of_the_blocks_cannot_change(
    before: Mapping[str, Any], after: Mapping[str, Any], at: str, says: str, server: Admission
) -> None:
    assert server.refusals(tier(after), tier(before)) == [(at, says.format(at))]


@pytest.mark.parametrize(("before", "after"), TABLES["edits"])
def test_everything_else_can_change(before: Mapping[str, Any], after: Mapping[str, Any], server: Admission) -> None:
    assert server.refusals(tier(after), tier(before)) == []


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
    try:
        parse(body)
        is_refused = False
    except SpecInvalid:
        is_refused = True
    assert bool(server.refusals(body)) == is_refused, body


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
        body = tier({"spec.connector": {"type": "Hybrid", "hybrid": {"nixl": {}}}, f"spec.{path}": value})
        both_take(server, body)


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
    with_volume = tier({"spec.connector": {"type": "SimpleCPU"}})
    without = tier({"spec.connector": {"type": "SimpleCPU"}, "spec.volume": "~remove"})
    assert server.refusals(without) == []
    ((at, message),) = server.refusals(without, with_volume)
    assert at == "spec.volume"
    assert message.startswith("cannot be removed: the claim holds blocks")
    assert server.refusals(with_volume, without) == []


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
