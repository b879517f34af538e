# SPDX-License-Identifier: Apache-2.0
"""When an engine attaches to its volume, and the facts and weights by which it is a stranger to the blocks there."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import shutil
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty_mounts import FaultyVolume
from rig import DECLARED, DIGEST, Rig, Rigs, key, keys, offloading_config, wait_until
from store_contract import K1, K2
from store_faults import FailingFs, GatedFs, plant

from kvtier_connector.contract.engine import encode_live
from kvtier_connector.pod_tools.ready import why_not_decided
from kvtier_connector.store.header import Header, decode_header
from kvtier_connector.store.identity import claim, read
from kvtier_connector.vllm_adapter.fingerprint import describe_layout, engine_facts, fingerprint_files
from kvtier_connector.vllm_adapter.spec import KVTierSpec

LONG = 600.0
SHORT = 0.05


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvtier_connector.vllm_adapter.secondary_tier.OPEN_WAIT_SECONDS", 0.1)
    return tmp_path / "pod" / "kvtier"


def said(state: Path) -> tuple[str, str]:
    (path,) = state.glob("*.json")
    document = json.loads(path.read_text())
    return document["phase"], document["reason"]


def test_a_tier_that_has_its_volume_says_so_until_it_is_closed(rigs: Rigs, state: Path) -> None:
    rig = rigs.make(state_dir=str(state), attach_grace_seconds=LONG)
    wait_until(lambda: said(state) == ("attached", ""), "the volume is attached")
    assert why_not_decided(state) == ""
    rig.close()
    assert list(state.iterdir()) == []


@pytest.mark.parametrize("grace", [SHORT, LONG])
def test_a_volume_that_hangs_beyond_its_grace_holds_no_engine_back(rigs: Rigs, state: Path, grace: float) -> None:
    rigs.write(keys(2))
    fs = GatedFs(lambda call, path: path.endswith("tier.json"))
    rig = rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=grace)
    if grace == LONG:
        wait_until(lambda: fs.waiting > 0, "the volume hangs")
        assert why_not_decided(state).endswith("ns/tier: the volume has not answered yet")
    else:
        without = ("without", "the volume has not answered yet")
        wait_until(lambda: said(state) == without, "the engine serves without")
        assert why_not_decided(state) == ""
    assert rig.serve(keys(2), "before", max_steps=0).hit_blocks == 0
    fs.open_gate()
    wait_until(lambda: said(state) == ("attached", ""), "the volume is attached")
    assert rig.serve(keys(2), "after").hit_blocks == 2


def test_a_mount_that_hangs_at_its_root_holds_up_no_start(faulty_volume: FaultyVolume, rigs: Rigs, state: Path) -> None:
    with faulty_volume.hanging("root", "lookup"):
        making = threading.Thread(target=rigs.make, kwargs={"state_dir": str(state), "attach_grace_seconds": SHORT})
        making.start()
        making.join(60)
        assert not making.is_alive()
        wait_until(lambda: said(state)[0] == "without", "the engine serves without")
    wait_until(lambda: said(state) == ("attached", ""), "the volume is attached")


def test_a_volume_that_cannot_be_used_holds_the_engine_back_for_its_grace(rigs: Rigs, state: Path) -> None:
    fs = FailingFs(OSError(errno.EACCES, "Permission denied"), lambda call, path: path.endswith(DIGEST))
    rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=SHORT)
    wait_until(lambda: said(state)[0] == "without", "the engine serves without")


def test_a_stranger_serves_without_the_volume_at_once(rigs: Rigs, state: Path) -> None:
    rigs.make()
    rigs.make(identity={"model_name": "org/other"}, state_dir=str(state), attach_grace_seconds=LONG)
    wait_until(lambda: said(state)[0] == "without", "the engine serves without")
    assert "model_name" in said(state)[1]


def test_who_starts_in_bypass_serves_at_once_and_attaches_when_it_may(rigs: Rigs, state: Path) -> None:
    live = rigs.live_file("Bypass")
    fs = GatedFs(lambda call, path: False)
    rig = rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=LONG, live_file=str(live), refresh_seconds=0.05)
    wait_until(lambda: said(state) == ("without", "the mode is Bypass"), "the engine serves without")
    rig.offload(keys(2))
    assert rig.serve(keys(2, first=5)).hit_blocks == 0
    assert fs.calls == [], "it does not touch the volume"
    live.write_text(encode_live("ReadWrite"))
    wait_until(lambda: said(state) == ("attached", ""), "the volume is attached")


def test_a_state_that_cannot_be_written_leaves_an_engine_that_uses_its_volume(rigs: Rigs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    rig = rigs.make(state_dir=str(tmp_path / "file" / "kvtier"), attach_grace_seconds=SHORT)
    rig.offload(keys(2))
    assert rig.metric("vllm:kvtier_disk_active") == 1


def test_a_directory_that_somebody_else_claims_under_an_engine_is_not_used_any_more(rigs: Rigs) -> None:
    rigs.write(keys(2))
    rig = rigs.make(refresh_seconds=0.05)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    claim_for_somebody_else(rigs)
    wait_until(lambda: is_inert_after_a_lookup(rig), "the engine has noticed")
    assert rig.metric("vllm:kvtier_disk_refused", "model_name") == 1
    assert rig.serve(keys(2)).hit_blocks == 0
    rig.offload(keys(1, first=7))
    assert rig.metric("vllm:kvtier_disk_shed_stores", "inert") == 1


def is_inert_after_a_lookup(rig: Rig) -> bool:
    """Look a block up that is nowhere; an engine at rest does not look at its directory."""
    rig.serve([key(900)], uuid.uuid4().hex)
    return rig.metric("vllm:kvtier_disk_active") == 0


def claim_for_somebody_else(rigs: Rigs) -> None:
    """Do as if the directory had been removed and made anew between two looks."""
    ours = read(rigs.root)
    aside = rigs.root.with_name("theirs")
    claim(aside, {**ours["identity"], "model_name": "org/other"}, DIGEST)
    (aside / "tier.json").rename(rigs.root / "tier.json")


def test_what_waits_to_be_stored_does_not_go_to_somebody_else(rigs: Rigs) -> None:
    fs = GatedFs(lambda call, path: call == "pwritev" and "/blocks/" in path)
    rig = rigs.make(fs=fs, refresh_seconds=0.05, io_processes=1)
    rig.begin_offload(keys(5))
    wait_until(lambda: fs.waiting == 1, "one block is being written, and the others wait")
    claim_for_somebody_else(rigs)
    wait_until(lambda: is_inert_after_a_lookup(rig), "the engine has noticed")
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_shed_stores", "inert") == 5
    fs.open_gate()
    rig.close()
    assert len(list((rigs.root / "blocks").rglob("*.kvb"))) <= 1


def test_a_directory_that_goes_and_comes_back_is_noticed_with_the_next_lookup(rigs: Rigs) -> None:
    rigs.write(keys(5))
    rig = rigs.make(refresh_seconds=0.05)
    assert rig.serve(keys(5), "before").hit_blocks == 5
    aside = rigs.root.with_name("aside")
    rigs.root.rename(aside)
    rig.manager.reset_cache()
    assert rig.serve(keys(5), "gone").hit_blocks == 0
    # A read that begins later would find them.
    rig.settle()

    def put_back() -> bool:
        # The engine may write its journal into a directory that was just removed.
        shutil.rmtree(rigs.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            aside.rename(rigs.root)
        return not aside.exists()

    wait_until(put_back, "it is back")
    assert rig.serve(keys(5), "back").hit_blocks == 5
    shutil.rmtree(rigs.root, ignore_errors=True)
    rig.manager.reset_cache()
    assert rig.serve(keys(5), "gone again").hit_blocks == 0
    rig.offload(keys(3, first=9))
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3
    wait_until((rigs.root / "tier.json").exists, "the directory is described again")


@pytest.mark.parametrize(("kind", "processes"), [("link", 0), ("pipe", 1), ("directory", 1)])
def test_what_is_no_file_is_a_miss_and_opens_no_breaker(rigs: Rigs, kind: str, processes: int) -> None:
    rigs.write(keys(12) + keys(12, first=100))
    rig = rigs.make(chunks=12, io_processes=processes)
    # The memory of blocks says that the volume has them, and the CPU tier has them no more.
    for first in (0, 100):
        assert rig.serve(keys(12, first=first)).hit_blocks == 12
    for number in range(1, 12, 2):
        path = rigs.block_file(key(number))
        path.unlink()
        plant(kind, path)
    assert rig.serve(keys(12)).hit_blocks == 1
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_misses", "magic") == 6
    assert rig.metric("vllm:kvtier_disk_load_breaker") == 0
    rig.offload(keys(12))
    assert rigs.make(io_processes=processes).serve(keys(12)).hit_blocks == 12


def wait_for_stores(rig: Rig) -> int:
    """Store blocks until one more is written; return its number."""
    written, tried = rig.metric("vllm:kvtier_disk_written_blocks"), [9]

    def is_storing() -> bool:
        tried.append(tried[-1] + 1)
        rig.offload([key(tried[-1])], f"again {tried[-1]}")
        return rig.metric("vllm:kvtier_disk_written_blocks") > written

    wait_until(is_storing, "blocks are stored again")
    return tried[-1]


def test_a_server_that_comes_back_empty_costs_misses_and_no_restart(rigs: Rigs) -> None:
    rigs.write(keys(4))
    # As NFS says once the server has forgotten all handles.
    fs = FailingFs(OSError(errno.ESTALE, "stale"), lambda call, path: call != "close")
    fs.is_failing = False
    rig = rigs.make(fs=fs, refresh_seconds=0.1)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    fs.is_failing = True
    assert rig.serve(keys(4), "stale").hit_blocks == 0
    rig.offload([key(9)], "stale too")
    rigs.root.rename(rigs.root.with_name("forgotten"))
    rigs.root.mkdir()
    fs.is_failing = False
    last = wait_for_stores(rig)
    wait_until((rigs.root / "tier.json").exists, "the directory says again whose it is")
    assert rigs.make().serve([key(last)]).hit_blocks == 1
    wait_until(lambda: any(rigs.root.glob("journal/*")), "the engine tells the janitor again")


@pytest.mark.parametrize("years", [-40, 40])
def test_clocks_that_jump_neither_lose_a_block_nor_a_journal(rigs: Rigs, years: int) -> None:
    then = time.time_ns() + years * 365 * 86_400 * 10**9
    early = rigs.make()
    early.offload(keys(2, first=50), "before the jump")
    rigs.write(keys(4), clock=lambda: then)
    for path in rigs.root.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(then, then))
    late = rigs.make()
    assert late.serve(keys(4), "after").hit_blocks == 4
    assert late.serve(keys(2, first=50), "before").hit_blocks == 2
    numbers = itertools.count(60)

    def goes_on() -> bool:
        number = next(numbers)
        early.offload([key(number)], f"goes on {number}")
        return late.serve([key(number)]).hit_blocks == 1

    # A note of purges with another time holds stores back until the engine has read it.
    wait_until(goes_on, "an engine stores after the jump")


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
    rope = SimpleNamespace(rope_parameters=values.pop("rope"))
    cache = SimpleNamespace(cache_dtype=values.pop("cache_dtype"), prefix_caching_hash_algo=values.pop("hash"))
    return SimpleNamespace(model_config=SimpleNamespace(**values, hf_text_config=rope), cache_config=cache)


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
    rigs.make(options={"generation": rigs.root.name}).offload(keys(2))
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


BOTH = pytest.mark.parametrize("processes", [0, 2], ids=["threads", "movers"])


def encrypted(rigs: Rigs, cluster: Cluster, processes: int = 0) -> Rig:
    return rigs.make(
        keys_dir=str(cluster.keys), live_file=str(cluster.live), refresh_seconds=0.05, io_processes=processes
    )


def headers(root: Path) -> list[Header]:
    found = [decode_header(path.read_bytes()) for path in root.rglob("*.kvb")]
    return [header for header in found if isinstance(header, Header)]


@BOTH
def test_without_an_active_key_nothing_is_stored_and_it_shows(rigs: Rigs, cluster: Cluster, processes: int) -> None:
    rig = encrypted(rigs, cluster, processes)
    rig.offload(keys(3))
    assert headers(rigs.root) == []
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_key") == 3
    assert rig.metric("vllm:kvtier_disk_key_missing") == 1
    assert rig.metric("vllm:kvtier_disk_active") == 1


@BOTH
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
