# SPDX-License-Identifier: Apache-2.0
"""What makes two engines strangers: facts that the engine resolved, and weights that a name does not tell apart."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import DECLARED, Rigs, keys, offloading_config

from kvtier_connector.vllm_adapter.fingerprint import describe_layout, engine_facts, fingerprint_files
from kvtier_connector.vllm_adapter.spec import KVTierSpec


def engine_config(**changes: Any) -> Any:
    """Return the part of vLLM's configuration that is looked at."""
    values: dict[str, Any] = {
        "revision": "abc",
        "dtype": torch.bfloat16,
        "quantization": None,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "hf_overrides": {},
        "cache_dtype": "auto",
        "hash": "sha256_cbor",
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            revision=values["revision"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_overrides=values["hf_overrides"],
            hf_text_config=SimpleNamespace(rope_parameters=values["rope"]),
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"], prefix_caching_hash_algo=values["hash"]),
    )


def facts(**changes: Any) -> dict[str, Any]:
    spec = KVTierSpec(offloading_config())
    spec.engine_config = engine_config(**changes)
    return engine_facts(spec, [DECLARED], bytes_per_chunk=4096)


DIFFERENCES: dict[str, tuple[str, Any]] = {
    "revision": ("engine.revision", "def"),
    "dtype": ("engine.dtype", torch.float16),
    "quantization": ("engine.quantization", "fp8"),
    "rope": ("engine.rope", {"rope_type": "yarn", "factor": 4.0}),
    "hf_overrides": ("engine.hf_overrides", {"rope_theta": 5}),
    "cache_dtype": ("engine.kv_cache_dtype", "fp8_e4m3"),
    "hash": ("engine.hash_algorithm", "sha256"),
}


NAMES = (
    "backends block_format blocks_per_chunk bytes_per_chunk dtype groups hash_algorithm hash_seed hf_overrides "
    "is_layout_canonical is_layout_replicated kv_cache_dtype kv_dtype kv_layout layout layout_env model_name "
    "quantization revision rope tokens_per_hash topology weights"
)


def test_the_list_of_facts_is_the_one_that_everybodys_blocks_were_written_under() -> None:
    assert sorted(facts()) == [f"engine.{name}" for name in NAMES.split()]


def test_what_is_not_known_is_not_what_is_known() -> None:
    def change(config: object) -> object:
        return config

    assert facts(hf_overrides=change)["engine.hf_overrides"].endswith("change")
    spec = KVTierSpec(offloading_config())
    known, unknown = facts(), engine_facts(spec, [DECLARED], bytes_per_chunk=4096)
    assert set(known) == set(unknown)
    assert unknown["engine.dtype"] is None


def test_an_engine_that_was_started_for_another_generation_leaves_the_volume_alone(rigs: Rigs) -> None:
    old = rigs.make(options={"generation": "0" * 16})
    assert old.metric("vllm:kvtier_disk_refused", "generation") == 1
    old.offload(keys(2))
    assert not rigs.root.exists()
    new = rigs.make(options={"generation": rigs.root.name})
    new.offload(keys(2))
    assert len(list(rigs.root.rglob("*.kvb"))) == 2


COMMITS = ("0e9e39f249a16976918f6564b8830bc894c89659", "1111111111111111111111111111111111111111")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    (directory / "tokenizer.json").write_text("{}")
    generator = random.Random(7)
    for number in range(2):
        (directory / f"model-{number}.safetensors").write_bytes(generator.randbytes(1 << 20))
    return directory


def test_the_same_directory_elsewhere_and_later_is_the_same(model: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(model, tmp_path / "copy")
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    assert fingerprint_files(str(copied), "main") == fingerprint_files(str(model), "main")
    assert str(fingerprint_files(str(model), "main")).startswith("sha256:")


def test_other_weights_in_the_same_place_are_others(model: Path) -> None:
    before = fingerprint_files(str(model), "main")
    (model / "README.md").write_text("no weights")
    assert fingerprint_files(str(model), "main") == before
    (model / "model-1.safetensors").write_bytes(random.Random(8).randbytes(1 << 20))
    trained = fingerprint_files(str(model), "main")
    (model / "config.json").write_text('{"hidden_size": 64, "rope_theta": 1e6}')
    assert len({before, trained, fingerprint_files(str(model), "main")}) == 3


@pytest.mark.parametrize("size", [0, 1, 4095, 4097])
def test_files_of_any_size_are_sampled(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * size)
    before = fingerprint_files(str(tmp_path), "main")
    path.write_bytes(b"b" * size)
    assert (fingerprint_files(str(tmp_path), "main") == before) is (size == 0)


def test_a_branch_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--model"
    (cached / "refs").mkdir(parents=True)
    for commit in COMMITS:
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs" / "main").write_text(commit)
        assert fingerprint_files("org/model", "main") == commit
    assert fingerprint_files("org/model", COMMITS[0]) == COMMITS[0]


@pytest.mark.parametrize("name", ["org/absent", "not a name", "/nowhere/at/all", "a/b/c"])
def test_what_cannot_be_told_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint_files(name, "main") is None


BLOCKS = 7


def attention(name: str = "CPU_ATTN", isa: str = "vec") -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: name), isa=isa)


def cache(blocks: int = BLOCKS) -> torch.Tensor:
    return torch.full((blocks, 2, 16, 16), 9.0)


def describe_one(layer: Any, held: Any = None, blocks: int = BLOCKS) -> tuple[tuple[str, ...], str]:
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layer.0": layer}))
    return describe_layout(config, {"layer.0": cache() if held is None else held}, blocks)


def test_the_layout_of_kv_does_not_depend_on_the_number_of_blocks() -> None:
    assert describe_one(attention()) == describe_one(attention(), cache(70), 70)
    assert describe_one(attention())[0] == ("SimpleNamespace/CPU_ATTN/vec",)


@pytest.mark.parametrize(
    "other",
    [
        (attention(isa="amx"), None),
        (attention(name="ZEN_ATTN"), None),
        (attention(), cache().to(torch.bfloat16)),
        (attention(), cache().transpose(1, 2).contiguous().transpose(1, 2)),
        (attention(), [cache(), cache()]),
    ],
)
def test_another_backend_instruction_set_type_or_order_is_another_layout(other: tuple[Any, Any]) -> None:
    assert describe_one(*other)[1] != describe_one(attention())[1]


def test_a_state_that_is_laid_out_the_other_way_is_another_layout() -> None:
    state = [torch.zeros(BLOCKS, 3, 24), torch.zeros(BLOCKS, 4, 4)]
    assert describe_one(None, state)[1] != describe_one(None, [torch.zeros(BLOCKS, 24, 3), state[1]])[1]
