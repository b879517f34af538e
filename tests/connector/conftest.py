# SPDX-License-Identifier: Apache-2.0
"""What the tests of all folders have: a path to the helpers of each, and volumes, pools and janitors.

A test never calls into a mount that hangs from its own thread: it uses a thread or a process, and takes the fault back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import check
from waiting import Clock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / name) for name in ("tier", "faults", "io_workers", "janitor", "netfs", "store")]

from faulty_mounts import FaultyVolume, mounted, why_no_fuse  # noqa: E402 - found through the line above
from pools import Pools  # noqa: E402 - as above
from store_contract import K1, K2  # noqa: E402 - as above
from tier_dir import Engine, Rig  # noqa: E402 - as above

from kvtier_connector.store.identity import claim  # noqa: E402 - as above

MIB = 1 << 20


@pytest.fixture
def unchecked_root(tmp_path: Path) -> Path:
    """A directory of one generation."""
    root = tmp_path / "d1gest"
    claim(root, {"model": "test"}, "d1gest")
    return root


@pytest.fixture
def root(unchecked_root: Path) -> Iterator[Path]:
    """A directory of one generation, in which nothing is wrong when the test ends."""
    yield unchecked_root
    assert check(unchecked_root, partial_age_seconds=0) == []


@pytest.fixture
def keys_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "k1").write_bytes(K1)
    (directory / "k2").write_bytes(K2)
    return directory


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture(params=["memory", "disk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            yield Path(made)


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    made.close()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def engine(rig: Rig) -> Engine:
    return rig.engine()


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
