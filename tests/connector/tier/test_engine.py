# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines, one after the other, on one directory: what one computed the next one reads.

Timings are printed, never asserted.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_process import DIGEST, run_script, write_config
from vllm.distributed import kv_events as vllm_events

from kvtier_connector import contract
from kvtier_connector.janitor import kv_events
from kvtier_connector.store import layout
from kvtier_connector.store.format import Header, decode_header
from kvtier_demo.model import make_model
from kvtier_operator.plan import chunks
from kvtier_operator.plan.kv import KvCache, Layout, make_kv

SCRIPT = Path(__file__).with_name("engine_script.py")
BLOCKS = 15
"""2000 tokens fill 15 chunks of 128."""
CACHED_TOKENS = BLOCKS * 128


def run_engine(
    directory: Path, *asks: str, blocks: int = 0, options: tuple[str, ...] = (), **settings: Any
) -> dict[str, Any]:
    config = write_config(directory, directory / "volume", **settings)
    return run_script(
        SCRIPT,
        f"--directory={directory}",
        f"--config={config}",
        f"--blocks={blocks}",
        *options,
        *asks,
        timeout_seconds=300,
    )


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_a_second_engine_reads_from_disk_what_the_first_one_computed_and_answers_the_same(tmp_path: Path) -> None:
    check_the_same_answers(tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(1200)
def test_on_a_gpu_too_an_engine_reads_from_disk_what_another_one_computed(tmp_path: Path) -> None:
    check_the_same_answers(tmp_path)


def check_the_sizes_that_the_operator_expects(directory: Path, files: list[Path]) -> None:
    kv = make_kv(json.loads((directory / "model" / "config.json").read_text()), Layout())
    assert isinstance(kv, KvCache)
    expected = chunks.bytes_of(128, kv)
    identity = json.loads((directory / "volume" / DIGEST / "tier.json").read_text())["identity"]
    assert identity["engine.bytes_per_chunk"] == expected
    assert {file.stat().st_size for file in files} == {expected + chunks.HEADER_BYTES}


@contextmanager
def published() -> Iterator[tuple[int, list[Any]]]:
    """Choose a port, and collect the events that an engine publishes there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[Any] = []
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield port, found
        while subscriber.poll(500):
            found += msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=vllm_events.KVEventBatch).events
    finally:
        subscriber.close(0)


def check_the_events(events: list[Any], blocks: list[Path]) -> None:
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


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_an_encrypted_cache_of_a_salted_prompt_answers_the_same_and_a_wrong_key_is_a_recompute(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(bytes(range(32)))
    live = tmp_path / contract.LIVE_FILE
    live.write_text(contract.encode_live("ReadWrite", active_key="k1"))
    settings = {"keys_dir": str(keys), "live_file": str(live), "tenant_from": "CacheSalt"}
    options = ("--salt=pepper",)
    with published() as (port, events):
        first = run_engine(tmp_path, "cold", blocks=BLOCKS, options=(*options, f"--events={port}"), **settings)
    tenant = hashlib.sha256(b"pepper").hexdigest()[:16]
    blocks = sorted((tmp_path / "volume" / DIGEST / "tenants" / tenant).rglob("*.kvb"))
    check_the_events(events, blocks)
    headers = [decode_header(path.read_bytes()) for path in blocks]
    second = run_engine(tmp_path, "disk", options=options, **settings)
    (keys / "k1").write_bytes(bytes(32))
    third = run_engine(tmp_path, "wrong", options=options, **settings)

    assert len(blocks) == BLOCKS
    assert list((tmp_path / "volume").rglob("blocks/**/*.kvb")) == list((tmp_path / "volume").rglob("tenants/**/*.kvb"))
    assert {isinstance(header, Header) and header.seal.key_id for header in headers} == {"k1"}
    assert [header.lineage.position for header in headers if isinstance(header, Header)].count(0) == 1
    identity = json.loads((tmp_path / "volume" / DIGEST / "tier.json").read_text())["identity"]
    assert identity["engine.dtype"] == "bfloat16"
    assert identity["engine.hash_algorithm"].startswith("sha256")
    assert identity["engine.rope"]["rope_parameters"]
    assert second["disk"]["cached_tokens"] == CACHED_TOKENS
    assert third["wrong"]["cached_tokens"] == 0
    assert first["cold"]["tokens"] == second["disk"]["tokens"] == third["wrong"]["tokens"]
    assert third["metrics"]["vllm:kvtier_disk_misses:key_wrong"] >= 1
    assert not list((tmp_path / "volume").rglob("quarantine"))


def check_the_same_answers(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    first = run_engine(tmp_path, "cold", "reset", "cpu", blocks=BLOCKS)
    second = run_engine(tmp_path, "disk")
    files = sorted((tmp_path / "volume").rglob("*.kvb"))
    check_the_sizes_that_the_operator_expects(tmp_path, files)
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    third = run_engine(tmp_path, "corrupt")

    for label, answer in (
        ("cold", first["cold"]),
        ("cpu", first["cpu"]),
        ("disk", second["disk"]),
        ("corrupt", third["corrupt"]),
    ):
        sys.stdout.write(f"{label:8} {answer['seconds']:7.3f} s  {answer['cached_tokens']:5} tokens cached\n")
    sys.stdout.write(f"{second['metrics']}\n")
    assert first["cold"]["cached_tokens"] == 0
    assert first["cpu"]["cached_tokens"] == CACHED_TOKENS
    assert second["disk"]["cached_tokens"] == CACHED_TOKENS
    assert third["corrupt"]["cached_tokens"] == 0
    expected = first["cold"]["tokens"]
    assert expected == first["cpu"]["tokens"] == second["disk"]["tokens"] == third["corrupt"]["tokens"]
    assert second["metrics"]["vllm:kvtier_disk_read_blocks"] == BLOCKS
    assert second["metrics"]["vllm:kvtier_disk_active"] == 1
    assert third["metrics"]["vllm:kvtier_disk_misses"] >= 1
