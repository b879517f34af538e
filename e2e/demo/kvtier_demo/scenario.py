# SPDX-License-Identifier: Apache-2.0
"""The prompts that the demo asks, in order, and what each must show."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier_demo.client import Answer, Engine
from kvtier_demo.model import make_prompt
from kvtier_demo.progress import Progress
from kvtier_demo.report import Row

MODEL = "tiny"
PROMPT_WORDS = 3000
SHARED_SEED = 1
_SETTLED_POLLS = 12


@dataclass(frozen=True)
class Scenario:
    """The replicas, and the directory where their blocks land on this machine."""

    first: Engine
    second: Engine | None
    blocks: Callable[[], Sequence[Path]]
    proved: tuple[int, ...] | None
    """The answer of an earlier run on this volume, whose blocks must serve the first prompt; None for a new volume."""
    progress: Progress

    def run(self) -> list[Row]:
        """Ask everything and return the rows of the table."""
        for engine in filter(None, (self.first, self.second)):
            # the first request of a process pays for start-up work that is no part of any comparison
            self.progress.say(f"warming up {engine.name}")
            engine.ask(MODEL, make_prompt(PROMPT_WORDS, seed=time.time_ns()))

        prompt = make_prompt(PROMPT_WORDS, seed=SHARED_SEED)
        rows: list[Row] = []
        reference = self._ask(rows, "disk hit after restart" if self.proved else "cold", self.first, prompt)
        if self.proved:
            rows = [replace(rows[0], reference=replace(reference, token_ids=self.proved))]
        if reference.cached_tokens:
            # an earlier run computed this prompt: measure cold with one that nobody has asked
            rows = [replace(rows[0], what="disk hit after restart")]
            self._ask(rows, "cold", self.first, make_prompt(PROMPT_WORDS, seed=time.time_ns()))
            rows.reverse()
        self._ask(rows, "GPU hit (engine's own)", self.first, prompt, reference)
        self.first.forget_first_tier()
        self._ask(rows, "CPU hit", self.first, prompt, reference)
        if self.second is not None:
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
            return seen[-1] > 0 and seen[-_SETTLED_POLLS:] == [seen[-1]] * _SETTLED_POLLS

        self.progress.wait("the blocks to reach the volume", is_settled, seconds=60)


_EXPECTED = {"GPU": "device", "CPU": "host", "disk": "disk"}


def problems(rows: Sequence[Row]) -> list[str]:
    """Return what the rows fail to prove; an empty list is success."""
    found = []
    for row in rows:
        answer, where = row.answer, f"{row.what} on {row.engine}"
        if not row.is_identical:
            found.append(f"{where}: other tokens than the first answer to the same prompt")
        source = _EXPECTED.get(row.what.split()[0])
        if source is None and answer.cached_tokens:
            found.append(f"{where}: {answer.cached_tokens} tokens were cached already")
        if source is not None and answer.sources[source] <= answer.prompt_tokens // 2:
            found.append(f"{where}: only {answer.sources[source]} tokens came from the {source}, by vLLM's own count")
        if source == "disk" and answer.disk_bytes <= 0:
            found.append(f"{where}: nothing was read from the shared volume")
    if not any(row.what.startswith("disk hit") for row in rows):
        found.append("the second replica was never asked")
    return found
