# SPDX-License-Identifier: Apache-2.0
"""What is measured of an engine: a prompt that its tier holds whole, and nothing that an earlier run has left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from e2e.backends import __main__ as alone
from e2e.backends.pod import Pod

IDS = list(range(2048))


class Engine:
    """Answers as vLLM does; of a prompt, its tier holds so many tokens at each request."""

    def __init__(self, *held: int) -> None:
        self.held = list(held)
        self.hits = 0
        self.asked = 0

    def ask(self, _method: str, path: str, document: Any) -> bytes:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "it"}]}).encode()
        if path == "/metrics":
            return f'vllm:{alone.HITS}{{engine="0"}} {self.hits}.0\n'.encode()
        if path == "/v1/completions" and len(document["prompt"]) == len(IDS):
            self.asked += 1
            self.hits += self.held.pop(0)
        return json.dumps({"choices": [{"token_ids": [self.asked]}]}).encode()


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone.time, "sleep", lambda _: None)


@pytest.mark.parametrize("whole", [2047, 1800])
def test_a_prompt_that_the_tier_does_not_hold_yet_is_asked_again(whole: int) -> None:
    engine = Engine(0, 1024, whole)
    _, token = alone.hit(cast(Pod, engine), IDS)
    assert token == [3]


def test_a_tier_that_never_holds_it_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "TRIES", 2)
    engine = Engine(0, 0, 0)
    alone.hit(cast(Pod, engine), IDS)
    assert engine.asked == 2


def test_what_an_earlier_run_has_left_of_a_case_is_removed(tmp_path: Path) -> None:
    for left in ("case-1-volume/blocks", "case-1-a/scratch", "case-11-volume", "model"):
        (tmp_path / left).mkdir(parents=True)
    (tmp_path / "case-1-a.log").touch()
    alone.clear(tmp_path, [{"tier": {"metadata": {"name": "case-1"}}}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["case-11-volume", "model"]
