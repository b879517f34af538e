# SPDX-License-Identifier: Apache-2.0
"""What a command is given to work on: two mounts of the same files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import QUICKEST

import kvtier_netfs

PACKAGES = str(Path(kvtier_netfs.__file__).parents[1])
SKIPPED = 77


def test_a_command_finds_the_same_files_at_two_mounts() -> None:
    script = 'touch "$1/file"; for mount; do mountpoint "$mount" && ls "$mount"; done'
    command = [sys.executable, "-m", "kvtier_netfs", QUICKEST, "--", "sh", "-c", script, "sh", "{a}", "{b}"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": PACKAGES}, capture_output=True, text=True, check=False
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["file"] * 2
    assert len(set(lines[::2])) == 2
    assert all(line.endswith(" is a mountpoint") for line in lines[::2])
