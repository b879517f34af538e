# SPDX-License-Identifier: Apache-2.0
"""A generation of an earlier format, whose blocks lie in two levels of directories: it can be counted and purged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tier_dir import BLOCK_BYTES, Engine, Rig, key

from kvtier_cli.app import main
from kvtier_connector.store.layout import block_path, parse_block_path, parse_earlier_block_path


@pytest.fixture
def earlier(rig: Rig) -> Engine:
    """Return an engine whose blocks were moved to where format 3 had them."""
    engine = rig.engine("bb")
    engine.put_chain(*range(4))
    engine.put(1, tenant="alice")
    for path in [*engine.root.rglob("*.kvb")]:
        directory = path.parent / path.name[3:5]
        directory.mkdir(exist_ok=True)
        path.rename(directory / path.name)
    document = json.loads((engine.root / "tier.json").read_text())
    (engine.root / "tier.json").write_text(json.dumps({**document, "format": 3}))
    return engine


def blocks(engine: Engine) -> list[Path]:
    return sorted(engine.root.rglob("*.kvb"))


def run_json(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    assert main([*map(str, words), "-o", "json"]) == code
    return json.loads(capsys.readouterr().out)


def test_it_is_told_by_its_path(earlier: Engine) -> None:
    found = [str(path.relative_to(earlier.root)) for path in blocks(earlier)]
    assert [parse_block_path(path) for path in found] == [None] * 5
    assert {parse_earlier_block_path(path) for path in found} == {
        *(key(number) for number in range(4)),
        key(1)._replace(tenant="alice"),
    }
    name = block_path(key(1)).rpartition("/")[2]
    for other in (block_path(key(1)), f"blocks/{name[:3]}/zz/{name}", f"blocks/abc/{name[3:5]}/{name}"):
        assert parse_earlier_block_path(other) is None


def test_all_of_it_goes(earlier: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "purge", rig.dir, "--all")
    assert (answer["blocks"], answer["bytes"]) == (5, 5 * BLOCK_BYTES)
    assert len(blocks(earlier)) == 5
    assert run_json(capsys, "purge", rig.dir, "--all", "--yes")["blocks"] == 5
    assert blocks(earlier) == []


def test_what_is_a_tenants_goes(earlier: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "purge", rig.dir, "--tenant", "alice", "--yes")
    assert len(blocks(earlier)) == 4


def test_of_what_may_be_an_adapters_it_is_said(earlier: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(capsys, "purge", rig.dir, "--lora", "sql", "--yes", code=1)
    (generation,) = answer["generations"]
    assert (generation["blocks"], generation["failed"]) == (0, 5)
    assert "purge this generation with --generation bb" in generation["problem"]
    assert len(blocks(earlier)) == 5


def test_it_is_counted_and_nothing_of_it_is_taken_for_a_block(
    earlier: Engine, rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = run_json(capsys, "inspect", rig.dir)["generations"]
    assert (found["blocks"]["files"], found["leftovers"]["earlier"]) == (0, {"files": 5, "bytes": 5 * BLOCK_BYTES})
    document = json.loads((earlier.root / "tier.json").read_text())
    assert run_json(capsys, "check", rig.dir, code=1)["problemsByKind"] == {"outdated": 1}
    (earlier.root / "tier.json").write_text(json.dumps({**document, "format": 4}))
    assert run_json(capsys, "check", rig.dir, code=1)["problemsByKind"] == {"earlier": 5}
