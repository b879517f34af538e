# SPDX-License-Identifier: Apache-2.0
"""What a disk tier tells the startup probe: that it has its volume, or why it serves without."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rig import DIGEST, ROW_BYTES, Rigs, key, keys, wait_until
from slow_fs import FailingFs, GatedFs

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from planted import TOO_DEEP, plant

from kvtier_connector.cascade import volume
from kvtier_connector.contract.engine import encode_live
from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.pod_tools.ready import why_not_decided
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.identity import claim, read
from kvtier_connector.store.walks import LONGEST_PAUSE_SECONDS, next_pause

LONG = 600.0
"""Seconds of grace that no test waits for."""
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


def test_a_volume_that_hangs_holds_the_engine_back_until_it_answers(rigs: Rigs, state: Path) -> None:
    fs = GatedFs(lambda call, path: path.endswith("tier.json"))
    rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=LONG)
    wait_until(lambda: fs.waiting > 0, "the volume hangs")
    assert why_not_decided(state).endswith("ns/tier: the volume has not answered yet")
    fs.open_gate()
    wait_until(lambda: said(state) == ("attached", ""), "the volume is attached")


def test_a_volume_that_hangs_for_longer_than_its_grace_holds_the_engine_back_no_more(rigs: Rigs, state: Path) -> None:
    rigs.write(keys(2))
    fs = GatedFs(lambda call, path: path.endswith("tier.json"))
    rig = rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=SHORT)
    wait_until(lambda: said(state) == ("without", "the volume has not answered yet"), "the engine serves without")
    assert why_not_decided(state) == ""
    assert rig.serve(keys(2), "before", max_steps=0).hit_blocks == 0
    fs.open_gate()
    wait_until(lambda: said(state) == ("attached", ""), "the volume is attached")
    assert rig.serve(keys(2), "after").hit_blocks == 2


def test_a_volume_that_cannot_be_used_holds_the_engine_back_for_its_grace(rigs: Rigs, state: Path) -> None:
    fs = FailingFs(OSError(errno.EACCES, "Permission denied"), lambda call, path: path.endswith(DIGEST))
    rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=SHORT)
    wait_until(lambda: said(state)[0] == "without", "the engine serves without")


def test_a_stranger_serves_without_the_volume_at_once(rigs: Rigs, state: Path) -> None:
    rigs.make()
    rigs.make(identity={"model_name": "org/other"}, state_dir=str(state), attach_grace_seconds=LONG)
    wait_until(lambda: said(state)[0] == "without", "the engine serves without")
    assert "model_name" in said(state)[1]


def test_an_engine_that_starts_in_bypass_serves_at_once_and_attaches_when_it_may(
    rigs: Rigs, state: Path, tmp_path: Path
) -> None:
    live = tmp_path / "live.json"
    live.write_text(encode_live("Bypass"))
    rigs.make(state_dir=str(state), attach_grace_seconds=LONG, live_file=str(live), refresh_seconds=0.05)
    wait_until(lambda: said(state) == ("without", "the mode is Bypass"), "the engine serves without")
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
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 2, "the volume is walked")
    claim_for_somebody_else(rigs)

    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 0, "the engine has noticed")
    assert rig.metric("vllm:kvtier_disk_refused", "model_name") == 1
    assert rig.serve(keys(2)).hit_blocks == 0
    rig.offload(keys(1, first=7))
    assert rig.metric("vllm:kvtier_disk_shed_stores", "inert") == 1


def claim_for_somebody_else(rigs: Rigs) -> None:
    """Do as if the directory had been removed and made anew between two looks."""
    ours = read(rigs.root)
    assert ours is not None
    aside = rigs.root.with_name("theirs")
    claim(aside, {**ours["identity"], "model_name": "org/other"}, DIGEST)
    (aside / "tier.json").rename(rigs.root / "tier.json")


def test_what_waits_to_be_stored_does_not_go_to_somebody_else(rigs: Rigs) -> None:
    fs = GatedFs(lambda call, path: call == "pwritev" and "/blocks/" in path)
    rig = rigs.make(fs=fs, refresh_seconds=0.05, io_processes=1)
    rig.begin_offload(keys(5))
    wait_until(lambda: fs.waiting == 1, "one block is being written, and the others wait")
    claim_for_somebody_else(rigs)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 0, "the engine has noticed")
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_shed_stores", "inert") == 5
    fs.open_gate()
    rig.close()
    assert len(list((rigs.root / "blocks").rglob("*.kvb"))) <= 1


def test_what_others_left_behind_in_a_directory_of_somebody_else_is_left_there(rigs: Rigs) -> None:
    rigs.write(keys(2))
    # One of another test may hang for a while yet.
    others = set(threading.enumerate())
    rig = rigs.make(refresh_seconds=0.05, rescan_seconds=0.05)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 2, "the volume is walked")
    claim_for_somebody_else(rigs)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 0, "the engine has noticed")
    wait_until(
        lambda: "kvtier-volume" not in {thread.name for thread in {*threading.enumerate()} - others},
        "nobody walks it any more",
    )


def test_a_description_that_is_removed_under_an_engine_is_written_again(rigs: Rigs) -> None:
    rig = rigs.make(refresh_seconds=0.05)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    before = (rigs.root / "tier.json").read_bytes()
    (rigs.root / "tier.json").unlink()
    wait_until((rigs.root / "tier.json").exists, "it is written again")
    assert (rigs.root / "tier.json").read_bytes() == before
    rig.offload(keys(2))
    assert rig.serve(keys(2)).hit_blocks == 2


def test_a_directory_that_goes_and_comes_back_is_known_at_once(rigs: Rigs) -> None:
    rigs.write(keys(5))
    limit = 5 * (ROW_BYTES + HEADER_BYTES)
    rig = rigs.make(refresh_seconds=0.05, rescan_seconds=600.0, max_bytes=limit)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_used_bytes") == limit, "the volume is counted")
    aside = rigs.root.with_name("aside")
    rigs.root.rename(aside)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_used_bytes") == 0, "it is known to be gone")
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 0, "and so are its blocks")

    def put_back() -> bool:
        # The engine may write its journal into a directory that was just removed.
        shutil.rmtree(rigs.root, ignore_errors=True)
        with contextlib.suppress(OSError):
            aside.rename(rigs.root)
        return not aside.exists()

    wait_until(put_back, "it is back")
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 5, "it is known to be back")
    assert rig.serve(keys(5)).hit_blocks == 5
    wait_until(lambda: rig.metric("vllm:kvtier_disk_used_bytes") == limit, "and it is counted again")

    shutil.rmtree(rigs.root, ignore_errors=True)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_used_bytes") == 0, "it is known to be gone again")
    rig.offload(keys(3, first=9))
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3


@pytest.mark.parametrize("content", [TOO_DEEP, b""])
def test_a_brake_that_nobody_can_read_leaves_an_engine_that_hears_of_the_others(rigs: Rigs, content: bytes) -> None:
    rigs.root.parent.mkdir(parents=True, exist_ok=True)
    (rigs.root.parent / "brake.json").write_bytes(content)
    one, other = (rigs.make(refresh_seconds=0.05) for _ in range(2))
    one.offload(keys(3))
    wait_until(lambda: other.metric("vllm:kvtier_disk_known_blocks") == 3, "engines hear of each other")


@pytest.mark.parametrize(("kind", "processes"), [("link", 0), ("pipe", 1), ("directory", 1)])
def test_what_is_no_file_is_a_miss_and_opens_no_breaker(rigs: Rigs, kind: str, processes: int) -> None:
    rigs.write(keys(12))
    rig = rigs.make(io_processes=processes, rescan_seconds=600.0)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 12, "the volume is walked")
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


def test_a_bypassed_volume_is_walked_when_it_is_used_again(rigs: Rigs, tmp_path: Path) -> None:
    live = tmp_path / "live.json"
    live.write_text(encode_live("ReadOnly"))
    rigs.write(keys(1))
    rig = rigs.make(refresh_seconds=0.05, rescan_seconds=600.0, live_file=str(live))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 1, "the volume is walked")
    live.write_text(encode_live("Bypass"))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 2, "the mode is read")
    # Nobody tells of these: whoever stored them wrote no journal.
    rigs.write(keys(3))
    live.write_text(encode_live("ReadOnly"))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_known_blocks") == 3, "the volume is walked again")


def test_walks_become_rarer_until_there_is_one_a_day(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def noting(pause: float, first: float) -> float:
        assert first == 0.02
        seen.append(pause)
        return LONGEST_PAUSE_SECONDS / 2 if len(seen) == 4 else next_pause(pause, first)

    monkeypatch.setattr(volume, "next_pause", noting)
    rig = rigs.make(rescan_seconds=0.02)
    wait_until(lambda: len(seen) == 4, "the volume was walked four times")
    assert seen == [0.02, 0.04, 0.08, 0.16]
    assert next_pause(0.6 * LONGEST_PAUSE_SECONDS, 0.02) == LONGEST_PAUSE_SECONDS
    assert next_pause(2e6, 2e6) == 2e6
    rig.close()


def test_a_volume_that_could_not_be_walked_is_walked_as_soon_as_at_first(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    walks = 0

    def noting(pause: float, first: float) -> float:
        pauses.append(pause)
        return 8 * first

    monkeypatch.setattr(volume, "next_pause", noting)
    rescan = volume.SharedStore.rescan

    def fail_once(store: volume.SharedStore, **options: Any) -> bool:
        nonlocal walks
        walks += 1
        if walks == 2:
            raise StoreUnavailable("the second walk")
        return rescan(store, **options)

    monkeypatch.setattr(volume.SharedStore, "rescan", fail_once)
    rigs.make(rescan_seconds=0.02)
    wait_until(lambda: len(pauses) == 2, "walked again behind the one that failed")
    # Behind the first walk as at first, and so behind the one after the failure, not eight times as long.
    assert pauses == [0.02, 0.02]
