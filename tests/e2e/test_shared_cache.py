# SPDX-License-Identifier: Apache-2.0
"""The whole path with real components: API server, operator, pod runner, two vLLM CPU engines, one volume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_demo(data: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier_demo", "--data", str(data), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.engine
@pytest.mark.timeout(3200)
def test_a_second_replica_and_a_later_run_read_what_the_first_replica_computed(tmp_path: Path) -> None:
    first = run_demo(tmp_path)
    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-2000:]
    table = (tmp_path / "table.txt").read_text()
    assert "computed" in table
    assert "after restart" not in table

    # One engine shows it, and takes half the time to start.
    second = run_demo(tmp_path, "--replicas=1")
    assert second.returncode == 0, second.stdout[-4000:] + second.stderr[-2000:]
    assert "disk hit after restart" in (tmp_path / "table.txt").read_text()
