# SPDX-License-Identifier: Apache-2.0
"""A kernel that runs as processes of this machine: what its command says is passed on, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from kvtier_netfs import guest

pytestmark = pytest.mark.netfs
PACKAGES = str(Path(guest.__file__).parents[1])


@pytest.fixture
def started(tmp_path: Path) -> subprocess.Popen[bytes]:
    if reason := guest.why_not():
        pytest.skip(reason)
    words = ["--memory-mib", "512", "--", "sh", "-c", f"touch {tmp_path}/booted; exec sleep 600"]
    return subprocess.Popen(
        [sys.executable, "-m", "kvtier_netfs.guest", *words],
        env={**os.environ, "PYTHONPATH": PACKAGES, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def processes(tmp_path: Path) -> list[str]:
    """Return those that were started for this test, but for the program that started them."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"init={tmp_path}" in words:
            found.append(directory.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_guest_whose_program_is_ended_leaves_no_process(
    started: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals
) -> None:
    until((tmp_path / "booted").exists, "the guest runs its command")
    assert len(processes(tmp_path)) > 1
    started.send_signal(number)
    started.wait(60.0)
    until(lambda: not processes(tmp_path), lambda: f"{processes(tmp_path)} go")


def test_a_guest_returns_the_exit_status_of_its_command(tmp_path: Path) -> None:
    if reason := guest.why_not():
        pytest.skip(reason)
    assert guest.run_in_guest(["sh", "-c", "exit 3"], memory_mib=512, base=tmp_path) == 3
