# SPDX-License-Identifier: Apache-2.0
"""Blocks that engines of any tensorParallel read: where vLLM certifies it, and refused with the reason elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiers import tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.parts.edit_impact import explain_edit
from kvtier_operator.parts.engine import deployment
from kvtier_operator.plan import TierPlan, decide, diff, make_unchecked_plan

LATENT = {"num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
STATES = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_attention_heads": 4, "head_dim": 64}
PIECES = {"num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64, "attention_chunk_size": 8192}


def body(*, ranks: int = 1, args: tuple[str, ...] = (), model: dict[str, Any] | None = None, on: bool = True) -> Any:
    engine = {"tensorParallel": ranks, "accelerator": {"perPod": ranks}, "args": list(args)}
    return tier(engine=engine, disk={"canonicalLayout": on}, **({} if model is None else {"model": model}))


def plan(**settings: Any) -> TierPlan:
    return make_unchecked_plan(parse(body(**settings)), names.tier_ref(tier()), connector_image="c:1")


def extra_config(made: TierPlan) -> dict[str, Any]:
    (container,) = deployment(made)["spec"]["template"]["spec"]["containers"]
    (word,) = (word for word in container["args"] if word.startswith("--kv-transfer-config="))
    found: dict[str, Any] = json.loads(word.partition("=")[2])["kv_connector_extra_config"]
    return found


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
