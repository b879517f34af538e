# SPDX-License-Identifier: Apache-2.0
"""Writers, readers and the janitor on one directory, killed at random: a short ``e2e/bench/janitor.py stress``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from e2e.bench.janitor import stress


@pytest.mark.timeout(240)
def test_under_random_kills_no_byte_is_wrong_and_the_budget_holds(tmp_path: Path) -> None:
    run = stress(tmp_path, seconds=9, writers=4, blocks=150, seed=36)
    assert run.problems == []
    assert run.kills > 0
    assert run.janitor_kills > 0
    # Each journal may lag behind by a batch. A run that never fills the budget would show nothing.
    assert 0.85 * run.max_bytes <= run.most_bytes <= run.allowed_bytes
