# SPDX-License-Identifier: Apache-2.0
"""What is measured of an engine: a prompt that its tier holds whole; and what a case must show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from e2e.backends import __main__ as backends
from e2e.matrix.asking import Request
from e2e.matrix.engine import ForkedEngine, Round, ScoredAnswer

PROMPT = Request(tokens=tuple(range(2048)))


class TierHolding:
    """An engine whose tier holds so many tokens of the prompt at each request."""

    def __init__(self, *held: int) -> None:
        self.held = list(held)
        self.asked = 0

    def forget(self) -> None:
        """Keep what the tier holds."""

    def ask(self, _requests: Sequence[Request], *, answer_tokens: int) -> Round:
        assert answer_tokens == 1
        self.asked += 1
        answer = ScoredAnswer(tokens=[self.asked], logprobs=[], cached_tokens=0, prompt_tokens=len(PROMPT.tokens))
        return Round(answers=[answer], counts={"vllm:external_prefix_cache_hits": self.held.pop(0)})


@pytest.mark.parametrize("whole", [2047, 1800])
def test_a_prompt_that_the_tier_does_not_hold_yet_is_asked_again(whole: int) -> None:
    _, found = backends.hit(cast(ForkedEngine, TierHolding(0, 1024, whole)), PROMPT)
    assert found.answers[0].tokens == [3]


def test_a_tier_that_never_holds_it_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "TRIES", 2)
    engine = TierHolding(0, 0, 0)
    backends.hit(cast(ForkedEngine, engine), PROMPT)
    assert engine.asked == 2


GOOD = {"same_tokens": True, "hit_tokens": 9, "replica_hit_tokens": 9}


@pytest.mark.parametrize(
    ("title", "result", "problems"),
    [
        ("Bundled", GOOD, []),
        ("Bundled", {**GOOD, "same_tokens": False}, ["tokens differ"]),
        ("Bundled", {**GOOD, "hit_tokens": 0}, ["no hit"]),
        ("Bundled", {**GOOD, "replica_hit_tokens": 0}, ["another engine found nothing"]),
        ("SimpleCPU", {**GOOD, "replica_hit_tokens": 0}, []),
        ("Hybrid, NIXL", {**GOOD, "handed_over_bytes": 0}, ["nothing was handed over"]),
        ("Bundled", {"problem": "no answer within 300 s"}, ["no answer within 300 s"]),
    ],
)
def test_a_case_must_hit_with_equal_tokens_and_share(title: str, result: dict[str, Any], problems: list[str]) -> None:
    assert backends.problems(backends.CASES[title], result) == problems
