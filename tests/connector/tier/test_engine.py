# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, one after the other, on one directory: what one computed the next one reads.

Three engines serve all the claims but that on a GPU, since each takes a dozen seconds to start. Between them one
prompt's blocks are damaged, the adapter is rewritten, and one of the keys is replaced. Timings are printed, never
asserted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from engine_host import EngineHost
from engine_process import DIGEST, run_script, write_config
from safetensors.torch import load_file, save_file
from vllm.distributed import kv_events as vllm_events

from kvtier_connector.contract import engine
from kvtier_connector.janitor import events as kv_events
from kvtier_connector.store import layout
from kvtier_connector.store.header import Header, decode_header
from kvtier_demo.model import make_model
from kvtier_localcluster.ports import free_port
from kvtier_operator.plan import chunks
from kvtier_operator.plan.model_layout import EngineLayout, ModelLayout, make_model_layout

SCRIPT = Path(__file__).with_name("engine_script.py")
BLOCKS = 15
CACHED_TOKENS = BLOCKS * 128
RANK = 8
TENANT = hashlib.sha256(b"pepper").hexdigest()[:16]


@dataclass(frozen=True)
class Runs:
    """What three engines answered, and what lay on the volume after the second one."""

    directory: Path
    first: Mapping[str, Any]
    second: Mapping[str, Any]
    third: Mapping[str, Any]
    headers: Mapping[Path, Header]
    sizes: frozenset[int]
    events: Sequence[Any]

    @property
    def volume(self) -> Path:
        return self.directory / "volume"

    def identity(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.volume / DIGEST / "tier.json").read_text())
        return document["identity"]  # type: ignore[no-any-return]  # of an identity

    def of_salted(self) -> set[Path]:
        return {path for path in self.headers if "tenants" in path.parts}


def run_engine(host: EngineHost | None, directory: Path, *words: str, **settings: Any) -> dict[str, Any]:
    config = write_config(directory, directory / "volume", **settings)
    given = (f"--directory={directory}", f"--config={config}", *words)
    result = run_script(SCRIPT, *given, log=directory / "engine.log", host=host, timeout_seconds=800)
    for name, answer in result.items():
        if name != "metrics":
            sys.stdout.write(f"{name:8} {answer['seconds']:7.3f} s  {answer['cached_tokens']:5} tokens cached\n")
    sys.stdout.write(f"{result['metrics']}\n")
    return result


def read_headers(volume: Path) -> dict[Path, Header]:
    found = {path: decode_header(path.read_bytes()) for path in volume.rglob("*.kvb")}
    return {path: header for path, header in found.items() if isinstance(header, Header)}


def write_adapter(directory: Path, model: Path, seed: int) -> None:
    """Write a LoRA adapter that changes the answers; another seed is another one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            out_features, in_features = weight.shape
            prefix = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, in_features, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, RANK, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**described, "task_type": "CAUSAL_LM", "bias": "none"}))


def write_updated_model(directory: Path, model: Path) -> None:
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    changed = {
        name: each + 0.3 * each.std() * torch.randn(each.shape, generator=generator).to(each.dtype)
        if each.ndim > 1
        else each
        for name, each in weights.items()
    }
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})


@contextmanager
def published() -> Iterator[tuple[int, list[Any]]]:
    """Choose a port, and collect the events that an engine publishes there."""
    port, found = free_port(), list[Any]()
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.RECONNECT_IVL, 1)  # ms; with 100 as by default, the first events may be missed
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield port, found
        while subscriber.poll(5000):
            found += msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=vllm_events.KVEventBatch).events
    finally:
        subscriber.close(0)


def check_the_events(events: Sequence[Any], blocks: Iterable[Path]) -> None:
    """Check that engines name blocks as the volume's events do, and leave the volume to these."""
    keys = [layout.parse_block_path(str(path).split(f"{DIGEST}/")[1]) for path in blocks]
    names = {kv_events.shown(key.hash, is_integer=True) for key in keys if key is not None}
    stored = [each for each in events if isinstance(each, vllm_events.BlockStored)]
    by_medium = {
        medium: {name for each in stored if each.medium == medium for name in each.block_hashes}
        for medium in (vllm_events.MEDIUM_GPU, vllm_events.MEDIUM_CPU, vllm_events.MEDIUM_STORAGE)
    }
    assert len(names) == BLOCKS
    assert names <= by_medium[vllm_events.MEDIUM_GPU]
    assert names <= by_medium[vllm_events.MEDIUM_CPU]
    assert not by_medium[vllm_events.MEDIUM_STORAGE]
    told = [each for each in stored if each.medium == vllm_events.MEDIUM_CPU and set(each.block_hashes) <= names]
    assert {len(each.token_ids) for each in told} == {128}
    assert len({each.parent_block_hash for each in told} - {None} - names) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost) -> Runs:
    directory = tmp_path_factory.mktemp("engines")
    volume, keys, live = directory / "volume", directory / "keys", directory / engine.LIVE_FILE
    make_model(directory / "model", layers=2)
    write_updated_model(directory / "updated", directory / "model")
    write_adapter(directory / "adapter", directory / "model", 1)
    keys.mkdir()
    (keys / "k1").write_bytes(bytes(range(32)))
    (keys / "k2").write_bytes(bytes(range(32, 64)))
    live.write_text(engine.encode_live("ReadWrite", active_key="k1"))
    settings = {"keys_dir": str(keys), "live_file": str(live), "tenant_from": "CacheSalt"}
    asked = ("salted", "rekey", "base=cold", "reset", "base=cpu", "adapter", "blocks", "doomed", "damage")
    with published() as (port, events):
        first = run_engine(engine_host, directory, "--adapters", f"--events={port}", *asked, **settings)
    write_adapter(directory / "adapter", directory / "model", 2)
    asked = ("base", "salted", "adapter", "update", "base=updated", "other", "empty", "base=alone")
    second = run_engine(engine_host, directory, "--adapters", *asked, **settings)
    headers = read_headers(volume)
    sizes = frozenset(path.stat().st_size for path in headers)
    (keys / "k1").write_bytes(bytes(32))
    third = run_engine(engine_host, directory, "--adapters", "base", "salted", "adapter", "doomed", "other", **settings)
    return Runs(directory, first, second, third, headers, sizes, events)


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_a_second_engine_reads_from_disk_what_the_first_one_computed_and_answers_the_same(runs: Runs) -> None:
    first, second, third, counts = runs.first, runs.second, runs.third, runs.third["metrics"]
    assert first["cold"]["cached_tokens"] == 0
    assert first["cpu"]["cached_tokens"] == second["base"]["cached_tokens"] == CACHED_TOKENS
    assert first["cold"]["tokens"] == first["cpu"]["tokens"] == second["base"]["tokens"]
    assert second["metrics"]["vllm:kvtier_disk_read_blocks"] == 2 * BLOCKS  # and those of the salted prompt
    assert first["metrics"]["vllm:kvtier_disk_active"] == 1
    kv = make_model_layout(json.loads((runs.directory / "model" / "config.json").read_text()), EngineLayout())
    assert isinstance(kv, ModelLayout)
    assert runs.identity()["engine.bytes_per_chunk"] == chunks.bytes_of(128, kv)
    assert runs.sizes == {chunks.bytes_of(128, kv) + chunks.HEADER_BYTES}
    told = [first["metrics"][f"vllm:kvtier_{name}"] for name in ("chunk_bytes", "token_bytes")]
    assert told == [chunks.bytes_of(128, kv), chunks.bytes_of(128, kv) / 128]
    assert third["doomed"]["cached_tokens"] == 0
    assert third["doomed"]["tokens"] == first["doomed"]["tokens"]
    assert counts["vllm:kvtier_disk_read_blocks"] == 2 * BLOCKS >= 2 * counts["vllm:kvtier_disk_misses:tag"] > 0
    assert list((runs.volume / DIGEST / "quarantine").iterdir())


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_an_encrypted_cache_of_a_salted_prompt_answers_the_same_and_a_wrong_key_is_a_recompute(runs: Runs) -> None:
    salted = runs.of_salted()
    assert {runs.headers[path].seal.key_id for path in salted} == {"k1"}
    assert {path.name for path in salted}.isdisjoint(path.name for path in set(runs.headers) - salted)
    assert {header.seal.key_id for header in runs.headers.values()} == {"k1", "k2"}
    assert {path.parts[path.parts.index("tenants") + 1] for path in salted} == {TENANT}
    assert sorted(runs.headers[path].lineage.position for path in salted) == list(range(BLOCKS))
    check_the_events(runs.events, salted)
    assert runs.second["salted"]["cached_tokens"] == CACHED_TOKENS
    assert runs.third["salted"]["cached_tokens"] == 0
    answers = (runs.first["salted"], runs.second["salted"], runs.third["salted"], runs.first["cold"])
    assert len({tuple(answer["tokens"]) for answer in answers}) == 1
    assert runs.third["metrics"]["vllm:kvtier_disk_misses:key_wrong"] >= 1
    assert not list((runs.volume / DIGEST / "tenants").rglob("quarantine"))


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_rewritten_adapters_and_replaced_weights_never_give_an_answer_of_the_old_ones(runs: Runs) -> None:
    first, second, third = runs.first, runs.second, runs.third
    assert second["adapter"]["cached_tokens"] == 0
    assert second["adapter"]["tokens"] != first["adapter"]["tokens"] != first["cold"]["tokens"]
    assert third["base"]["cached_tokens"] == third["adapter"]["cached_tokens"] == CACHED_TOKENS
    assert third["base"]["tokens"] == first["cold"]["tokens"]
    assert third["adapter"]["tokens"] == second["adapter"]["tokens"]
    # The second engine computed with the updated weights, and the third one has the model's own.
    computed = (second["updated"], second["other"], second["alone"], third["other"])
    assert {answer["cached_tokens"] for answer in computed} == {0}
    assert second["updated"]["tokens"] == second["alone"]["tokens"] != second["base"]["tokens"]
    assert third["other"]["tokens"] != second["other"]["tokens"]
    assert second["metrics"]["vllm:kvtier_disk_active"] == 0
    assert [path.name for path in runs.volume.iterdir()] == [DIGEST]
    identity = runs.identity()
    assert identity["engine.dtype"] == "bfloat16"
    assert identity["engine.hash_algorithm"].startswith("sha256")
    assert identity["engine.rope"]["rope_parameters"]
    assert identity["engine.backends"][0].startswith("Attention/CPU_ATTN/")
    assert len(identity["engine.layout"]) == 1


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scheduling", ["async", "sync"])
def test_a_split_hit_is_answered_as_computed_one(tmp_path: Path, engine_host: EngineHost, scheduling: str) -> None:
    make_model(tmp_path / "model", layers=2)
    acts = ("base=cold", "blocks", "empty", "base=split", "reset", "base=again")
    found = run_engine(engine_host, tmp_path, f"--splits={scheduling}", *acts)
    assert 0 < found["split"]["cached_tokens"] < CACHED_TOKENS
    assert found["cold"]["tokens"] == found["split"]["tokens"] == found["again"]["tokens"]
    metrics = found["metrics"]
    assert metrics["vllm:kvtier_disk_split_joins"] >= 1
    assert metrics["vllm:kvtier_disk_split_tokens:loaded"] >= found["split"]["cached_tokens"]
    assert metrics["vllm:num_preemptions"] == 0


@pytest.mark.gpu
@pytest.mark.timeout(2400)
def test_on_a_gpu_too_an_engine_reads_from_disk_what_another_one_computed(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    first = run_engine(None, tmp_path, "base=cold", "reset", "base=cpu", "blocks", "doomed", "damage")
    second = run_engine(None, tmp_path, "base", "doomed")
    assert first["cold"]["cached_tokens"] == second["doomed"]["cached_tokens"] == 0
    assert first["cpu"]["cached_tokens"] == second["base"]["cached_tokens"] == CACHED_TOKENS
    assert first["cold"]["tokens"] == first["cpu"]["tokens"] == second["base"]["tokens"]
    assert first["doomed"]["tokens"] == second["doomed"]["tokens"]
    assert second["metrics"]["vllm:kvtier_disk_read_blocks"] == BLOCKS
    assert second["metrics"]["vllm:kvtier_disk_misses"] >= 1
