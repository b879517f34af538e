# SPDX-License-Identifier: Apache-2.0
"""Volumes that really fail: a FUSE mount that hangs or fails on demand, and an ext4 of its own on a loop device.

A test never calls into a mount that hangs from its own thread: it uses a thread or a process, and takes the fault back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / each) for each in ("store", "tier"))]

from faulty_mounts import FaultyVolume, mounted, why_no_fuse  # noqa: E402 - found through the lines above

MIB = 1 << 20


@pytest.fixture
def faulty_volume(tmp_path: Path) -> Iterator[FaultyVolume]:
    if reason := why_no_fuse():
        pytest.skip(reason)
    with mounted(tmp_path) as volume:
        yield volume


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
