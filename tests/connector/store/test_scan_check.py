# SPDX-License-Identifier: Apache-2.0
"""Walking, cleaning and checking a root."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from checks import check
from store_contract import BLOCK_BYTES, key, payload
from store_faults import FailingFs, WatchedFs

from kvtier_cli.app import main
from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store import fsck as check_module
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.fsck import FsckProblem, FsckReport, check_all
from kvtier_connector.store.header import Fault
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import block_path, partial_path
from kvtier_connector.store.scan import BlockEntry, Leftover, LeftoverKind, scan

TOKEN = "0123456789abcdef" * 2
CONNECTOR = Path(check_module.__file__ or "").parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "d1gest"
    claim(root, {}, "d1gest")
    store = BlockStore(root)
    for number in range(3):
        store.put(key(number), payload(number))
    return root


def litter(root: Path) -> dict[str, LeftoverKind]:
    """Leave one of everything that is no block."""
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


def test_a_scan_names_every_block_once(root: Path) -> None:
    entries = sorted(entry for entry in scan(root) if isinstance(entry, BlockEntry))
    assert [entry.key for entry in entries] == [key(number) for number in range(3)]
    assert [entry.path for entry in entries] == [block_path(key(number)) for number in range(3)]
    assert {entry.size for entry in entries} == {BLOCK_BYTES}
    assert entries[0].mtime_ns == (root / entries[0].path).stat().st_mtime_ns


def test_a_scan_says_what_every_other_file_is(root: Path) -> None:
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


def test_a_root_that_is_not_there_has_no_files(tmp_path: Path) -> None:
    assert list(scan(tmp_path / "nothing")) == []


def test_files_that_go_while_they_are_listed_are_left_out(root: Path) -> None:
    class Vanishing(WatchedFs):
        def before(self, call: str, path: str | None) -> None:
            if call == "stat" and path is not None and path.endswith(".kvb"):
                Path(path).unlink()

    assert list(scan(root, fs=Vanishing())) == []


def test_directories_that_go_while_they_are_listed_are_left_out(root: Path) -> None:
    class Vanishing(WatchedFs):
        def before(self, call: str, path: str | None) -> None:
            if call == "scandir" and path is not None and "/blocks/" in path:
                shutil.rmtree(path)

    assert list(scan(root, fs=Vanishing())) == []


@pytest.mark.parametrize("call", ["scandir", "stat"])
def test_a_volume_that_cannot_be_walked_is_unavailable(root: Path, call: str) -> None:
    error = OSError(errno.EIO, "broken")
    fs = FailingFs(error, when=lambda name, path: name == call and "blocks" in str(path))
    with pytest.raises(StoreUnavailable, match="broken") as caught:
        list(scan(root, fs=fs))
    assert caught.value.__cause__ is error
    assert [problem.kind for problem in check(root, fs=fs)] == ["unreadable"]


def test_a_sound_root_has_no_problems(root: Path) -> None:
    assert check_all(root) == FsckReport(blocks=3, bytes=3 * BLOCK_BYTES)


def test_a_check_changes_nothing(root: Path) -> None:
    litter(root)
    (root / block_path(key(0))).write_bytes(b"damaged")
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))
    assert check(root) != []
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*")) == before


def test_trailing_bytes_are_a_problem(root: Path) -> None:
    with (root / block_path(key(0))).open("ab") as file:
        file.write(b"more")
    assert [problem.kind for problem in check(root)] == [Fault.TRAILING.value]


def test_a_directory_that_is_no_tier_is_a_problem(tmp_path: Path) -> None:
    (problem,) = check(tmp_path)
    assert (problem.path, problem.kind) == ("tier.json", "identity")


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("step", range(1, 6))
def test_a_directory_that_was_replaced_on_the_server_is_listed_again(root: Path, step: int, threads: int) -> None:
    class StaleOnce(FileSystem):
        listed = 0

        def scandir(self, path: str) -> list[os.DirEntry[str]]:
            self.listed += 1
            if self.listed == step:
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().scandir(path)

    fs = StaleOnce()
    found = {entry.path for entry in scan(root, fs=fs, threads=threads)}
    assert fs.listed >= step
    assert found == {block_path(key(number)) for number in range(3)}


def test_a_directory_that_stays_stale_is_a_volume_that_cannot_be_walked(root: Path) -> None:
    fs = FailingFs(OSError(errno.ESTALE, "stale"), when=lambda name, path: name == "scandir" and "blocks" in str(path))
    with pytest.raises(StoreUnavailable, match="stale"):
        list(scan(root, fs=fs))


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_cannot_be_read_is_a_problem(root: Path, call: str) -> None:
    path = root / block_path(key(0))
    if call == "open":
        fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, at: name == "open" and at == str(path))
        assert [problem.kind for problem in check(root, fs=fs)] == ["io"]
    else:
        fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, at: name == "preadv")
        assert [problem.kind for problem in check(root, fs=fs)] == ["io"] * 3 + ["identity"]


def test_problems_come_in_the_order_of_their_paths(root: Path) -> None:
    litter(root)
    problems = check(root, partial_age_seconds=0)
    assert problems == sorted(problems)
    assert all(isinstance(problem, FsckProblem) and problem.message for problem in problems)


@pytest.mark.parametrize("other", ["0ther", "d1gest.w1"], ids=["another generation", "other weights"])
def test_a_file_that_was_copied_from_another_directory_of_blocks_is_named(
    root: Path, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there = root.parent / other
    claim(there, {}, other)
    BlockStore(there).put(key(5), payload(5))
    path = block_path(key(1))
    (there / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / path, there / path)
    status, text = run_check(capsys, str(root.parent))
    assert status == 1
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


def test_the_document_of_a_check_counts_all_problems_and_lists_the_first(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connector.janitor.commands.MOST_PROBLEMS", 2)
    for number in range(3):
        (root / block_path(key(number))).write_bytes(b"")
    status, text = run_check(capsys, str(root), "-o", "json")
    document = json.loads(text)
    assert (status, len(document["problems"]), document["problemsByKind"]) == (1, 2, {"empty": 3})
    assert "3 problems: 3 empty" in run_check(capsys, str(root))[1]


def run_check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["check", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, captured.out


def test_the_command_succeeds_on_a_sound_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(capsys, str(root)) == (0, "3 blocks, 204 KiB, 0 problems\n")


def test_the_command_lists_problems_and_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / block_path(key(0))).write_bytes(b"damaged")
    status, text = run_check(capsys, str(root))
    assert status == 1
    assert text.splitlines() == [
        f"{block_path(key(0))}: truncated: it ends too early; a reader moves it away, and the block is computed again",
        "3 blocks, 136 KiB, 1 problem: 1 truncated",
    ]


def test_the_command_speaks_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    partial = root / partial_path(block_path(key(0)), TOKEN)
    partial.write_bytes(b"half")
    assert json.loads(run_check(capsys, str(root), "-o", "json")[1])["problems"] == []
    os.utime(partial, (0, 0))
    status, text = run_check(capsys, str(root), "-o", "json")
    assert status == 1
    report = json.loads(text)
    assert (report["blocks"], report["bytes"]) == (3, 3 * BLOCK_BYTES)
    assert [(problem["path"], problem["kind"]) for problem in report["problems"]] == [
        (str(partial.relative_to(root)), "partial")
    ]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_share_of_a_walk_that_is_done_only_grows_and_ends_at_one(root: Path, threads: int) -> None:
    (root / "quarantine").mkdir(exist_ok=True)
    shares: list[float] = []
    assert len(list(scan(root, threads=threads, on_share=shares.append))) == 3
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    assert shares[-1] == pytest.approx(1)
