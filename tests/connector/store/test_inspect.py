# SPDX-License-Identifier: Apache-2.0
"""The commands on a volume that holds several tiers, and on one generation."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
from plain_engine import PlainEngine
from store_contract import BLOCK_BYTES, key, payload
from store_faults import FailingFs

from kvtier_cli.app import main
from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.fsck import check_all
from kvtier_connector.store.identity import claim, find_generations
from kvtier_connector.store.layout import block_path, partial_path
from kvtier_connector.store.scan import WalkProgress

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Return the root of a volume with two tiers, one of them with two generations, and something else."""
    for path, blocks in (("kv/ns.llama/aaa", 3), ("kv/ns.llama/bbb", 2), ("ns.qwen/ccc", 1)):
        root = tmp_path / path
        claim(root, {"model": path}, root.name)
        store = PlainEngine(root)
        for number in range(blocks):
            store.put(key(number), payload(number))
        store.tell()
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "somebody").write_text("else")
    return tmp_path


def test_every_generation_of_a_volume_is_found(volume: Path) -> None:
    found = [str(path.relative_to(volume)) for path in find_generations(volume)]
    assert found == ["kv/ns.llama/aaa", "kv/ns.llama/bbb", "ns.qwen/ccc"]
    assert find_generations(volume / "ns.qwen/ccc") == [volume / "ns.qwen/ccc"]
    assert find_generations(volume / "nothing") == []


def test_the_directories_of_vllms_tier_are_not_searched(volume: Path) -> None:
    vllms = volume / "ns.qwen" / "0123456789abcdef"
    for place in ("M_0123456789ab", "M_0123456789ab_r0/abc/blocks", "M_ba9876543210_r0/blocks"):
        (vllms / place).mkdir(parents=True)
    # Only where its description stands beside it, it is vLLM's.
    assert find_generations(vllms) == [vllms / "M_ba9876543210_r0"]


def test_a_generation_without_its_description_is_found_by_its_blocks(volume: Path) -> None:
    (volume / "ns.qwen/ccc/tier.json").unlink()
    assert volume / "ns.qwen/ccc" in find_generations(volume)
    assert [problem.path for problem in check_all(volume).problems] == ["ns.qwen/ccc/tier.json"]


def test_a_volume_that_cannot_be_listed_is_unavailable(volume: Path) -> None:
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda call, path: "qwen" in str(path))
    with pytest.raises(StoreUnavailable, match="broken"):
        find_generations(volume, fs=fs)


def test_a_check_of_a_volume_verifies_all_its_generations(volume: Path) -> None:
    assert check_all(volume).problems == []
    assert check_all(volume).blocks == 6
    (volume / "kv/ns.llama/bbb" / block_path(key(0))).write_bytes(b"damaged")
    report = check_all(volume)
    assert [(problem.path, problem.kind) for problem in report.problems] == [
        (f"kv/ns.llama/bbb/{block_path(key(0))}", "truncated")
    ]
    assert len(check_all(volume / "kv").problems) == 1
    assert check_all(volume / "ns.qwen").problems == []


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_check_finds_the_same_with_any_number_of_threads(volume: Path, threads: int) -> None:
    root = volume / "kv/ns.llama/aaa"
    store = PlainEngine(root)
    for number in range(100):
        store.put(key(number), payload(number, 4096))
    for number in range(0, 100, 7):
        with (root / block_path(key(number))).open("r+b") as file:
            file.seek(5000)
            file.write(b"damaged")
    told: list[tuple[float, int, int]] = []
    report = check_all(root, threads=threads, progress=WalkProgress(lambda *each: told.append(each)))
    assert report == check_all(root)
    assert len(report.problems) == 15
    assert told[-1][1:] == (report.blocks, report.bytes) == (100, 100 * 8192)


def test_progress_over_several_walks_only_grows_and_counts_all_blocks(volume: Path) -> None:
    told: list[tuple[float, int, int]] = []
    check_all(volume, progress=WalkProgress(lambda *each: told.append(each)))
    assert told == sorted(told)
    assert told[-1] == (1.0, 6, 6 * BLOCK_BYTES)


def test_inspect_shows_generations_sizes_ages_and_what_is_left_over(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = volume / "kv/ns.llama/aaa"
    (root / partial_path(block_path(key(0)), TOKEN)).write_bytes(b"half")
    (root / "quarantine").mkdir()
    (root / f"quarantine/00_g0.kvb.checksum.{TOKEN}").write_bytes(b"12345")
    two_days_ago = time.time_ns() - 2 * 86_400 * 10**9
    os.utime(root / block_path(key(0)), ns=(two_days_ago, two_days_ago))
    assert main(["inspect", str(volume), "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["volume"]["bytes"] > document["volume"]["free"] > 0
    first, second, third = document["generations"]
    assert [each["path"] for each in (first, second, third)] == ["kv/ns.llama/aaa", "kv/ns.llama/bbb", "ns.qwen/ccc"]
    assert first["identity"] == {"model": "kv/ns.llama/aaa"}
    assert first["blocks"] == {"files": 3, "bytes": 3 * BLOCK_BYTES}
    assert {name: heap["files"] for name, heap in first["ages"].items()} == {
        "1 h": 2,
        "1 d": 0,
        "7 d": 1,
        "30 d": 0,
        "older": 0,
    }
    assert first["newestSeconds"] < 3600
    assert first["oldestSeconds"] > 86_400
    assert first["leftovers"]["partial"] == {"files": 1, "bytes": 4}
    assert first["leftovers"]["quarantined"] == {"files": 1, "bytes": 5}
    assert third["blocks"]["files"] == 1


def test_inspect_is_readable_for_people(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = volume / "ns.qwen/ccc"
    assert main(["inspect", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 block, 68 KiB, in 1 generation"
    assert lines[1].startswith("volume: ")
    assert "  blocks       1 block, 68 KiB" in lines
    assert "    up to 1 h  1 block, 68 KiB" in lines


def test_inspect_says_what_it_could_not_look_at(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (volume / "ns.qwen/ccc/tier.json").write_text("{")
    assert main(["inspect", str(volume)]) == 1
    assert "not JSON" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["check", "inspect"])
def test_a_directory_that_is_not_there_is_a_mistake_of_the_command_line(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(tmp_path / "nothing")]) == 2
    assert "nothing is no directory" in capsys.readouterr().err


def test_inspect_looks_at_an_empty_volume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 0
    assert "0 generations" in capsys.readouterr().out


def test_inspect_shows_the_largest_tenants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = BlockStore(tmp_path)
    claim(tmp_path, {}, "d1gest")
    for number, tenant in enumerate(["acme", "acme", "other", ""]):
        store.put(key(number)._replace(tenant=tenant), payload(number))
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.split() == ["tenants", "2"])
    assert [line.split()[:2] for line in lines[place + 1 : place + 3]] == [["acme", "2"], ["other", "1"]]
    assert main(["inspect", str(tmp_path), "-o", "json"]) == 0
    (generation,) = json.loads(capsys.readouterr().out)["generations"]
    assert {name: heap["files"] for name, heap in generation["tenants"].items()} == {"acme": 2, "other": 1}
