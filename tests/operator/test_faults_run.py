# SPDX-License-Identifier: Apache-2.0
"""`make bench-operator`, short: whatever fails, everything ends as asked for; and who takes over changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.bench.operator_faults import faults, forbidden
from e2e.bench.operators import scale


@pytest.mark.timeout(600)
def test_after_faults_and_killed_operators_everything_is_as_asked(tmp_path: Path) -> None:
    kinds = ("poddisruptionbudgets", "services")
    result = faults(tmp_path, tiers=6, seconds=18, kill_seconds=7, kinds=kinds, lease_seconds=8)
    assert result["wrong"] == []
    assert result["by_forbidden_kind"]["services"]["tiers_that_name_it"] > 0
    assert result["rival_waits"]
    assert result["killed"] > 0
    assert result["injected"].keys() & {"409", "429", "500", "503"}


@pytest.mark.timeout(300)
def test_a_kind_that_is_forbidden_keeps_nothing_else_from_a_tier_and_is_named(tmp_path: Path) -> None:
    result = forbidden(tmp_path, kinds=("poddisruptionbudgets", "roles"), seconds=90)
    assert result["wrong"] == []


@pytest.mark.timeout(300)
def test_an_operator_that_takes_over_and_one_that_looks_again_have_nothing_to_write(tmp_path: Path) -> None:
    result = scale(tmp_path, tiers=3, idle_seconds=1, resync_seconds=5)
    assert result["restart_requests"] > 0
    assert result["restart_status_writes"] == 0
    assert result["resync_writes"] == 0
