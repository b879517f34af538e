# SPDX-License-Identifier: Apache-2.0
"""A volume is tried before engines depend on it: what works is measured, what does not is said with the remedy."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clocks import Clock
from store_contract import key, pages, payload
from store_faults import FailingFs

from kvtier_connector.pod_tools import preflight
from kvtier_connector.store.blockstore import BlockStore, Hit
from kvtier_connector.store.fs import LOCAL, O_DIRECT, PROFILE_FILE, FileSystem, read_profile
from kvtier_connector.store.identity import claim

MIB = 1 << 20


def attempt(root: Path, fs: FileSystem | None = None) -> preflight.PreflightReport:
    return preflight.try_volume(root, most_bytes=16 * MIB, most_seconds=600, fs=fs or FileSystem())


def test_a_good_volume_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    report = attempt(tmp_path / "serving.llama")
    assert report.problem == ""
    assert min(report.free_bytes, report.read_bytes_per_second, report.write_bytes_per_second) > 0
    assert isinstance(report.direct_io, bool)
    assert [path.name for path in (tmp_path / "serving.llama").iterdir()] == [PROFILE_FILE]
    assert read_profile(LOCAL, str(tmp_path / "serving.llama")).direct_io in {True, False}
    assert report.file_system
    assert report.round_trip_microseconds >= 0
    assert "page cache" in report.chosen


def test_what_a_try_that_was_killed_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    old, young, other = (tmp_path / name for name in (".preflight-1", ".preflight-2", "4f1c"))
    for directory in (old, young, other):
        directory.mkdir()
        (directory / "0").write_bytes(b"123")
    # Some are killed while they try the time of a directory.
    for directory in (old, other):
        os.utime(directory, (0, 0))
    assert attempt(tmp_path).problem == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [".preflight-2", "4f1c", PROFILE_FILE]


def test_what_it_finds_goes_where_the_kubelet_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "termination-log"
    arguments = ["--root", str(tmp_path / "t"), "--bytes", str(4 * MIB), "--result", str(result)]
    assert preflight.main(arguments) == 0
    found = json.loads(result.read_text())
    assert found["problem"] == ""
    assert json.loads(capsys.readouterr().out) == found
    assert len(result.read_bytes()) < 4096


@pytest.mark.parametrize("module", ["preflight", "install", "ready"])
def test_what_runs_in_an_image_without_packages_needs_none(module: str) -> None:
    connector = str(Path(preflight.__file__).parents[2])
    run = [sys.executable, "-S", "-c", f"import kvtier_connector.pod_tools.{module}"]
    done = subprocess.run(run, env={"PYTHONPATH": connector}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("mkdir", errno.EACCES, "set fsGroup or runAsUser"),
        ("mkdir", errno.EROFS, "mounted read-only"),
        ("pwritev", errno.ENOSPC, "No space left"),
        ("fsync", errno.EIO, "Input/output error"),
    ],
)
def test_a_failing_volume_is_told_with_remedy_and_left_clean(tmp_path: Path, call: str, code: int, words: str) -> None:
    report = attempt(tmp_path, FailingFs(OSError(code, os.strerror(code)), lambda name, _: name == call))
    assert words in report.problem
    assert list(tmp_path.iterdir()) == []


def test_a_full_volume_is_not_written_to(tmp_path: Path) -> None:
    class Full(FileSystem):
        def statvfs(self, path: str) -> Any:
            return SimpleNamespace(f_bavail=10, f_frsize=MIB, f_blocks=1000)

    assert "only 10 MiB are free of 1000 MiB" in attempt(tmp_path, Full()).problem


def test_a_rename_that_leaves_a_gap_is_found(tmp_path: Path) -> None:
    class Gaps(FileSystem):
        def rename(self, source: str, target: str) -> None:
            self.unlink(target)
            for _ in range(2000):
                self.stat(source)
            super().rename(source, target)

    assert "not atomic" in attempt(tmp_path, Gaps()).problem


class Twice(FileSystem):
    def open(self, path: str, flags: int) -> int:
        return super().open(path, flags & ~os.O_EXCL)


class Late(FileSystem):
    def __init__(self) -> None:
        self._before: list[Any] = []

    def scandir(self, path: str) -> Any:
        self._before, found = super().scandir(path), self._before
        return found


class WrittenOnce(FileSystem):
    def open(self, path: str, flags: int) -> int:
        if flags & os.O_WRONLY and not flags & os.O_CREAT:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        return super().open(path, flags)


class Forgetful(FileSystem):
    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
        return super().pwritev(fd, buffers, offset) if offset != 1024 else buffers[0].nbytes


class NeverOver(FileSystem):
    def rename(self, source: str, target: str) -> None:
        if target.endswith("old"):
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        super().rename(source, target)


@pytest.mark.parametrize(
    ("fs", "words"),
    [
        (Twice(), "created twice (no O_EXCL)"),
        (Late(), "eventual listings"),
        (WrittenOnce(), "cannot be written to again"),
        (Forgetful(), "not there when it is opened"),
        (NeverOver(), "cannot be renamed over another"),
        (FailingFs(OSError(errno.ENOSYS, "none"), lambda call, _: call == "touch"), "time of a file cannot be set"),
    ],
)
def test_a_volume_without_what_the_store_needs_is_refused_by_name(tmp_path: Path, fs: FileSystem, words: str) -> None:
    report = attempt(tmp_path, fs)
    assert words in report.problem
    assert "use a file system of POSIX semantics" in report.problem
    assert report.read_bytes_per_second == 0


def test_a_volume_that_reads_faster_through_the_page_cache_is_read_that_way_by_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1000.0)
    monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=clock, time=time.time))

    class SlowPast(FileSystem):
        def __init__(self) -> None:
            self.direct: set[int] = set()

        def open(self, path: str, flags: int) -> int:
            fd = super().open(path, flags & ~O_DIRECT)
            self.direct.discard(fd)
            if flags & O_DIRECT:
                self.direct.add(fd)
            return fd

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            clock.seconds += 1.0 if fd in self.direct else 0.01
            return super().preadv(fd, buffers, offset)

    fs, tier_dir = SlowPast(), tmp_path / "serving.llama"
    report = attempt(tier_dir, fs)
    if not report.direct_io:
        pytest.skip("these files lie in memory")
    assert report.chosen.startswith("reads go through the page cache")
    root = tier_dir / "d1gest"
    claim(root, {}, "d1gest")
    store = BlockStore(root, fs=fs)
    store.put(key(1), payload(1))
    fs.direct.clear()
    assert isinstance(store.get(key(1), pages()), Hit)
    assert not fs.direct


@pytest.mark.parametrize("content", ["", "[]", "{", '{"direct_io": "no"}', "[" * 5000])
def test_choices_that_nobody_can_read_choose_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / PROFILE_FILE).write_text(content)
    assert read_profile(LOCAL, str(tmp_path)).direct_io is None


def test_no_more_is_written_than_was_allowed(tmp_path: Path) -> None:
    class Counting(FileSystem):
        written = 0

        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            done = super().pwritev(fd, buffers, offset)
            self.written += done
            return done

    fs = Counting()
    attempt(tmp_path, fs)
    assert 16 * MIB <= fs.written <= 17 * MIB
