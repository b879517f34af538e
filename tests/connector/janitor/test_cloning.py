# SPDX-License-Identifier: Apache-2.0
"""A generation is copied to another directory: what arrives was verified, and what was cut short goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tier_dir import BLOCK_BYTES, Engine, Rig, key

from kvtier_cli.app import main
from kvtier_connector.store.check import check
from kvtier_connector.store.layout import block_path


@pytest.fixture
def engine(rig: Rig) -> Engine:
    engine = rig.engine()
    engine.put_chain(*range(6))
    engine.put(1, tenant="alice")
    return engine


def clone(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert main(["clone", *map(str, words), "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_clone_is_dry_until_yes_and_then_whole(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "other" / "ns.green"
    found = clone(capsys, rig.dir, target)
    assert (found["dryRun"], found["blocks"], found["bytes"]) == (True, 7, 7 * BLOCK_BYTES)
    assert not target.exists()
    assert clone(capsys, rig.dir, target, "--yes")["blocks"] == 7
    assert check(target / "aa") == []
    for number in range(6):
        path = block_path(key(number))
        assert (target / "aa" / path).read_bytes() == (engine.root / path).read_bytes()
        assert (target / "aa" / path).stat().st_mtime_ns == (engine.root / path).stat().st_mtime_ns
    again = clone(capsys, rig.dir, target, "--yes")
    assert (again["blocks"], again["present"]) == (0, 7)


def test_a_damaged_block_is_left_behind_and_named(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = block_path(key(2))
    content = bytearray((engine.root / damaged).read_bytes())
    content[-1] ^= 1
    (engine.root / damaged).write_bytes(content)
    found = clone(capsys, rig.dir, tmp_path / "green", "--yes", code=1)
    assert found["damaged"] == [{"path": damaged, "kind": "checksum"}]
    assert found["blocks"] == 6
    assert not (tmp_path / "green" / "aa" / damaged).exists()
    assert check(tmp_path / "green" / "aa", partial_age_seconds=0) == []


def test_a_clone_that_was_cut_short_goes_on(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone(capsys, rig.dir, tmp_path / "green", "--yes")
    (tmp_path / "green" / "aa" / block_path(key(4))).unlink()
    found = clone(capsys, engine.root, tmp_path / "green", "--yes")
    assert (found["blocks"], found["present"]) == (1, 6)


def test_a_place_that_belongs_to_another_model_is_not_touched(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = tmp_path / "green" / "aa"
    stranger.mkdir(parents=True)
    document = json.loads((engine.root / "tier.json").read_text())
    (stranger / "tier.json").write_text(json.dumps({**document, "identity": {"model": "other"}}))
    for words in ([], ["--yes"]):
        assert main(["clone", str(rig.dir), str(tmp_path / "green"), *words]) == 1
    assert [each.name for each in stranger.iterdir()] == ["tier.json"]


def test_which_generation_is_meant_must_be_clear(
    engine: Engine, rig: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.engine("bb")
    wrong = {
        ("--generation", "cc"): "holds no generation cc",
        (): "holds several generations; name one with --generation: aa, bb",
    }
    for words, said in wrong.items():
        assert main(["clone", str(rig.dir), str(tmp_path / "green"), *words]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "green").exists()
    assert main(["clone", str(rig.dir), str(rig.dir), "--generation", "aa", "--yes"]) == 1
    assert "is the tier that is to be copied" in capsys.readouterr().err
