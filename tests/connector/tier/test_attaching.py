# SPDX-License-Identifier: Apache-2.0
"""What a disk tier tells the startup probe: that it has its volume, or why it serves without."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from rig import DIGEST, Rigs, keys, wait_until
from slow_fs import FailingFs, GatedFs

from kvtier_connector.contract import encode_live
from kvtier_connector.ready import why_not_decided

LONG = 600.0
"""Seconds of grace that no test waits for."""
SHORT = 0.05


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvtier_connector.tier.manager.OPEN_WAIT_SECONDS", 0.1)
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
