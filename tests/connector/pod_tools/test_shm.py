# SPDX-License-Identifier: Apache-2.0
"""Shared-memory files of dead engines go; those that a living process uses stay."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier_connector.pod_tools import shm
from kvtier_connector.pod_tools.shm import clear_stale_regions

CONNECTOR = Path(shm.__file__ or "").parents[2]
SOMEBODY, SOMEBODY_ELSE = 12345, 12346

HOLDER = """
import mmap, os, sys
how, path = sys.argv[1:]
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
if how != "open":
    os.ftruncate(fd, 4096)
    mapping = mmap.mmap(os.dup(fd), 4096)
    if how == "mapped":
        os.close(fd)
        os.closerange(3, 64)  # mmap keeps a duplicate: the mapping alone must be enough
print("holding", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path, how: str, user: int | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable if user is None else anyones_python(), "-c", HOLDER, how, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=user,
    )
    try:
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.communicate()


def region(directory: Path, name: str = "dead") -> Path:
    path = directory / f"vllm_offload_{name}.mmap"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    return path


def test_a_region_that_nobody_holds_is_removed(directory: Path) -> None:
    paths = [region(directory, "one"), region(directory, "two")]
    assert clear_stale_regions(directory) == [str(path) for path in paths]
    assert list(directory.iterdir()) == []
    assert clear_stale_regions(str(directory)) == []


def test_other_files_stay(directory: Path) -> None:
    (directory / "nccl-abc").write_bytes(b"")
    (directory / "my_vllm_offload_x.mmap").write_bytes(b"")
    (directory / "vllm_offload_directory").mkdir()
    (directory / "vllm_offload_link").symlink_to("nccl-abc")
    assert clear_stale_regions(directory) == []
    assert len(list(directory.iterdir())) == 4


def test_a_region_of_an_engine_that_was_killed_is_removed(directory: Path) -> None:
    path = directory / "vllm_offload_killed.mmap"
    with holding(path, "open and mapped") as process:
        process.kill()
        process.wait()
        assert clear_stale_regions(directory) == [str(path)]


def test_a_new_file_under_the_name_of_one_that_is_held_is_removed(directory: Path) -> None:
    path = region(directory)
    with holding(path, "open"):
        path.unlink()
        (directory / "takes the next inode number").write_bytes(b"")
        region(directory)
        assert clear_stale_regions(directory) == [str(path)]


CLEARING = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from kvtier_connector.pod_tools.shm import clear_stale_regions; "
    "print(*clear_stale_regions(sys.argv[1]), sep='\\n')"
)


def clear_in_another_container(directory: Path) -> list[str]:
    """Clear in a container that shares the memory and none of the processes."""
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*container, sys.executable, "-c", CLEARING, str(directory), str(CONNECTOR)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("how", ["open", "mapped", "open and mapped"])
@pytest.mark.parametrize(
    "clear",
    [
        clear_stale_regions,
        pytest.param(
            clear_in_another_container,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a container here"),
        ),
    ],
)
def test_a_region_that_a_process_holds_stays_until_the_process_ends(
    directory: Path, how: str, clear: Callable[[Path], list[str]]
) -> None:
    dead, held = region(directory), directory / "vllm_offload_alive.mmap"
    with holding(held, how):
        assert clear(directory) == [str(dead)]
        assert held.exists()
    assert clear(directory) == [str(held)]


def test_who_opens_a_region_while_it_is_removed_ends_nobody() -> None:
    program = """
import os, sys, threading
sys.path.insert(0, sys.argv[2])
from kvtier_connector.pod_tools import shm
unlink = shm.Path.unlink
def unlink_while_somebody_opens(path):
    opener = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDWR)))
    opener.start()
    opener.join(0.2)
    assert opener.is_alive()
    unlink(path)
shm.Path.unlink = unlink_while_somebody_opens
print(*shm.clear_stale_regions(sys.argv[1]), sep="\\n")
"""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        path = region(Path(made))
        command = [sys.executable, "-c", program, made, str(CONNECTOR)]
        completed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert completed.stdout.split() == [str(path)]


def test_without_leases_every_region_stays_and_the_log_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    path = region(directory)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert clear_stale_regions(directory) == []
    assert path.exists()
    assert "cannot be opened, leased or removed" in caplog.text


@functools.cache
def anyones_python() -> str:
    """Return a Python that other users can run and that can read this package."""
    for python in (sys.executable, "/usr/bin/python3"):
        command = [
            python,
            "-c",
            "import sys; sys.path.insert(0, sys.argv[1]); import kvtier_connector.pod_tools.shm",
            str(CONNECTOR),
        ]
        try:
            subprocess.run(command, user=SOMEBODY, check=True, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    pytest.skip("other users have no Python here")


def clear_as(user: int, directory: Path, program: str = CLEARING) -> list[str]:
    completed = subprocess.run(
        [anyones_python(), "-c", program, str(directory), str(CONNECTOR)],
        user=user,
        check=True,
        capture_output=True,
        text=True,
    )
    return completed.stdout.split()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
class TestWithoutPrivileges:
    """A process that may not look into others' still removes its own regions, and spares what others may hold."""

    @pytest.fixture
    def everybodys(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            Path(made).chmod(0o777)
            yield Path(made)

    @pytest.mark.parametrize("mode", [0o600, 0o666])
    def test_its_own_region_goes_and_another_users_stays(self, everybodys: Path, mode: int) -> None:
        own, others = region(everybodys, "own"), region(everybodys, "others")
        os.chown(own, SOMEBODY, SOMEBODY)
        os.chown(others, SOMEBODY_ELSE, SOMEBODY_ELSE)
        others.chmod(mode)
        assert clear_as(SOMEBODY, everybodys) == [str(own)]
        assert others.exists()
