# SPDX-License-Identifier: Apache-2.0
"""What a name does not say about the weights, the engine finds out: a commit, or a digest of a directory."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from rig import Rigs, keys, offloading_config
from vllm.v1.kv_offload.config import OffloadingModelConfig

from kvtier_connector.tier.weights import fingerprint

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
    assert fingerprint(str(copied), "main") == fingerprint(str(model), "main")
    assert fingerprint(str(model), "main").startswith("sha256:")


def test_other_weights_in_the_same_place_are_others(model: Path) -> None:
    before = fingerprint(str(model), "main")
    (model / "model-1.safetensors").write_bytes(random.Random(8).randbytes(1 << 20))
    trained = fingerprint(str(model), "main")
    (model / "config.json").write_text('{"hidden_size": 64, "rope_theta": 1e6}')
    assert len({before, trained, fingerprint(str(model), "main")}) == 3


def test_what_is_no_weight_does_not_matter(model: Path) -> None:
    before = fingerprint(str(model), "main")
    (model / "README.md").write_text("hello")
    assert fingerprint(str(model), "main") == before


@pytest.mark.parametrize("size", [0, 1, 4095, 4097])
def test_files_of_any_size_are_sampled(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * size)
    before = fingerprint(str(tmp_path), "main")
    path.write_bytes(b"b" * size)
    assert (fingerprint(str(tmp_path), "main") == before) is (size == 0)


def test_a_branch_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--model"
    (cached / "refs").mkdir(parents=True)
    for commit in COMMITS:
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs" / "main").write_text(commit)
        assert fingerprint("org/model", "main") == commit
    assert fingerprint("org/model", COMMITS[0]) == COMMITS[0]


@pytest.mark.parametrize("name", ["org/absent", "not a name", "/nowhere/at/all", "a/b/c"])
def test_what_cannot_be_told_is_empty_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert fingerprint(name, "main") == ""


def test_an_engine_with_other_weights_in_the_same_directory_is_a_stranger(rigs: Rigs, model: Path) -> None:
    config = offloading_config(model=OffloadingModelConfig(name=str(model), dtype="bfloat16"))
    rigs.make(config=config).offload(keys(3))
    assert rigs.make(config=config).serve(keys(3)).hit_blocks == 3

    (model / "model-0.safetensors").write_bytes(random.Random(9).randbytes(1 << 20))
    stranger = rigs.make(config=config)
    assert stranger.serve(keys(3)).hit_blocks == 0
    assert stranger.metric("vllm:kvtier_disk_refused", "engine.weights") == 1
