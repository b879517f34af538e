# SPDX-License-Identifier: Apache-2.0
"""Engines of models with windows or states keep what a later prompt can go on from."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import TIER, tier

from kvtier_operator.api.parse import parse
from kvtier_operator.names import TierRef
from kvtier_operator.parts import engine
from kvtier_operator.plan import make_unchecked_plan
from kvtier_operator.plan.chunks import LARGEST_BLOCK_TOKENS, STEP_TOKENS
from kvtier_operator.plan.decisions import checkpoints_of

REF = TierRef(namespace=TIER.namespace, name=TIER.name, uid="0")
WINDOWED = ("google/gemma-3-27b-it", "google/gemma-2-9b-it", "openai/gpt-oss-20b", "openai/gpt-oss-120b")
INTERVAL, STEP = "--prefix-cache-retention-interval", "--long-prefill-token-threshold"


def plan_of(model: str, *args: str, **spec: Any) -> Any:
    body = tier(model={"name": model}, engine={"args": list(args)}, **spec)
    return make_unchecked_plan(parse(body), REF, connector_image="kvtier")


def flags_of(plan: Any) -> dict[str, str]:
    (container,) = engine.deployment(plan)["spec"]["template"]["spec"]["containers"]
    words = [word.partition("=") for word in container["args"] if word.startswith("--")]
    return {flag: value for flag, _, value in words if flag in {INTERVAL, STEP}}


@pytest.mark.parametrize("model", WINDOWED)
def test_windows_are_kept_at_whole_files_whatever_block_the_attention_kernel_has(model: str) -> None:
    plan = plan_of(model)
    interval = int(flags_of(plan)[INTERVAL])
    for block in (16, 32, 64, LARGEST_BLOCK_TOKENS):
        assert interval % (plan.decisions.chunking.blocks * block) == 0


@pytest.mark.parametrize("model", WINDOWED)
def test_windows_take_at_most_half_of_what_every_token_would(model: str) -> None:
    plan = plan_of(model)
    assert 0 < checkpoints_of(plan.spec, plan.decisions.chunking).window_share <= 0.5


def test_where_the_user_sets_the_size_of_files_the_places_are_as_close_as_windows_allow() -> None:
    assert flags_of(plan_of("openai/gpt-oss-20b", disk={"blockTokens": 128})) == {INTERVAL: "512"}


def test_a_model_with_states_is_computed_in_steps_at_whose_ends_states_are_kept() -> None:
    assert flags_of(plan_of("Qwen/Qwen3-Next-80B-A3B-Instruct")) == {INTERVAL: "None", STEP: str(STEP_TOKENS)}


@pytest.mark.parametrize(
    ("length", "step"), [("1024", "1024"), ("1.5k", "1500"), ("1K", "1024"), ("32768", "2048"), ("auto", "2048")]
)
def test_a_step_is_no_longer_than_the_longest_prompt(length: str, step: str) -> None:
    plan = plan_of("Qwen/Qwen3-Next-80B-A3B-Instruct", "--max-model-len", length)
    assert flags_of(plan)[STEP] == step


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3", "somebody/unknown"])
def test_a_model_that_keeps_every_token_or_that_nobody_knows_gets_no_flag(model: str) -> None:
    assert flags_of(plan_of(model)) == {}


def test_windows_in_pieces_are_none_that_vllm_keeps_apart() -> None:
    assert flags_of(plan_of("meta-llama/Llama-4-Scout-17B-16E-Instruct")) == {}


@pytest.mark.parametrize("flag", ["--disable-sliding-window", "--disable-hybrid-kv-cache-manager"])
def test_without_windows_there_is_no_interval_which_vllm_would_refuse(flag: str) -> None:
    assert flags_of(plan_of("google/gemma-3-27b-it", flag)) == {}


@pytest.mark.parametrize("flag", [f"{INTERVAL}=0", "--prefix_cache_retention_interval=0", f"{STEP}=512"])
def test_what_the_user_sets_stands(flag: str) -> None:
    plan = plan_of("google/gemma-3-27b-it", flag)
    (container,) = engine.deployment(plan)["spec"]["template"]["spec"]["containers"]
    assert [word for word in container["args"] if "retention" in word or "threshold" in word] == [flag]


@pytest.mark.parametrize("model", [*WINDOWED, "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_the_places_change_no_block_and_so_no_generation(model: str) -> None:
    assert plan_of(model).generation.digest == plan_of(model, f"{INTERVAL}=0").generation.digest
