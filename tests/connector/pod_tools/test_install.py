# SPDX-License-Identifier: Apache-2.0
"""The package arrives whole where an engine looks for it, and a volume is tried before engines depend on it."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_contract import key, pages, payload
from store_faults import FailingFs
from waiting import Clock

from kvtier_connector import __version__
from kvtier_connector.pod_tools import install as install_module
from kvtier_connector.pod_tools import preflight
from kvtier_connector.pod_tools.install import CACHES, install, link_caches
from kvtier_connector.store.blockstore import BlockStore, Hit
from kvtier_connector.store.fs import LOCAL, O_DIRECT, PROFILE_FILE, FileSystem, read_profile
from kvtier_connector.store.identity import claim

PACKAGE = Path(install_module.__file__ or "").parents[1]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source" / "kvtier_connector"
    (source / "store").mkdir(parents=True)
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "x.pyc").write_bytes(b"")
    (source / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (source / "store" / "__init__.py").write_text("")
    (source / "py.typed").write_text("")
    return source


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_the_package_is_copied_without_what_python_adds_once_or_when_damaged(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "opt" / "kvtier"
    said = f"kvtier_connector {__version__}: 3 files installed in {target}/kvtier_connector"
    umask = os.umask(0o077)
    try:
        assert install(target, source=source) == said
    finally:
        os.umask(umask)
    package = target / "kvtier_connector"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [package, *package.rglob("*")]}
    assert modes == {0o755, 0o644}, "every user can read it"
    assert files(target) == {
        "kvtier_connector/__init__.py",
        "kvtier_connector/store/__init__.py",
        "kvtier_connector/py.typed",
    }
    before = package.stat().st_ino
    assert install(target, source=source).endswith("already")
    assert package.stat().st_ino == before
    (package / "py.typed").unlink()
    install(target, source=source)
    assert files(package) == files(source) - {"__pycache__/x.pyc"}


def test_another_version_is_replaced_and_leaves_no_file_behind(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    install(target, source=source)
    (source / "py.typed").unlink()
    (source / "__init__.py").write_text('__version__ = "1.3.0"\n')
    assert "2 files installed" in install(target, source=source)
    assert files(target) == {"kvtier_connector/__init__.py", "kvtier_connector/store/__init__.py"}
    assert [path.name for path in target.iterdir()] == ["kvtier_connector"]


def test_a_failed_copy_leaves_the_old_version(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    install(target, source=source)
    (source / "__init__.py").write_text('__version__ = "1.3.0"\n')

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="No space"):
        install(target, source=source)
    assert "1.2.3" in (target / "kvtier_connector" / "__init__.py").read_text()
    assert [path.name for path in target.iterdir()] == ["kvtier_connector"]


def test_what_a_killed_installer_left_is_removed_when_it_is_old(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    old, young = target / ".kvtier_connector.aa.partial", target / ".kvtier_connector.bb.partial"
    for path in (old, young):
        path.mkdir(parents=True)
        (path / "file").write_text("")
    os.utime(old, (0, 0))
    install(target, source=source)
    assert {path.name for path in target.iterdir()} == {"kvtier_connector", young.name}


def test_the_command_installs_this_package_and_clears_stale_regions(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    region = shm / "vllm_offload_dead.mmap"
    region.write_bytes(b"")
    target = tmp_path / "target"
    options = ("--target", str(target), "--clear-shm", str(shm))
    command = [sys.executable, "-m", "kvtier_connector.pod_tools.install", *options]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    first = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert first.stdout.splitlines()[:2] == [f"{shm}: 1 stale regions removed", f"  {region}"]
    assert "files installed in" in first.stdout
    assert not region.exists()
    # The installed copy is a working package, and knows itself.
    environment["PYTHONPATH"] = str(target)
    second = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert second.stdout.splitlines()[0] == f"{shm}: 0 stale regions removed"
    assert second.stdout.rstrip().endswith("already")


def test_engines_of_one_image_and_model_share_what_they_compile(tmp_path: Path) -> None:
    shared, first, second = tmp_path / "claim" / "0f1e", tmp_path / "first", tmp_path / "second"
    for scratch in (first, second):
        scratch.mkdir()
        link_caches(shared, scratch)
        link_caches(shared, scratch)  # an init container may run twice
    (first / "vllm" / "graph.py").write_text("compiled")
    assert (second / "vllm" / "graph.py").read_text() == "compiled"
    assert sorted(each.name for each in shared.iterdir()) == sorted(CACHES)
    (tmp_path / "file").write_text("no directory")
    third = tmp_path / "third"
    third.mkdir()
    assert "compiles for itself" in link_caches(tmp_path / "file" / "0f1e", third)
    assert list(third.iterdir()) == []


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
    assert preflight.main(["--root", str(tmp_path / "t"), "--bytes", str(4 * MIB), "--result", str(result)]) == 0
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


class Gaps(FileSystem):
    def rename(self, source: str, target: str) -> None:
        self.unlink(target)
        for _ in range(2000):
            self.stat(source)
        super().rename(source, target)


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
        (Gaps(), "a rename is not atomic here"),
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
