# SPDX-License-Identifier: Apache-2.0
"""A mount whose faults are switched on and off, and calls that may hang in it on threads of their own."""

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
from waiting import until

PASS_THROUGH = Path(__file__).parent / "passthrough.py"
END_SECONDS = 5.0


class FaultyVolume:
    """The mounted directory, and the switches of its faults."""

    def __init__(self, path: Path, control: Path) -> None:
        self.path = path
        self.control = control

    @contextlib.contextmanager
    def hanging(self, *calls: str) -> Iterator[None]:
        try:
            for call in calls:
                (self.control / f"hang.{call}").touch()
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        for path in self.control.iterdir():
            path.unlink()


def why_no_fuse() -> str:
    """Return why nothing can be mounted here; empty where it can."""
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


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[FaultyVolume]:
    """Mount a directory of this place over another one of it; skip the test where FUSE does not work after all."""
    source, mountpoint, control = (place / name for name in ("source", "volume", "control"))
    for directory in (source, mountpoint, control):
        directory.mkdir()
    with (place / "fuse.log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(PASS_THROUGH), str(source), str(mountpoint), str(control)], stdout=log, stderr=log
        )
        volume = FaultyVolume(mountpoint, control)
        try:
            until(lambda: os.path.ismount(mountpoint) or process.poll() is not None, "the mount")
            if process.poll() is not None:
                log.seek(0)
                pytest.skip(f"FUSE does not work here: {log.read()[-500:]}")
            yield volume
        finally:
            volume.clear()
            subprocess.run(["umount", "--lazy", str(mountpoint)], check=False, capture_output=True)
            # A mount namespace made meanwhile, of another test's pod, keeps the mount for as long as it lives.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
