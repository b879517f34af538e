# SPDX-License-Identifier: Apache-2.0
"""Encryption, live settings and the store permit as an engine meets them: a missing key costs a recompute."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from rig import Rig, Rigs, keys, wait_until

from kvtier_connector.contract.engine import encode_live
from kvtier_connector.store.header import Header, decode_header

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
