# SPDX-License-Identifier: Apache-2.0
"""What makes two engines strangers: facts that the engine resolved, and the weights of a model in a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import Rigs, keys, offloading_config

from kvtier_connector.store.identity import claim
from kvtier_connector.tier.facts import engine_facts
from kvtier_connector.tier.fingerprint import SAMPLE_BYTES, SAMPLES, fingerprint
from kvtier_connector.tier.spec import KVTierSpec

GOLDEN = "c71912c9609c0c1d6d27858551acd05531bcdc6f2f602fc95ccf7619ff38558c"


def make_model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"hidden_size": 64}')
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("a model")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_the_fingerprint_of_a_model_does_not_change(model: Path) -> None:
    assert fingerprint(model) == GOLDEN, "another value discards the blocks of every model in a directory"


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "the first byte of the weights": lambda model: flip(model / "model.safetensors", 0),
    "the last byte of the weights": lambda model: flip(model / "model.safetensors", -1),
    "the configuration": lambda model: (model / "config.json").write_text('{"hidden_size": 65}'),
    "the code": lambda model: (model / "modeling.py").write_text("x = 1"),
    "one more file of weights": lambda model: (model / "model-2.safetensors").write_bytes(b""),
    "the length of the weights": lambda model: os.truncate(model / "model.safetensors", 1000),
    "the name of the weights": lambda model: (model / "model.safetensors").rename(model / "renamed.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_changes_its_fingerprint(model: Path, change: str) -> None:
    CHANGES[change](model)
    assert fingerprint(model) != GOLDEN


def test_what_does_not_change_a_block_does_not_count(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"other": 1}')
    (model / "README.md").write_text("another text")
    (model / "generation_config.json").write_text("{}")
    (model / ".cache").mkdir()
    os.utime(model / "model.safetensors", (1, 1))
    assert fingerprint(model) == GOLDEN


def test_large_files_are_sampled_and_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    os.truncate(path, 1 << 40)
    before = fingerprint(tmp_path)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"x", (1 << 40) - SAMPLE_BYTES)
    assert fingerprint(tmp_path) != before
    assert SAMPLES * SAMPLE_BYTES <= 1 << 20


def engine_config(model: str, **changes: Any) -> Any:
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
            model=model,
            revision=values["revision"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_overrides=values["hf_overrides"],
            hf_text_config=SimpleNamespace(rope_parameters=values["rope"]),
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"], prefix_caching_hash_algo=values["hash"]),
    )


def facts(model: Path, **changes: Any) -> dict[str, Any]:
    spec = KVTierSpec(offloading_config())
    spec.engine_config = engine_config(str(model), **changes)
    return engine_facts(spec, bytes_per_chunk=4096)


DIFFERENCES: dict[str, tuple[str, Any]] = {
    "revision": ("engine.revision", "def"),
    "dtype": ("engine.dtype", torch.float16),
    "quantization": ("engine.quantization", "fp8"),
    "rope": ("engine.rope", {"rope_type": "yarn", "factor": 4.0}),
    "hf_overrides": ("engine.hf_overrides", {"rope_theta": 5}),
    "cache_dtype": ("engine.kv_cache_dtype", "fp8_e4m3"),
    "hash": ("engine.hash_algorithm", "sha256"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_vllm_resolved_is_named_when_it_differs(model: Path, name: str) -> None:
    field, value = DIFFERENCES[name]
    ours, theirs = facts(model), facts(model, **{name: value})
    assert {each for each in ours if ours[each] != theirs[each]} == {field}


def test_the_weights_of_a_directory_are_a_fact_and_those_of_a_hub_a_revision(model: Path) -> None:
    assert facts(model)["engine.weights"] == GOLDEN
    assert facts(Path("org/model"))["engine.weights"] is None


def test_overrides_by_a_function_are_known_by_its_name(model: Path) -> None:
    def change(config: object) -> object:
        return config

    assert facts(model, hf_overrides=change)["engine.hf_overrides"].endswith("change")


def test_what_is_not_known_is_not_what_is_known(model: Path) -> None:
    spec = KVTierSpec(offloading_config())
    known, unknown = facts(model), engine_facts(spec, bytes_per_chunk=4096)
    assert set(known) == set(unknown)
    assert unknown["engine.dtype"] is None


def test_a_stranger_is_refused_with_the_field_in_a_metric(rigs: Rigs) -> None:
    rig = rigs.make()
    rig.offload(keys(2))
    assert rig.metric("vllm:kvtier_disk_refused", "identity.model_name") == 0
    stranger = rigs.make(identity={"model_name": "org/other"})
    assert stranger.metric("vllm:kvtier_disk_refused", "identity.model_name") == 1
    assert stranger.metric("vllm:kvtier_disk_active") == 0
    assert stranger.serve(keys(2)).hit_blocks == 0
    stranger.offload(keys(1, first=30))
    assert len(list(rigs.root.rglob("*.kvb"))) == 2


def test_a_directory_of_another_format_is_refused_by_that_name(rigs: Rigs) -> None:
    claim(rigs.root, {}, "d1gest")
    path = rigs.root / "tier.json"
    path.write_text("{")
    assert rigs.make().metric("vllm:kvtier_disk_refused", "tier.json") == 1
