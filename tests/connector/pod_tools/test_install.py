# SPDX-License-Identifier: Apache-2.0
"""The package arrives whole where an engine looks for it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_connector import __version__
from kvtier_connector.pod_tools import install as install_module
from kvtier_connector.pod_tools.install import CACHES, install, link_caches

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
    command = [
        sys.executable,
        "-m",
        "kvtier_connector.pod_tools.install",
        "--target",
        str(target),
        "--clear-shm",
        str(shm),
    ]
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
