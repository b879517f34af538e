# SPDX-License-Identifier: Apache-2.0
"""Answers that the demo accepts as proof, and its table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier_demo import report
from kvtier_demo.client import Answer
from kvtier_demo.report import Row
from kvtier_demo.scenario import problems

COMPUTED = Answer(
    seconds_to_first_token=3.0,
    prompt_tokens=3000,
    cached_tokens=0,
    sources={"device": 0, "host": 0, "disk": 0},
    disk_bytes=0.0,
    token_ids=(5, 6, 7),
)
LOADED = replace(
    COMPUTED,
    seconds_to_first_token=0.4,
    cached_tokens=2944,
    sources={"device": 0, "host": 0, "disk": 2944},
    disk_bytes=24.0 * 2**20,
)


def rows(*, more: Answer = LOADED, **changes: Any) -> list[Row]:
    answer = replace(LOADED, **changes)
    tokens = (COMPUTED.token_ids,) * 3
    return [
        Row(what="computed", source="", engine="A", answers=(COMPUTED,) * 3, references=()),
        Row(what="disk hit", source="disk", engine="B", answers=(more, answer, LOADED), references=tokens),
    ]


def test_a_disk_hit_with_the_same_tokens_is_proof() -> None:
    assert problems(rows()) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": (5, 6, 8)}, "other tokens"),
        ({"disk_bytes": 0.0}, "nothing was read from the shared volume"),
        ({"sources": {"device": 2944, "host": 0, "disk": 0}}, "only 0 tokens came from the disk"),
    ],
)
def test_anything_less_is_refused(changes: dict[str, Any], complaint: str) -> None:
    assert any(complaint in problem for problem in problems(rows(more=replace(LOADED, **changes), **changes)))


def test_one_prompt_that_is_computed_is_no_refutation_unless_its_tokens_are_others() -> None:
    assert problems(rows(**vars(COMPUTED))) == []
    assert len(problems(rows(**{**vars(COMPUTED), "token_ids": (5, 6, 8)}))) == 1


def test_a_cold_prompt_that_was_cached_is_refused() -> None:
    warm = [Row(what="computed", source="", engine="A", answers=(LOADED,), references=())]
    assert any("cached already" in problem for problem in problems(warm))


def test_a_table_without_the_second_replica_is_refused() -> None:
    assert problems(rows()[:1]) == ["the second replica was never asked"]


def test_the_table_shows_the_median_of_every_row_and_flags_other_tokens() -> None:
    found = rows(seconds_to_first_token=9.0, token_ids=(1, 2, 3))
    slow = replace(LOADED, seconds_to_first_token=0.6)
    lines = report.table([found[0], replace(found[1], answers=(found[1].answers[1], LOADED, slow))]).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("computed")
    assert "600 ms" in lines[2]
    assert lines[2].endswith("NO")
