# SPDX-License-Identifier: Apache-2.0
"""An edit is explained as the operator would carry it out: what it discards, what it restarts, and because of what."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_cluster import FakeCluster, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import DEPLOYMENT, NOON, TIER_KEY, tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.gather import gather
from kvtier_operator.parts.edit_impact import explain_edit
from kvtier_operator.plan import diff
from kvtier_operator.plan.report import describe_diff
from kvtier_operator.snapshot import Snapshot

TIER = names.tier_ref(tier())


def explain(before: dict[str, Any], after: dict[str, Any], *, warm_bytes: int | None = None) -> diff.Diff:
    return explain_edit(parse(tier(**before)), parse(tier(**after)), TIER, connector_image="c:1", warm_bytes=warm_bytes)


EDITS: list[tuple[dict[str, Any], bool, bool]] = [
    ({"model": {"revision": "abc"}}, True, True),
    ({"engine": {"tensorParallel": 2, "accelerator": {"perPod": 2}}}, True, True),
    ({"engine": {"args": ["--max-num-seqs", "8"]}}, False, True),
    ({"engine": {"args": ["--dtype", "float16"]}}, True, True),
    ({"cpu": {"size": "32Gi"}}, False, True),
    ({"disk": {"splitHits": "Off"}}, False, True),
    ({"hash": {"seed": "1"}}, True, True),
    ({"connector": {"type": "VLLMTiering"}}, True, True),
    ({"replicas": 5}, False, False),
    ({"paused": True}, False, False),
    ({"volume": {"claim": {"size": "3Ti"}}}, False, False),
    ({}, False, False),
]


@pytest.mark.parametrize(("edit", "discards", "restarts"), EDITS, ids=[str(edit) for edit, _, _ in EDITS])
def test_an_edit_discards_and_restarts_what_the_operator_would(
    edit: dict[str, Any], discards: bool, restarts: bool
) -> None:
    found = explain({}, edit)
    assert found.discards_cache is discards
    assert found.restarted_pods == (2 if restarts else 0)
    assert any(change.is_new_generation for change in found.changes) is discards
    assert any(change.is_restart for change in found.changes) is restarts


def test_only_the_fields_that_cost_something_are_blamed() -> None:
    found = explain({}, {"model": {"revision": "abc"}, "replicas": 3, "cpu": {"size": "32Gi"}}, warm_bytes=3 << 39)
    discarding, restarting = diff.warnings(found)
    assert "(1.5 TiB on the volume)" in discarding
    assert "engines with spec.model.revision;" in discarding
    assert restarting == "replaces 2 engine pods, one after another: spec.model.revision, spec.cpu.size changed"
    together = explain({}, {"engine": {"tensorParallel": 2, "accelerator": {"perPod": 2}}})
    assert "spec.engine.tensorParallel" in {change.field for change in together.changes if change.is_new_generation}


def test_a_field_that_goes_is_told_as_absent() -> None:
    found = explain({"disk": {"budget": {"maxBytes": "1Ti"}}}, {})
    assert [(change.field, change.before, change.after) for change in found.changes] == [
        ("spec.disk.budget.maxBytes", "1Ti", None)
    ]


def test_a_share_of_nodes_that_nobody_shows_is_compared_as_a_share() -> None:
    half, same, more = ({"cpu": {"size": None, "fraction": share}, "replicas": 2} for share in ("50%", "50%", "60%"))
    assert explain(half, {**same, "replicas": 3}).restarted_pods == 0
    assert explain(half, more).restarted_pods == 2
    assert explain({}, half).restarted_pods == 2
    assert not explain({}, half).discards_cache


def test_what_cannot_be_carried_out_is_not_explained() -> None:
    with pytest.raises(SpecInvalid, match="blockTokens: 96 is no multiple of the 64 tokens"):
        explain({}, {"disk": {"blockTokens": 96}, "engine": {"args": ["--block-size=64"]}})


def test_another_image_keeps_the_cache_where_its_engines_verify_it() -> None:
    verified = {"generations": {"acrossReleases": "Verified"}}
    found = explain(verified, {**verified, "engine": {"image": "vllm/vllm-openai:v0.33.0"}})
    kept, replaced = diff.warnings(found)
    assert not found.discards_cache
    assert kept.startswith("keeps the cache, verified at the first start")
    assert "spec.engine.image" in replaced


def test_an_edit_that_costs_nothing_warns_of_nothing() -> None:
    assert diff.warnings(explain({}, {"replicas": 3})) == ()


@pytest.fixture
def upgraded() -> Snapshot:
    """Return what stands of a tier whose engines an earlier operator made, which had another generation of blocks."""
    cluster = FakeCluster(tier())
    run(cluster, image="c:0")
    live = cluster.look(DEPLOYMENT)
    note = json.loads(live["metadata"]["annotations"][names.ANNOTATION_RENDERED])
    note["config"] = json.dumps({**json.loads(note["config"]), "digest": "feed"})
    cluster.edit(DEPLOYMENT, {"metadata": {"annotations": {names.ANNOTATION_RENDERED: json.dumps(note)}}})
    return gather(cluster, cluster.look(TIER_KEY), now=NOON)


def explain_live(snapshot: Snapshot, after: dict[str, Any], restart: str = "") -> diff.Diff:
    edited = parse(tier(**after))
    return explain_edit(parse(tier()), edited, TIER, connector_image="c:1", snapshot=snapshot, restart=restart)


def test_an_edit_that_replaces_outdated_engines_says_what_the_upgrade_changes(upgraded: Snapshot) -> None:
    found = explain_live(upgraded, {"engine": {"args": ["--max-num-seqs", "8"]}})
    assert (found.restarted_pods, found.discards_cache, found.generation) == (2, True, "feed")
    told = "\n".join(diff.warnings(found))
    assert "blocks of generation feed" in told
    assert "the image of install-connector from c:0 to c:1" in told


def test_an_edit_that_replaces_no_pod_leaves_outdated_engines_and_their_cache(upgraded: Snapshot) -> None:
    found = explain_live(upgraded, {"replicas": 3, "disk": {"mode": "Bypass"}})
    assert (found.restarted_pods, found.discards_cache, found.generation) == (0, False, "feed")
    assert diff.warnings(found) == ()


def test_a_restart_that_is_asked_for_counts_as_an_edit(upgraded: Snapshot) -> None:
    found = explain_live(upgraded, {}, restart="now")
    assert (found.changes, found.restarted_pods) == ((), 2)
    assert "replaces 2 engine pods" in describe_diff("llama", found)


@settings(deadline=None)
@given(before=st.sampled_from([edit for edit, _, _ in EDITS]), after=st.sampled_from([edit for edit, _, _ in EDITS]))
def test_going_back_costs_what_going_forth_cost(before: dict[str, Any], after: dict[str, Any]) -> None:
    there, back = explain(before, after), explain(after, before)
    assert there.discards_cache == back.discards_cache
    assert (there.generation, there.new_generation) == (back.new_generation, back.generation)
    assert bool(there.changes) == (before != after)


def test_the_warm_bytes_are_those_of_the_current_generation() -> None:
    generations = [{"digest": "old", "usedBytes": 1}, {"digest": "now", "usedBytes": 2}]
    assert diff.warm_bytes({"generation": {"current": "now"}, "generations": generations}) == 2
    assert diff.warm_bytes({"tiers": [{"name": "cpu", "usedBytes": 1}, {"name": "disk", "usedBytes": 3}]}) == 3
    assert diff.warm_bytes({}) is None
