# SPDX-License-Identifier: Apache-2.0
"""The page of conditions is complete and as it would be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_operator.api import conditions_reference
from kvtier_operator.api.reasons import CONDITIONS
from kvtier_operator.status import Reason


def test_every_condition_and_every_reason_has_its_place() -> None:
    assert conditions_reference.REASONS.keys() == CONDITIONS.keys()
    placed = {reason for group in conditions_reference.REASONS.values() for reason in group}
    assert placed | {Reason.NOT_CHECKED, Reason.NOT_APPLICABLE} == set(Reason)
    assert set(conditions_reference.REMEDIES) <= placed


def test_the_page_is_fresh_and_a_stale_one_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert conditions_reference.main(["--check"]) == 0
    monkeypatch.setattr(conditions_reference, "REFERENCE", tmp_path / "conditions.md")
    assert conditions_reference.main(["--check"]) == 1
    assert conditions_reference.main(["--write"]) == 0
    assert conditions_reference.main(["--check"]) == 0
