# SPDX-License-Identifier: Apache-2.0
"""Volumes that really fail: a FUSE mount that hangs or fails on demand, and an ext4 of its own on a loop device.

A test never calls into a mount that hangs from its own thread: it uses a thread or a process, and takes the fault back.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / each) for each in ("store", "tier"))]

from faulty_mounts import WAIT_SECONDS, FaultyVolume, wait_for  # noqa: E402 - found through the lines above

PASS_THROUGH = Path(__file__).parent / "passthrough.py"
MIB = 1 << 20


def why_no_fuse() -> str:
    if os.geteuid() != 0:
        return "only root can mount here"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse"
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        return "there is no fusermount: install fuse3"
    if ctypes.util.find_library("fuse") is None:
        return "there is no libfuse.so.2: install libfuse2"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    return ""


@pytest.fixture
def faulty_volume(tmp_path: Path) -> Iterator[FaultyVolume]:
    if reason := why_no_fuse():
        pytest.skip(reason)
    source, mountpoint, control = (tmp_path / name for name in ("source", "volume", "control"))
    for directory in (source, mountpoint, control):
        directory.mkdir()
    with (tmp_path / "fuse.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(PASS_THROUGH), str(source), str(mountpoint), str(control)], stdout=log, stderr=log
        )
        volume = FaultyVolume(mountpoint, control)
        try:
            wait_for(lambda: os.path.ismount(mountpoint) or process.poll() is not None, "the mount")
            if process.poll() is not None:
                log.seek(0)
                pytest.skip(f"FUSE does not work here: {log.read()[-500:]}")
            yield volume
        finally:
            volume.clear()
            subprocess.run(["umount", "--lazy", str(mountpoint)], check=False, capture_output=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_SECONDS)
            process.kill()
            process.wait()


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """Return the root of a file system of 64 MiB that nobody else uses."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount here")
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4: install e2fsprogs")
    image, mountpoint = tmp_path / "image", tmp_path / "ext4"
    mountpoint.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mountpoint)], check=False, capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let us mount a loop device: {mounted.stderr.strip()}")
    try:
        (mountpoint / "lost+found").rmdir()
        yield mountpoint
    finally:
        subprocess.run(["umount", str(mountpoint)], check=True)
