# SPDX-License-Identifier: Apache-2.0
"""A generation is left exactly when blocks of the old one would be wrong for the new engine."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.plan import decide, digest


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


def test_one_spelling_of_a_flag_is_as_good_as_another() -> None:
    spellings = (["--kv-cache-dtype=fp8"], ["--kv_cache_dtype", "fp8"], ["--kv-cache-dtype", "fp8"])
    assert len({digest_of(engine={"args": list(args)}) for args in spellings}) == 1
