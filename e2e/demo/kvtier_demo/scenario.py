# SPDX-License-Identifier: Apache-2.0
"""The prompts that the demo asks, in order, and what each must show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_demo.client import Answer, Engine
from kvtier_demo.model import make_prompt
from kvtier_demo.progress import Progress
from kvtier_demo.report import Row

MODEL = "/models/tiny"
PROMPT_WORDS = 3000
SHARED_SEED = 1
WARM_UP_WORDS = 3000


@dataclass(frozen=True)
class Scenario:
    """Two replicas, and the directory where their blocks land on this machine."""

    first: Engine
    second: Engine
    blocks: Callable[[], Sequence[Path]]
    was_proved: bool
    """An earlier run left the shared prompt's blocks on this volume: the first prompt must be a disk hit already."""
    progress: Progress

    def run(self) -> list[Row]:
        """Ask everything and return the rows of the table."""
        prompt = make_prompt(PROMPT_WORDS, seed=SHARED_SEED)
        fresh = make_prompt(PROMPT_WORDS, seed=time.time_ns())
        is_volume_warm = self.was_proved and bool(self.blocks())
        for engine in (self.first, self.second):
            # the first request of a process pays for start-up work that is no part of any comparison
            self.progress.say(f"warming up {engine.name}")
            engine.ask(MODEL, make_prompt(WARM_UP_WORDS, seed=time.time_ns()))

        rows: list[Row] = []
        cold = self._ask(rows, "cold", self.first, prompt if not is_volume_warm else fresh)
        reference = self._ask(rows, "disk hit after restart", self.first, prompt) if is_volume_warm else cold
        self._ask(rows, "GPU hit (engine's own)", self.first, prompt, reference)
        self.first.forget_first_tier()
        self._ask(rows, "CPU hit", self.first, prompt, reference)
        self._wait_for_writes()
        self._ask(rows, "disk hit", self.second, prompt, reference)
        return rows

    def _ask(self, rows: list[Row], what: str, engine: Engine, prompt: str, reference: Answer | None = None) -> Answer:
        self.progress.say(f"asking {engine.name}: {what}")
        answer = engine.ask(MODEL, prompt)
        rows.append(Row(what=what, engine=engine.name, answer=answer, reference=reference))
        return answer

    def _wait_for_writes(self) -> None:
        """Wait until the first replica's blocks are on the volume: stores are asynchronous by design."""
        seen: list[int] = []

        def is_settled() -> bool:
            seen.append(len(self.blocks()))
            return seen[-1] > 0 and seen[-4:] == [seen[-1]] * 4

        self.progress.wait("the blocks to reach the volume", is_settled, seconds=60)


def problems(rows: Sequence[Row]) -> list[str]:
    """Return what the rows fail to prove; an empty list is success."""
    found = []
    for row in rows:
        if not row.is_identical:
            found.append(f"{row.what} on {row.engine}: other tokens than the first answer to the same prompt")
        if row.what.startswith("disk") and row.answer.disk_bytes <= 0:
            found.append(f"{row.what} on {row.engine}: nothing was read from the shared volume")
        if not row.what.startswith("cold") and row.answer.cached_tokens <= row.answer.prompt_tokens // 2:
            found.append(f"{row.what} on {row.engine}: only {row.answer.cached_tokens} tokens came from a cache")
        if row.what.startswith("cold") and row.answer.cached_tokens:
            found.append(f"{row.what} on {row.engine}: {row.answer.cached_tokens} tokens were cached already")
    return found
