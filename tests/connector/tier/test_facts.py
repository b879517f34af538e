# SPDX-License-Identifier: Apache-2.0
"""Facts and weights that make engines strangers; encryption, live settings and the permit as an engine meets them."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import DECLARED, Rig, Rigs, keys, offloading_config, wait_until

from kvtier_connector.contract.engine import encode_live
from kvtier_connector.store.header import Header, decode_header
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


def test_the_layout_of_kv_depends_on_the_order_of_states_and_not_on_the_number_of_blocks() -> None:
    assert describe_one(attention()) == describe_one(attention(), cache(70), 70)
    assert describe_one(attention())[0] == ("SimpleNamespace/CPU_ATTN/vec",)
    state = [torch.zeros(BLOCKS, 3, 24), torch.zeros(BLOCKS, 4, 4)]
    assert describe_one(None, state)[1] != describe_one(None, [torch.zeros(BLOCKS, 24, 3), state[1]])[1]


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


K1, K2 = bytes(range(32)), bytes(range(1, 33))


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.keys = directory / "keys"
        self.keys.mkdir()
        self.live = directory / "live.json"
        self.say()

    def say(self, active_key: str = "") -> None:
        fresh = self.live.with_suffix(".new")
        fresh.write_text(encode_live("ReadWrite", active_key=active_key))
        fresh.replace(self.live)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture(params=[0, 2], ids=["threads", "movers"])
def processes(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


def encrypted(rigs: Rigs, cluster: Cluster, processes: int = 0) -> Rig:
    return rigs.make(
        keys_dir=str(cluster.keys), live_file=str(cluster.live), refresh_seconds=0.05, io_processes=processes
    )


def headers(root: Path) -> list[Header]:
    found = [decode_header(path.read_bytes()) for path in root.rglob("*.kvb")]
    return [header for header in found if isinstance(header, Header)]


def test_without_an_active_key_nothing_is_stored_and_it_shows(rigs: Rigs, cluster: Cluster, processes: int) -> None:
    rig = encrypted(rigs, cluster, processes)
    rig.offload(keys(3))
    assert headers(rigs.root) == []
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_key") == 3
    assert rig.metric("vllm:kvtier_disk_key_missing") == 1
    assert rig.metric("vllm:kvtier_disk_active") == 1


def test_a_key_is_rotated_under_load_and_costs_no_block(rigs: Rigs, cluster: Cluster, processes: int) -> None:
    for name, content in (("k1", K1), ("k2", K2)):
        (cluster.keys / name).write_bytes(content)
    cluster.say("k1")
    writer, reader = (encrypted(rigs, cluster, processes) for _ in range(2))
    used: set[str] = set()
    numbers = itertools.count()

    def is_rotated() -> bool:
        """Store while the settings change, and read on another engine what was stored before, and then this."""
        number = next(numbers)
        context = writer.begin_offload(keys(8, first=8 * number), f"writer {number}")
        cluster.say(("k1", "k2")[number // 4 % 2])
        if number:
            assert reader.serve(keys(8, first=8 * number - 8), f"before {number}").hit_blocks == 8
        writer.settle()
        writer.finish(context)
        assert reader.serve(keys(8, first=8 * number), f"reader {number}").hit_blocks == 8
        used.update(header.seal.key_id for header in headers(rigs.root))
        return used == {"k1", "k2"} and number >= 12

    wait_until(is_rotated, "the engine has written with both keys")
    for rig in (writer, reader):
        assert rig.metric("vllm:kvtier_disk_key_missing") == 0
        assert not any(rig.metric("vllm:kvtier_disk_misses", cause) for cause in ("key_missing", "key_wrong", "tag"))
    # Without the old key its blocks are computed again, and the others are read.
    (cluster.keys / "k1").unlink()
    late = encrypted(rigs, cluster, processes)
    late_keys = keys(8 * next(numbers))
    hits = sum(late.serve([of], f"late {number}").hit_blocks for number, of in enumerate(late_keys))
    assert hits == sum(header.seal.key_id == "k2" for header in headers(rigs.root)) > 0
    assert late.metric("vllm:kvtier_disk_misses", "key_missing") == len(late_keys) - hits
