# SPDX-License-Identifier: Apache-2.0
"""The prompts that the demo asks, in order, and the checks of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_demo.client import Engine
from kvtier_demo.model import make_prompt
from kvtier_demo.progress import Progress
from kvtier_demo.report import Row

MODEL = "tiny"
PROMPT_WORDS = 3000
SHARED_SEEDS = (1, 2, 3)
"""Seeds of the prompts: each row shows the median of as many answers."""
_SETTLED_POLLS = 20
Tokens = tuple[tuple[int, ...], ...]
"""The tokens of an answer to each of some prompts."""


@dataclass(frozen=True)
class Scenario:
    """The replicas, and the directory where their blocks land on this machine."""

    first: Engine
    second: Engine | None
    blocks: Callable[[], Sequence[Path]]
    proved: Tokens
    """Answers of an earlier run on this volume, whose blocks must serve the prompts; empty for a new volume."""
    progress: Progress

    def run(self) -> list[Row]:
        """Ask everything and return the rows of the table."""
        for engine in filter(None, (self.first, self.second)):
            # The first request of a process pays for start-up work that is no part of any comparison.
            self.progress.say(f"warming up {engine.name}")
            engine.ask(MODEL, make_prompt(PROMPT_WORDS, seed=time.time_ns()))
        prompts = [make_prompt(PROMPT_WORDS, seed=seed) for seed in SHARED_SEEDS]
        rows = []
        if self.proved:
            rows.append(self._ask("disk hit after restart", "disk", self.first, prompts, self.proved))
            # An earlier run computed these prompts: computing is measured with new ones.
            fresh = [make_prompt(PROMPT_WORDS, seed=time.time_ns()) for _ in prompts]
            rows.insert(0, self._ask("computed", "", self.first, fresh, ()))
            tokens = self.proved
        else:
            rows.append(self._ask("computed", "", self.first, prompts, ()))
            tokens = rows[0].token_ids
        rows.append(self._ask("prefix cache (device)", "device", self.first, prompts, tokens))
        self.first.forget_first_tier()
        rows.append(self._ask("CPU tier (host)", "host", self.first, prompts, tokens))
        if self.second is not None:
            self._wait_for_writes()
            rows.append(self._ask("disk hit", "disk", self.second, prompts, tokens))
        return rows

    def _ask(self, what: str, source: str, engine: Engine, prompts: Sequence[str], references: Tokens) -> Row:
        self.progress.say(f"asking {engine.name} {len(prompts)} prompts: {what}")
        answers = tuple(engine.ask(MODEL, prompt) for prompt in prompts)
        return Row(what=what, source=source, engine=engine.name, answers=answers, references=references)

    def _wait_for_writes(self) -> None:
        """Wait until the first replica's blocks are on the volume: stores are asynchronous by design."""
        seen: list[int] = []

        def is_settled() -> bool:
            seen.append(len(self.blocks()))
            return seen[-1] > 0 and seen[-_SETTLED_POLLS:] == [seen[-1]] * _SETTLED_POLLS

        self.progress.wait("the blocks to reach the volume", is_settled, seconds=60)


def problems(rows: Sequence[Row]) -> list[str]:
    """Return what the rows fail to prove; an empty list is success."""
    found = []
    for row in rows:
        where = f"{row.what} on {row.engine}"
        if not row.is_identical:
            found.append(f"{where}: other tokens than the first answer to the same prompt")
        # An engine computes what comes late from the volume. On a busy machine that may be, but not for most prompts.
        asked = sorted(row.answers, key=lambda answer: answer.disk_bytes)
        for answer in asked[row.source == "disk" :]:
            cached = answer.sources[row.source] if row.source else 0
            if not row.source and answer.cached_tokens:
                found.append(f"{where}: {answer.cached_tokens} tokens were cached already")
            if row.source and cached <= answer.prompt_tokens // 2:
                found.append(f"{where}: only {cached} tokens came from the {row.source}, by vLLM's own count")
            if row.source == "disk" and answer.disk_bytes <= 0:
                found.append(f"{where}: nothing was read from the shared volume")
    if not any(row.source == "disk" for row in rows):
        found.append("the second replica was never asked")
    return found
