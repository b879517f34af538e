# SPDX-License-Identifier: Apache-2.0
"""Encryption, live settings and the brake as an engine meets them: a key that is missing costs a recompute, no more."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from rig import ROW_BYTES, Rig, Rigs, keys, payload, wait_until

from kvtier_connector.contract.engine import encode_live
from kvtier_connector.store.header import Encryption, Header, decode_header
from kvtier_connector.store.runtime_settings import Brake, Mode, encode_brake

K1, K2 = bytes(range(32)), bytes(range(1, 33))


class Cluster:
    """What Kubernetes mounts: the keys and the live settings."""

    def __init__(self, directory: Path) -> None:
        self.keys = directory / "keys"
        self.keys.mkdir()
        self.live = directory / "live.json"
        self.say()

    def say(self, mode: str = "ReadWrite", *, max_bytes: int | None = None, active_key: str = "") -> None:
        fresh = self.live.with_suffix(".new")
        fresh.write_text(encode_live(mode, max_bytes=max_bytes, active_key=active_key))
        fresh.replace(self.live)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture(params=[0, 2], ids=["threads", "movers"])
def processes(request: pytest.FixtureRequest) -> int:
    """Who encrypts and decrypts."""
    number: int = request.param
    return number


def encrypted(rigs: Rigs, cluster: Cluster, processes: int = 0) -> Rig:
    return rigs.make(
        keys_dir=str(cluster.keys), live_file=str(cluster.live), refresh_seconds=0.05, io_processes=processes
    )


def headers(root: Path) -> list[Header]:
    found = [decode_header(path.read_bytes()) for path in root.rglob("*.kvb")]
    return [header for header in found if isinstance(header, Header)]


def test_what_one_engine_encrypts_another_decrypts(rigs: Rigs, cluster: Cluster, processes: int) -> None:
    (cluster.keys / "k1").write_bytes(K1)
    cluster.say(active_key="k1")
    encrypted(rigs, cluster, processes).offload(keys(10))
    assert {(header.encryption, header.seal.key_id) for header in headers(rigs.root)} == {
        (Encryption.AES_256_GCM, "k1")
    }
    content = b"".join(path.read_bytes() for path in rigs.root.rglob("*.kvb"))
    assert not any(payload(of)[:32] in content for of in keys(10))
    assert encrypted(rigs, cluster, processes).serve(keys(10)).hit_blocks == 10


@pytest.mark.parametrize(("content", "cause"), [(None, "key_missing"), (K2, "key_wrong")])
def test_a_missing_or_wrong_key_is_computed_again_and_leaves_the_blocks(
    rigs: Rigs, cluster: Cluster, processes: int, content: bytes | None, cause: str
) -> None:
    (cluster.keys / "k1").write_bytes(K1)
    cluster.say(active_key="k1")
    encrypted(rigs, cluster, processes).offload(keys(4))
    (cluster.keys / "k1").unlink()
    if content is not None:
        (cluster.keys / "k1").write_bytes(content)
    reader = encrypted(rigs, cluster, processes)
    assert reader.serve(keys(4)).hit_blocks == 0
    reader.settle()
    assert reader.metric("vllm:kvtier_disk_misses", cause) == 4
    assert len(headers(rigs.root)) == 4
    assert not (rigs.root / "quarantine").exists()
    (cluster.keys / "k1").write_bytes(K1)
    assert encrypted(rigs, cluster, processes).serve(keys(4)).hit_blocks == 4


def test_without_an_active_key_nothing_is_stored_and_it_shows(rigs: Rigs, cluster: Cluster, processes: int) -> None:
    rig = encrypted(rigs, cluster, processes)
    rig.offload(keys(3))
    assert headers(rigs.root) == []
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_key") == 3
    assert rig.metric("vllm:kvtier_disk_key_missing") == 1
    assert rig.metric("vllm:kvtier_disk_active") == 1


def test_a_key_is_rotated_without_a_restart(rigs: Rigs, cluster: Cluster, processes: int) -> None:
    (cluster.keys / "k1").write_bytes(K1)
    cluster.say(active_key="k1")
    rig = encrypted(rigs, cluster, processes)
    rig.offload(keys(2), "first")
    (cluster.keys / "k2").write_bytes(K2)
    cluster.say(active_key="k2")
    numbers = itertools.count(100)

    def is_rotated() -> bool:
        number = next(numbers)
        rig.offload(keys(1, first=number), f"r{number}")
        return "k2" in {header.seal.key_id for header in headers(rigs.root)}

    wait_until(is_rotated, "the engine writes with the new key")
    assert rig.metric("vllm:kvtier_disk_key_missing") == 0
    assert encrypted(rigs, cluster, processes).serve(keys(2)).hit_blocks == 2


def test_the_limit_follows_the_live_settings(rigs: Rigs, cluster: Cluster) -> None:
    cluster.say(max_bytes=2 * (ROW_BYTES + 4096))
    rig = rigs.make(live_file=str(cluster.live), refresh_seconds=0.05)
    rig.offload(keys(4), "first")
    assert len(headers(rigs.root)) == 2
    cluster.say(max_bytes=0)
    numbers = itertools.count(100)

    def is_raised() -> bool:
        number = next(numbers)
        rig.offload(keys(1, first=number), f"r{number}")
        return len(headers(rigs.root)) > 2

    wait_until(is_raised, "the engine stores again")


def brake(rigs: Rigs, mode: Mode, seconds: float) -> None:
    rigs.root.parent.mkdir(parents=True, exist_ok=True)
    until = time.time_ns() + int(seconds * 1e9)
    (rigs.root.parent / "brake.json").write_bytes(encode_brake(Brake(mode, "the volume is full", until)))


def test_engines_follow_the_janitors_brake_and_go_on_when_it_lets_go(rigs: Rigs) -> None:
    rig = rigs.make(refresh_seconds=0.05)
    rig.offload(keys(2), "before")
    brake(rigs, Mode.READ_ONLY, 3600)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 1, "the engine brakes")
    rig.offload(keys(2, first=10), "braked")
    assert len(headers(rigs.root)) == 2
    assert rig.metric("vllm:kvtier_disk_shed_stores", "mode") == 2
    rig.manager.reset_cache()
    assert rig.serve(keys(2)).hit_blocks == 2
    brake(rigs, Mode.READ_WRITE, 0)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 0, "the engine stores again")


def test_of_brake_and_live_mode_the_stricter_counts(rigs: Rigs, cluster: Cluster) -> None:
    cluster.say("ReadOnly")
    brake(rigs, Mode.BYPASS, 3600)
    rig = rigs.make(live_file=str(cluster.live), refresh_seconds=0.05)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 2, "the brake counts")
    brake(rigs, Mode.READ_WRITE, 0)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 1, "the live settings count")
