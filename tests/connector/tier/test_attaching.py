# SPDX-License-Identifier: Apache-2.0
"""What a disk tier tells the startup probe: that it has its volume, or why it serves without."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import time
import uuid
from pathlib import Path

import pytest
from rig import DIGEST, Rig, Rigs, key, keys, wait_until
from store_faults import FailingFs, GatedFs, plant

from kvtier_connector.contract.engine import encode_live
from kvtier_connector.pod_tools.ready import why_not_decided
from kvtier_connector.store.identity import claim, read

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


def test_a_volume_that_cannot_be_used_holds_the_engine_back_for_its_grace(rigs: Rigs, state: Path) -> None:
    fs = FailingFs(OSError(errno.EACCES, "Permission denied"), lambda call, path: path.endswith(DIGEST))
    rigs.make(fs=fs, state_dir=str(state), attach_grace_seconds=SHORT)
    wait_until(lambda: said(state)[0] == "without", "the engine serves without")


def test_a_stranger_serves_without_the_volume_at_once(rigs: Rigs, state: Path) -> None:
    rigs.make()
    rigs.make(identity={"model_name": "org/other"}, state_dir=str(state), attach_grace_seconds=LONG)
    wait_until(lambda: said(state)[0] == "without", "the engine serves without")
    assert "model_name" in said(state)[1]


def test_who_starts_in_bypass_serves_at_once_and_attaches_when_it_may(rigs: Rigs, state: Path, tmp_path: Path) -> None:
    live = tmp_path / "live.json"
    live.write_text(encode_live("Bypass"))
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
