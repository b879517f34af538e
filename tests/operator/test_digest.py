# SPDX-License-Identifier: Apache-2.0
"""A generation is left exactly when its blocks would be wrong, and an edit says what it discards and restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_cluster import FakeCluster, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import DEPLOYMENT, NOON, TIER_KEY, engine_pod, plan_of, tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.gather import gather
from kvtier_operator.parts.edit_impact import explain_edit
from kvtier_operator.plan import TierPlan, decide, diff, digest
from kvtier_operator.plan.report import describe_diff
from kvtier_operator.snapshot import Snapshot


def digest_of(**changes: Any) -> str:
    parsed = parse(tier(**changes))
    decisions = decide(parsed, names.tier_ref(tier()), None)
    return digest.digest(digest.identity(parsed, decisions.chunking.settings()))


def test_the_digest_of_a_tier_never_changes() -> None:
    # Every user's cache is under such a digest: a new value here throws all of them away and belongs in CHANGELOG.md.
    assert digest_of() == "d52b88e792be67e2"


def test_key_order_does_not_matter() -> None:
    assert digest.digest({"a": 1, "b": {"c": [1], "d": None}}) == digest.digest({"b": {"d": None, "c": [1]}, "a": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "meta-llama/Llama-3.2-1B"}},
        {"model": {"revision": "0e9e39f"}},
        {"engine": {"image": "vllm/vllm-openai:v0.32.1"}},
        {"engine": {"accelerator": {"resource": "amd.com/gpu"}}},
        {"engine": {"accelerator": {"perPod": 2}, "tensorParallel": 2}},
        {"engine": {"args": ["--kv-cache-dtype=fp8"]}},
        {"engine": {"args": ["--kv_cache_dtype", "fp8"]}},
        {"engine": {"args": ["--hf-overrides.rope_theta", "5e5"]}},
        {"engine": {"args": ["--max-model-len", "131072"]}},
        {"engine": {"args": ["--disable-hybrid-kv-cache-manager"]}},
        {"engine": {"args": ["--no-disable-hybrid-kv-cache-manager"]}},
        {"engine": {"args": ["--spec-method", "eagle", "--spec-model", "draft", "--spec-tokens=3"]}},
        {"engine": {"args": ["--spec-model=draft"]}},
        {"engine": {"args": ["--model-class-overrides.LlamaForCausalLM", "mine:Llama"]}},
        {"engine": {"env": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "HND"}]}},
        {"hash": {"seed": "7"}},
        {"disk": {"blockTokens": 128}},
        {"hash": {"algorithm": "sha256"}},
    ],
    ids=str,
)
def test_what_changes_the_bytes_or_names_of_blocks_starts_a_generation(change: dict[str, Any]) -> None:
    assert digest_of(**change) != digest_of()


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 5},
        {"cpu": {"size": "128Gi", "evictionPolicy": "arc"}},
        {"volume": {"claim": {"size": "4Ti"}}},
        {"engine": {"ephemeralStorage": "64Gi", "accelerator": {"memory": "80Gi"}}},
        {"disk": {"budget": {"maxBytes": "1Ti"}, "mode": "ReadOnly"}},
        {"engine": {"memory": "32Gi", "cpu": "8", "args": ["--max-num-seqs", "64", "--enforce-eager"]}},
        {"engine": {"env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]}},
        {"engine": {"podTemplate": {"labels": {"team": "search"}}}},
        {"disk": {"budget": {"ttl": "1h", "lowWatermark": "50%"}}, "generations": {"keepPrevious": 3}},
        {"disk": {"encryption": {"secretName": "keys", "activeKey": "a"}}},
        {"disk": {"tenants": {"from": "CacheSalt", "defaultMaxBytes": "1Gi"}}},
        {"janitor": {"enabled": False}},
        {"paused": True},
    ],
    ids=str,
)
def test_everything_else_keeps_the_cache(change: dict[str, Any]) -> None:
    assert digest_of(**change) == digest_of()


LATENT = {"num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
STATES = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_attention_heads": 4, "head_dim": 64}
PIECES = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "attention_chunk_size": 8192}


def body(*, ranks: int = 1, args: tuple[str, ...] = (), model: dict[str, Any] | None = None, on: bool = True) -> Any:
    engine = {"tensorParallel": ranks, "accelerator": {"perPod": ranks}, "args": list(args)}
    return tier(engine=engine, disk={"canonicalLayout": on}, **({} if model is None else {"model": model}))


def plan(**settings: Any) -> TierPlan:
    return plan_of(body(**settings))


def extra_config(made: TierPlan) -> dict[str, Any]:
    (container,) = engine_pod(made)["containers"]
    (word,) = (word for word in container["args"] if word.startswith("--kv-transfer-config="))
    return dict(json.loads(word.partition("=")[2])["kv_connector_extra_config"])


def test_engines_of_other_numbers_of_ranks_share_a_generation_and_the_size_of_files() -> None:
    plans = [plan(ranks=ranks) for ranks in (1, 2, 4, 8)]
    assert len({made.generation.digest for made in plans}) == 1
    assert len({json.dumps(made.decisions.chunking.settings()) for made in plans}) == 1
    assert all(extra_config(made)["canonical_layout"] is True for made in plans)


def test_without_it_each_number_of_ranks_has_a_generation_and_vllm_is_told_nothing() -> None:
    digests = {made.generation.digest for made in (plan(), plan(on=False), plan(on=False, ranks=2))}
    assert len(digests) == 3
    assert "canonical_layout" not in extra_config(plan(on=False))


@pytest.mark.parametrize(
    ("settings", "discards", "words"),
    [
        ({}, False, ""),
        ({"on": False}, True, "with spec.disk.canonicalLayout, blocks serve any"),
        (
            {"on": False, "model": {"name": "org/states", "config": STATES}},
            True,
            "cannot serve another one here: some layers of the model keep",
        ),
    ],
    ids=["kept", "discarded", "cannot be kept"],
)
def test_an_edit_of_the_ranks_is_explained(settings: dict[str, Any], discards: bool, words: str) -> None:
    before, after = (parse(body(ranks=ranks, **settings)) for ranks in (1, 2))
    found = explain_edit(before, after, names.tier_ref(tier()), connector_image="c:1")
    assert (found.discards_cache, found.restarted_pods) == (discards, 2)
    assert words in " ".join(diff.warnings(found))


@pytest.mark.parametrize("ranks", [1, 8, 16])
def test_a_latent_is_the_same_on_every_rank(ranks: int) -> None:
    made = plan(ranks=ranks, model={"name": "org/latent", "config": LATENT})
    assert made.generation.identity["engine_tensor_parallel"] == "any"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"args": ("--pipeline-parallel-size=2",)}, "--pipeline-parallel-size in spec.engine.args splits blocks"),
        ({"args": ("--decode-context-parallel-size", "2"), "ranks": 2}, "--decode-context-parallel-size"),
        ({"args": ("--speculative-config={}",)}, "--speculative-config in spec.engine.args may add layers"),
        ({"ranks": 16}, "the 8 KV heads of the model cannot be dealt out evenly to tensorParallel 16"),
        ({"model": {"name": "org/states", "config": STATES}}, "some layers of the model keep a state"),
        ({"model": {"name": "org/pieces", "config": PIECES}}, "attends to pieces (attention_chunk_size)"),
        ({"model": {"name": "org/unknown"}}, "paste its config.json"),
    ],
)
def test_what_vllm_does_not_certify_is_refused_with_the_reason(settings: dict[str, Any], words: str) -> None:
    found = decide(parse(body(**settings)), names.tier_ref(tier()), None)
    assert found.reason is Reason.LAYOUT_NOT_CANONICAL
    assert found.message.startswith("spec.disk.canonicalLayout: ")
    assert words in found.message
    assert found.message.endswith("engines of each tensorParallel keep blocks of their own")


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
