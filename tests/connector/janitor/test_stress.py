# SPDX-License-Identifier: Apache-2.0
"""Writers, readers and the janitor on one directory, killed at random: a short ``e2e/bench/stress.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from e2e.bench.stress import FULL_SHARE, stress


@pytest.mark.timeout(240)
def test_under_random_kills_no_byte_is_wrong_and_the_budget_holds() -> None:
    run = stress("local", seconds=9, seed=7)
    assert run.problems == []
    assert run.engine_kills > 0
    assert run.janitor_kills > 0
    assert run.loads > 0
    assert run.most_bytes >= FULL_SHARE * run.max_bytes
