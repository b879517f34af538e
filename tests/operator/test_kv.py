# SPDX-License-Identifier: Apache-2.0
"""The KV of a token for each family of models, the places from which engines go on, and words for what is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import engine_pod, plan_of, tier

from kvtier_operator.plan import engine_args, models
from kvtier_operator.plan.chunks import LARGEST_BLOCK_TOKENS
from kvtier_operator.plan.decisions import checkpoints_of
from kvtier_operator.plan.model_families import make_family_layout
from kvtier_operator.plan.model_layout import EngineLayout, KvUnknown, ModelLayout, has_uneven_heads

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

DENSE: dict[str, Any] = TABLES["dense"]


def kv(config: dict[str, Any], layout: EngineLayout | None = None) -> ModelLayout:
    found = make_family_layout(config, layout or EngineLayout())
    assert isinstance(found, ModelLayout), found
    return found


def without(*fields: str, **more: Any) -> dict[str, Any]:
    return {**{name: value for name, value in DENSE.items() if name not in fields}, **more}


LATENT = {"num_hidden_layers": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def dense(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**DENSE, **changes}.items() if value is not None}


FAMILIES = {name: (dense(changes), *found) for name, (changes, *found) in TABLES["families"].items()}
FAMILIES |= TABLES["families_of_their_own"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_what_its_layers_take(family: str) -> None:
    config, token_bytes, attention, states = FAMILIES[family]
    found = kv(config)
    assert (found.token_bytes, found.attention_groups, found.state_groups) == (token_bytes, attention, states)


@pytest.mark.parametrize(("args", "tp", "token_bytes"), TABLES["splits"])
def test_the_way_an_engine_is_split_counts(args: list[str], tp: int, token_bytes: int) -> None:
    assert kv(DENSE, EngineLayout(args=engine_args.read(args), tensor_parallel=tp)).token_bytes == token_bytes


def test_copies_of_heads_are_explained_and_a_latent_is_kept_once_or_for_each_rank() -> None:
    found = kv(DENSE, EngineLayout(tensor_parallel=16))
    assert found.formula == "2 x 128 x 16 KV heads (8 heads, each on 2 of 16 ranks) x 2 B"
    assert kv(DENSE, EngineLayout(tensor_parallel=16, is_canonical=True)).token_bytes == 131072
    latent = {**LATENT, "num_hidden_layers": 60}
    assert kv(latent, EngineLayout(tensor_parallel=8)).token_bytes == 69120
    assert kv(latent, EngineLayout(tensor_parallel=8, args=engine_args.read(["-pp=2"]))).token_bytes == 8 * 69120
    assert kv(latent, EngineLayout(args=engine_args.read(["--kv-cache-dtype=fp8_ds_mla"]))).layer_bytes == 656


def test_a_single_group_makes_windows_cost_what_full_attention_costs_and_packed_kv_is_not_guessed() -> None:
    config = without(num_hidden_layers=24, sliding_window=512, sliding_window_pattern=6)
    assert kv(config, EngineLayout(args=engine_args.read(["--disable-hybrid-kv-cache-manager"]))).attention_groups == 1
    for name in ("turboquant_k8v4", "int8_per_token_head", "nonsense"):
        packed = EngineLayout(args=engine_args.read([f"--kv-cache-dtype={name}"]))
        assert isinstance(make_family_layout(DENSE, packed), KvUnknown)


@pytest.mark.parametrize(("changes", "why"), TABLES["untold"])
def test_what_cannot_be_told_is_told_so(changes: dict[str, Any], why: str) -> None:
    assert why in make_family_layout(dense(changes), EngineLayout()).why


@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_of_the_table_is_sized(name: str) -> None:
    model = models.known(name)
    found = kv(dict(model.config))
    assert found.block_tokens is not None
    assert 1 << 13 <= found.token_bytes <= 1 << 20
    assert 10**8 < model.weight_bytes < 2 * 10**12


def test_a_name_is_found_however_it_is_written_and_states_make_blocks_large() -> None:
    assert models.known("Meta-Llama/llama-3.1-8b-INSTRUCT") == models.known("meta-llama/Llama-3.1-8B-Instruct")
    assert models.known("/models/llama") is None
    layout = EngineLayout(is_cpu_build=True)
    assert kv(LATENT, layout).block_tokens == kv(DENSE, layout).block_tokens == 128
    # The number vLLM logs when it starts this model.
    assert kv(dict(models.known("qwen/qwen3-next-80b-a3b-instruct").config)).block_tokens == 544
    assert kv(without(num_hidden_layers=4, attn_type_list=[0, 0, 0, 1])).block_tokens is None


FIELDS = (*DENSE, *TABLES["fields"])
SCALARS = st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text(max_size=3)
ANY = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), SCALARS, max_size=4)


SMALL = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


@settings(max_examples=300)
@given(config=st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=6), base=st.booleans(), tp=st.integers(1, 64))
@example(config={**SMALL, "model_type": "mimo_v2", "hybrid_layer_pattern": 3}, base=False, tp=1)
@example(config={**SMALL, "per_layer_config": {"0": 3}}, base=False, tp=1)
@example(config={**SMALL, "global_head_dim": []}, base=False, tp=1)
@example(config={**SMALL, "swa_head_dim": {}}, base=False, tp=1)
def test_no_config_is_too_strange_to_answer(config: dict[str, Any], base: bool, tp: int) -> None:
    config = {**(DENSE if base else {}), **config}
    found = make_family_layout(config, EngineLayout(tensor_parallel=tp))
    assert isinstance(found, KvUnknown) or found.token_bytes >= 1
    assert isinstance(has_uneven_heads(config), bool)


@given(
    layers=st.integers(1, 128),
    heads=st.integers(1, 128),
    head=st.integers(1, 512),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_splitting_never_makes_the_cache_smaller(layers: int, heads: int, head: int, tp: int) -> None:
    config = {"num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": head}
    whole, split = kv(config), kv(config, EngineLayout(tensor_parallel=tp))
    assert whole.token_bytes == layers * heads * head * 2 * 2
    if heads % tp == 0 or tp % heads == 0:
        assert split.token_bytes >= whole.token_bytes


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
    for block in (16, 32, 64, LARGEST_BLOCK_TOKENS):
        assert int(flags_of(plan)[INTERVAL]) % (plan.decisions.chunking.blocks * block) == 0
    assert 0 < checkpoints_of(plan.spec, plan.decisions.chunking).window_share <= 0.5


STATES, GEMMA = "Qwen/Qwen3-Next-80B-A3B-Instruct", WINDOWED[0]


@pytest.mark.parametrize(("model", "args", "disk", "flags"), TABLES["places"], ids=str)
def test_places_to_go_on_from_are_kept_where_a_model_needs_them(
    model: str, args: list[str], disk: dict[str, Any], flags: dict[str, str]
) -> None:
    assert flags_of(planned(model, *args, disk=disk)) == flags


@pytest.mark.parametrize("flag", [f"{INTERVAL}=0", "--prefix_cache_retention_interval=0", f"{STEP}=512"])
def test_what_the_user_sets_stands(flag: str) -> None:
    (container,) = engine_pod(planned(GEMMA, flag))["containers"]
    assert [word for word in container["args"] if "retention" in word or "threshold" in word] == [flag]


@pytest.mark.parametrize("model", [*WINDOWED, STATES])
def test_the_places_change_no_block_and_so_no_generation(model: str) -> None:
    assert planned(model).generation.digest == planned(model, f"{INTERVAL}=0").generation.digest
