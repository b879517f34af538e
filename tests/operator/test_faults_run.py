# SPDX-License-Identifier: Apache-2.0
"""The faults of `make bench-operator`, short: whatever fails meanwhile, everything ends as the specs ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.bench.operators import faults


@pytest.mark.timeout(300)
def test_after_faults_and_killed_operators_everything_is_as_asked(tmp_path: Path) -> None:
    result = faults(tmp_path, tiers=6, seconds=12, kill_seconds=5)
    assert result["wrong"] == []
    assert result["killed"] > 0
    assert result["injected"].keys() & {"409", "429", "500", "503"}
