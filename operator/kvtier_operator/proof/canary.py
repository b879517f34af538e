# SPDX-License-Identifier: Apache-2.0
"""Prove that two replicas share their cache: what one computed, the other loads from the volume.

The prompt is made of random tokens, so nobody has asked it before, and it says nothing about anybody. Whatever the
second replica has cached of it can only have come from the volume. Where engines do not tell how much of an answer was
cached (vLLM's --enable-prompt-tokens-details), their counters tell, if nobody else was served meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvtier_operator.proof.engine_client import Engine, EngineError, EngineLocked, Served
from kvtier_operator.proof.exposition import Reading
from kvtier_operator.proof.findings import Canary, CanaryOutcome

CHUNKS: Final = 4
FEWEST_TOKENS: Final = 256
MOST_TOKENS: Final = 8192
"""What a canary may cost: a fraction of a second of one engine."""

_LOWEST_TOKEN, _HIGHEST_TOKEN = 10, 250
"""Every tokenizer has these; the first few are often special."""

STORE_SECONDS: Final = 30.0
"""How long a store may take; it waits for those before it."""
NEWS_SECONDS: Final = 3.0
"""After how long another engine knows what was stored, three times over."""
COUNT_SECONDS: Final = 5.0
"""How long an engine's counters may lag behind its answer."""
POLL_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One engine and the name of its pod."""

    name: str
    engine: Engine


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one block file holds."""

    tokens: int | None = None
    """None where it is a number of the engine's own blocks."""
    blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How time passes; tests let it pass at once."""

    now: Callable[[], float]
    pause: Callable[[float], Awaitable[None]]


async def run(first: Replica, second: Replica, *, chunk: Chunk, offers: int, waiting: Waiting) -> Canary:
    """Send a new prompt to one replica, then to the other, and tell what the second one did with it.

    Args:
        first: asked first; stores the prompt.
        second: asked then.
        chunk: what one block file holds.
        offers: how many times a block must be offered before it is stored.
        waiting: how time passes.
    """
    try:
        prompt, model = await _prompt(first.engine, chunk)
        return await _run(first, second, model=model, prompt=prompt, offers=offers, waiting=waiting)
    except _NotAnsweredError as error:
        return _unanswered(first, second, error.pod, error.error)
    except EngineError as error:
        return _unanswered(first, second, first.name, error)


class _NotAnsweredError(EngineError):
    def __init__(self, pod: str, error: EngineError) -> None:
        super().__init__(str(error))
        self.pod = pod
        self.error = error


def _unanswered(first: Replica, second: Replica, pod: str, error: EngineError) -> Canary:
    outcome = CanaryOutcome.LOCKED if isinstance(error, EngineLocked) else CanaryOutcome.UNANSWERED
    return Canary(outcome=outcome, first=first.name, second=second.name, problem=f"pod {pod} {error}")


async def _prompt(engine: Engine, chunk: Chunk) -> tuple[list[int], Served]:
    served, reading = await engine.model(), await engine.metrics()
    wanted = max(FEWEST_TOKENS, CHUNKS * (chunk.tokens or reading.block_tokens * chunk.blocks))
    length = min(wanted + 1, MOST_TOKENS, (served.most_tokens or MOST_TOKENS) - 8)
    chooser = random.SystemRandom()
    return [chooser.randint(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(max(1, length))], served


async def _run(  # noqa: PLR0913  the arguments of `run` and what came of them
    first: Replica, second: Replica, *, model: Served, prompt: list[int], offers: int, waiting: Waiting
) -> Canary:
    before = await first.engine.metrics()
    for _ in range(offers):
        await first.engine.complete(model.name, prompt)

    def told(outcome: CanaryOutcome, cached: float = 0) -> Canary:
        return Canary(
            outcome=outcome,
            first=first.name,
            second=second.name,
            prompt_tokens=len(prompt),
            cached_tokens=round(cached),
        )

    has_stored = await _wait_for_store(first.engine, before, waiting)
    await waiting.pause(NEWS_SECONDS)
    try:
        begin = await second.engine.metrics()
        cached = await second.engine.complete(model.name, prompt)
        if cached:
            return told(CanaryOutcome.LOADED, cached)
        end = await _wait_for_count(second.engine, begin, waiting)
    except EngineError as error:
        raise _NotAnsweredError(second.name, error) from error
    found = end.verdicts - begin.verdicts
    is_alone = (
        end.finished_requests - begin.finished_requests == 1
        and not begin.unfinished_requests
        and not end.unfinished_requests
    )
    if cached is None and not is_alone:
        return told(CanaryOutcome.BUSY)
    if cached is None and end.disk_tokens > begin.disk_tokens:
        return told(CanaryOutcome.LOADED, end.disk_tokens - begin.disk_tokens)
    if found > 0:
        return told(CanaryOutcome.FOUND if is_alone else CanaryOutcome.BUSY)
    return told(CanaryOutcome.MISSED if has_stored else CanaryOutcome.NOT_STORED)


async def _wait_for_store(engine: Engine, before: Reading, waiting: Waiting) -> bool:
    """Wait until the engine has written something and nothing is left to write, and tell whether it has."""
    deadline = waiting.now() + STORE_SECONDS
    while True:
        now = await engine.metrics()
        has_written = now.written_blocks > before.written_blocks
        if has_written and not now.queued_jobs:
            return True
        if waiting.now() >= deadline:
            return has_written
        await waiting.pause(POLL_SECONDS)


async def _wait_for_count(engine: Engine, before: Reading, waiting: Waiting) -> Reading:
    """Wait until the engine has counted the answer that it gave."""
    deadline = waiting.now() + COUNT_SECONDS
    while True:
        now = await engine.metrics()
        has_counted = now.finished_requests > before.finished_requests and not now.unfinished_requests
        if has_counted or waiting.now() >= deadline:
            return now
        await waiting.pause(POLL_SECONDS)
