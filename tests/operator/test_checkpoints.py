# SPDX-License-Identifier: Apache-2.0
"""Engines of models with windows or states keep what a later prompt can go on from."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import engine_pod, plan_of, tier

from kvtier_operator.plan.chunks import LARGEST_BLOCK_TOKENS, STEP_TOKENS
from kvtier_operator.plan.decisions import checkpoints_of

WINDOWED = ("google/gemma-3-27b-it", "google/gemma-2-9b-it", "openai/gpt-oss-20b", "openai/gpt-oss-120b")
INTERVAL, STEP = "--prefix-cache-retention-interval", "--long-prefill-token-threshold"


def planned(model: str, *args: str, **spec: Any) -> Any:
    return plan_of(tier(model={"name": model}, engine={"args": list(args)}, **spec))


def flags_of(plan: Any) -> dict[str, str]:
    (container,) = engine_pod(plan)["containers"]
    words = [word.partition("=") for word in container["args"] if word.startswith("--")]
    return {flag: value for flag, _, value in words if flag in {INTERVAL, STEP}}


@pytest.mark.parametrize("model", WINDOWED)
def test_windows_are_kept_at_whole_files_and_take_at_most_half_of_what_every_token_would(model: str) -> None:
    plan = planned(model)
    interval = int(flags_of(plan)[INTERVAL])
    for block in (16, 32, 64, LARGEST_BLOCK_TOKENS):
        assert interval % (plan.decisions.chunking.blocks * block) == 0
    assert 0 < checkpoints_of(plan.spec, plan.decisions.chunking).window_share <= 0.5


STATES, PIECES, GEMMA = "Qwen/Qwen3-Next-80B-A3B-Instruct", "meta-llama/Llama-4-Scout-17B-16E-Instruct", WINDOWED[0]
STEPS = {"1024": "1024", "1.5k": "1500", "1K": "1024", "32768": "2048", "auto": "2048"}
"""Longest prompt to the step, which is no longer."""


@pytest.mark.parametrize(
    ("model", "args", "disk", "flags"),
    [
        ("openai/gpt-oss-20b", (), {"blockTokens": 128}, {INTERVAL: "512"}),
        (STATES, (), {}, {INTERVAL: "None", STEP: str(STEP_TOKENS)}),
        *((STATES, ("--max-model-len", most), {}, {INTERVAL: "None", STEP: step}) for most, step in STEPS.items()),
        # A model that keeps every token, an unknown model, and windows in pieces, which vLLM keeps together.
        *((each, (), {}, {}) for each in ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3", "somebody/unknown", PIECES)),
        # Without windows vLLM would refuse an interval.
        *((GEMMA, (f"--disable-{each}",), {}, {}) for each in ("sliding-window", "hybrid-kv-cache-manager")),
    ],
    ids=str,
)
def test_places_to_go_on_from_are_kept_where_a_model_needs_them(
    model: str, args: tuple[str, ...], disk: dict[str, Any], flags: dict[str, str]
) -> None:
    assert flags_of(planned(model, *args, disk=disk)) == flags


@pytest.mark.parametrize("flag", [f"{INTERVAL}=0", "--prefix_cache_retention_interval=0", f"{STEP}=512"])
def test_what_the_user_sets_stands(flag: str) -> None:
    (container,) = engine_pod(planned(GEMMA, flag))["containers"]
    assert [word for word in container["args"] if "retention" in word or "threshold" in word] == [flag]


@pytest.mark.parametrize("model", [*WINDOWED, STATES])
def test_the_places_change_no_block_and_so_no_generation(model: str) -> None:
    assert planned(model).generation.digest == planned(model, f"{INTERVAL}=0").generation.digest
