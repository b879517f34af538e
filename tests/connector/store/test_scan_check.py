# SPDX-License-Identifier: Apache-2.0
"""Walking, cleaning and checking a root."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from pathlib import Path

import pytest
from checks import check
from command import Command
from plain_engine import PlainEngine
from store_contract import BLOCK_BYTES, key, payload
from store_faults import FailingFs, HookedFs

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.fsck import check_all
from kvtier_connector.store.header import Fault
from kvtier_connector.store.identity import claim, find_generations
from kvtier_connector.store.layout import block_path, partial_path
from kvtier_connector.store.scan import BlockEntry, Leftover, LeftoverKind, WalkProgress, scan

TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def root(unchecked_root: Path) -> Path:
    store = BlockStore(unchecked_root)
    for number in range(3):
        store.put(key(number), payload(number))
    return unchecked_root


def litter(root: Path) -> dict[str, LeftoverKind]:
    directory = Path(block_path(key(0))).parent
    kinds = {
        partial_path(block_path(key(9)), TOKEN): LeftoverKind.PARTIAL,
        partial_path("tier.json", TOKEN): LeftoverKind.PARTIAL,
        partial_path("direct-io", TOKEN): LeftoverKind.PARTIAL,
        f"quarantine/00_g0.kvb.checksum.{TOKEN}": LeftoverKind.QUARANTINED,
        "README": LeftoverKind.FOREIGN,
        str(directory / "notes.txt"): LeftoverKind.FOREIGN,
        f"blocks/{Path(block_path(key(0))).name}": LeftoverKind.FOREIGN,
        "lost+found/#123": LeftoverKind.FOREIGN,
    }
    for path in kinds:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"12345")
    (root / directory / "link").symlink_to("/etc/passwd")
    return {**kinds, str(directory / "link"): LeftoverKind.FOREIGN}


def test_a_scan_names_every_block_once_and_says_what_every_other_file_is(root: Path) -> None:
    entries = sorted(entry for entry in scan(root) if isinstance(entry, BlockEntry))
    assert [entry.key for entry in entries] == [key(number) for number in range(3)]
    assert [entry.path for entry in entries] == [block_path(key(number)) for number in range(3)]
    assert {entry.size for entry in entries} == {BLOCK_BYTES}
    assert entries[0].mtime_ns == (root / entries[0].path).stat().st_mtime_ns
    kinds = litter(root)
    found = {entry.path: entry.kind for entry in scan(root, partial_age_seconds=0) if isinstance(entry, Leftover)}
    assert found == kinds


def test_a_young_partial_file_belongs_to_a_writer_at_work(root: Path) -> None:
    partial = root / partial_path(block_path(key(0)), TOKEN)
    partial.write_bytes(b"half")
    written_ns = partial.stat().st_mtime_ns
    one_hour = 3600 * 10**9
    assert all(isinstance(entry, BlockEntry) for entry in scan(root, clock=lambda: written_ns + one_hour - 1))
    assert Leftover(LeftoverKind.PARTIAL, str(partial.relative_to(root)), 4, written_ns) in set(
        scan(root, clock=lambda: written_ns + one_hour)
    )
    assert check(root) == []


def test_the_names_of_an_nfs_client_are_ignored(root: Path) -> None:
    (root / block_path(key(0))).with_name(".nfs000000000001").write_bytes(b"open somewhere")
    assert check(root, partial_age_seconds=0) == []


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_what_goes_while_it_is_listed_is_left_out(root: Path, call: str) -> None:
    def vanish(name: str, path: str) -> None:
        if name == call and "/blocks/" in path:
            shutil.rmtree(path if call == "scandir" else Path(path).parent)

    assert list(scan(root, fs=HookedFs(vanish))) == []


@pytest.mark.parametrize(("call", "number"), [("scandir", errno.EIO), ("scandir", errno.ESTALE), ("stat", errno.EIO)])
def test_a_volume_that_cannot_be_walked_is_unavailable(root: Path, call: str, number: int) -> None:
    error = OSError(number, "broken")
    fs = FailingFs(error, when=lambda name, path: name == call and "blocks" in str(path))
    with pytest.raises(StoreUnavailable, match="broken") as caught:
        list(scan(root, fs=fs))
    assert caught.value.__cause__ is error
    assert [problem.kind for problem in check(root, fs=fs)] == ["unreadable"]


def test_a_check_names_all_problems_in_order_and_changes_nothing(root: Path) -> None:
    litter(root)
    (root / block_path(key(0))).write_bytes(b"damaged")
    with (root / block_path(key(1))).open("ab") as file:
        file.write(b"more")
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))
    problems = check(root, partial_age_seconds=0)
    assert problems == sorted(problems)
    assert all(problem.message for problem in problems)
    assert {Fault.TRUNCATED.value, Fault.TRAILING.value, "foreign"} <= {problem.kind for problem in problems}
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*")) == before


def test_a_directory_that_is_no_tier_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check(tmp_path)
    assert (problem.path, problem.kind) == ("tier.json", "identity")


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("step", range(1, 6))
def test_a_directory_that_was_replaced_on_the_server_is_listed_again(root: Path, step: int, threads: int) -> None:
    numbers = itertools.count(1)
    stale = FailingFs(OSError(errno.ESTALE, "stale"), lambda call, _: call == "scandir" and next(numbers) == step)
    found = {entry.path for entry in scan(root, fs=stale, threads=threads)}
    assert next(numbers) > step
    assert found == {block_path(key(number)) for number in range(3)}


@pytest.mark.parametrize(("call", "kinds"), [("open", ["io"]), ("preadv", [*["io"] * 3, "identity"])])
def test_a_file_that_cannot_be_read_is_a_problem(root: Path, call: str, kinds: list[str]) -> None:
    # A read has no path.
    paths = {"", str(root / block_path(key(0)))}
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, at: name == call and at in paths)
    assert [problem.kind for problem in check(root, fs=fs)] == kinds


@pytest.mark.parametrize("other", ["0ther", "d1gest.w1"], ids=["another generation", "other weights"])
def test_a_file_copied_from_elsewhere_is_named(root: Path, other: str, kvtier: Command) -> None:
    there = root.parent / other
    claim(there, {}, other)
    BlockStore(there).put(key(5), payload(5))
    path = block_path(key(1))
    (there / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / path, there / path)
    text = kvtier("check", root.parent, code=1)
    assert kvtier.err == ""
    assert f"{other}/{path}: generation: it was written for another generation than its directory's" in text
    assert "5 blocks" in text
    assert "1 problem: 1 generation" in text


def test_a_file_that_was_moved_within_its_generation_is_named(root: Path) -> None:
    name, path = Path(block_path(key(1))).name, block_path(key(1))
    elsewhere = Path(block_path(key(2))).parent / name
    shutil.copy(root / path, root / elsewhere)
    (root / block_path(key(7))).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / path, root / block_path(key(7)))
    kinds = {problem.path: problem.kind for problem in check(root)}
    assert kinds == {str(elsewhere): "foreign", block_path(key(7)): "key"}


def test_the_command_lists_problems_and_fails_and_its_document_counts_all_and_lists_the_first(
    root: Path, kvtier: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (kvtier("check", root), kvtier.err) == ("3 blocks, 204 KiB, 0 problems\n", "")
    (root / block_path(key(0))).write_bytes(b"damaged")
    text = kvtier("check", root, code=1)
    assert kvtier.err == ""
    assert text.splitlines() == [
        f"{block_path(key(0))}: truncated: it ends too early; a reader moves it away, and the block is computed again",
        "3 blocks, 136 KiB, 1 problem: 1 truncated",
    ]
    monkeypatch.setattr("kvtier_connector.janitor.commands.MOST_PROBLEMS", 2)
    for number in range(3):
        (root / block_path(key(number))).write_bytes(b"")
    document = kvtier.json("check", root, code=1)
    assert (document["problemsByKind"], kvtier.err) == ({"empty": 3}, "")
    assert [problem["path"] for problem in document["problems"]] == sorted(block_path(key(n)) for n in range(3))[:2]
    assert "3 problems: 3 empty" in kvtier("check", root, code=1)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_share_of_a_walk_that_is_done_only_grows_and_ends_at_one(root: Path, threads: int) -> None:
    (root / "quarantine").mkdir(exist_ok=True)
    shares: list[float] = []
    assert len(list(scan(root, threads=threads, on_share=shares.append))) == 3
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    assert shares[-1] == pytest.approx(1)


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
    (tmp_path / "foreign").write_text("file")
    return tmp_path


def test_every_generation_of_a_volume_is_found_and_no_directory_of_vllms_tier(volume: Path) -> None:
    found = [str(path.relative_to(volume)) for path in find_generations(volume)]
    assert found == ["kv/ns.llama/aaa", "kv/ns.llama/bbb", "ns.qwen/ccc"]
    assert find_generations(volume / "ns.qwen/ccc") == [volume / "ns.qwen/ccc"]
    assert find_generations(volume / "nothing") == []
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


def test_inspect_shows_generations_sizes_ages_and_leftovers(volume: Path, kvtier: Command) -> None:
    root = volume / "kv/ns.llama/aaa"
    (root / partial_path(block_path(key(0)), TOKEN)).write_bytes(b"half")
    (root / "quarantine").mkdir()
    (root / f"quarantine/00_g0.kvb.checksum.{TOKEN}").write_bytes(b"12345")
    two_days_ago = time.time_ns() - 2 * 86_400 * 10**9
    os.utime(root / block_path(key(0)), ns=(two_days_ago, two_days_ago))
    document = kvtier.json("inspect", volume)
    assert document["volume"]["bytes"] > document["volume"]["free"] > 0
    first, second, third = document["generations"]
    assert [each["path"] for each in (first, second, third)] == ["kv/ns.llama/aaa", "kv/ns.llama/bbb", "ns.qwen/ccc"]
    assert first["identity"] == {"model": "kv/ns.llama/aaa"}
    assert first["blocks"] == {"files": 3, "bytes": 3 * BLOCK_BYTES}
    ages = {name: heap["files"] for name, heap in first["ages"].items()}
    assert ages == {"1 h": 2, "1 d": 0, "7 d": 1, "30 d": 0, "older": 0}
    assert first["newestSeconds"] < 3600
    assert first["oldestSeconds"] > 86_400
    assert first["leftovers"]["partial"] == {"files": 1, "bytes": 4}
    assert first["leftovers"]["quarantined"] == {"files": 1, "bytes": 5}
    assert third["blocks"]["files"] == 1


def test_inspect_says_what_it_could_not_look_at(volume: Path, kvtier: Command) -> None:
    (volume / "ns.qwen/ccc/tier.json").write_text("{")
    assert "not JSON" in kvtier("inspect", volume, code=1)


def test_inspect_shows_the_largest_tenants(tmp_path: Path, kvtier: Command) -> None:
    store = BlockStore(tmp_path)
    claim(tmp_path, {}, "d1gest")
    for number, tenant in enumerate(["acme", "acme", "other", ""]):
        store.put(key(number)._replace(tenant=tenant), payload(number))
    lines = kvtier("inspect", tmp_path).splitlines()
    assert lines[0] == "4 blocks, 272 KiB, in 1 generation"
    assert lines[1].startswith("volume: ")
    assert {"  blocks       4 blocks, 272 KiB", "    up to 1 h  4 blocks, 272 KiB"} <= set(lines)
    place = next(number for number, line in enumerate(lines) if line.split() == ["tenants", "2"])
    assert [line.split()[:2] for line in lines[place + 1 : place + 3]] == [["acme", "2"], ["other", "1"]]
    (generation,) = kvtier.json("inspect", tmp_path)["generations"]
    assert {name: heap["files"] for name, heap in generation["tenants"].items()} == {"acme": 2, "other": 1}
