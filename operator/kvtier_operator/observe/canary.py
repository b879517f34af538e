# SPDX-License-Identifier: Apache-2.0
"""Canary prompts: they prove that one replica loads from the volume the blocks that another one computed.

The prompt is new, because its tokens are random. So the blocks that the second replica has of it can only have come
from the volume. A tier with adapters, or a model that takes pictures, gets a prompt with one of each, too: their blocks
are named in another way. Where answers do not say how much of them was cached (vLLM's --enable-prompt-tokens-details),
the counters of the engine do, if it served no other request meanwhile.
"""

from __future__ import annotations

import random
import secrets
import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from kvtier_operator.observe.engine_client import EngineError, EngineLocked, HttpEngine, Served
from kvtier_operator.observe.findings import CanaryOutcome, CanaryResult
from kvtier_operator.observe.pod_reports import EngineCounters

SIDE: Final = 224
"""Pixels; what most vision models take without making it larger."""
_SQUARE: Final = 28
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_BITS, _COLOURS = 8, 2
"""Of one channel, and red, green and blue."""


def new_picture() -> bytes:
    """Return a PNG of about a kilobyte."""
    rows = []
    for _ in range(SIDE // _SQUARE):
        line = b"".join(secrets.token_bytes(3) * _SQUARE for _ in range(SIDE // _SQUARE))
        rows += [b"\0" + line] * _SQUARE
    header = struct.pack(">IIBBBBB", SIDE, SIDE, _BITS, _COLOURS, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


CHUNKS: Final = 4
FEWEST_TOKENS: Final = 256
MOST_TOKENS: Final = 8192
"""Limit of the cost: a fraction of a second of one engine."""

_ROOM_FOR_PICTURES: Final = 2048
"""Tokens that a model must take for a picture and a prompt of some blocks."""

_LOWEST_TOKEN, _HIGHEST_TOKEN = 10, 250
"""Every tokenizer has these; the first few are often special."""

STORE_SECONDS: Final = 30.0
"""How long a store may take; it waits for those before it."""
VISIBLE_SECONDS: Final = 3.0
"""Three times the delay until another engine finds a stored block."""
COUNT_SECONDS: Final = 5.0
"""How long an engine's counters may lag behind its answer."""
POLL_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One engine and the name of its pod."""

    name: str
    engine: HttpEngine


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The part of a prompt that one block file holds."""

    tokens: int | None = None
    """None where it is a number of the engine's own blocks."""
    blocks: int = 1


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """Kinds of prompts that are proven beside text for the model itself."""

    adapters: tuple[str, ...] = ()
    """Names of adapters whose contents engines can tell; one of them is asked for."""
    has_pictures: bool = False


TEXT_ALONE: Final = Subjects()


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """How time passes; tests let it pass at once."""

    now: Callable[[], float]
    pause: Callable[[float], Awaitable[None]]


async def run(  # noqa: PLR0913  each by its name
    first: Replica, second: Replica, *, chunk: Chunk, min_reuse: int, waiting: Waiting, subjects: Subjects = TEXT_ALONE
) -> CanaryResult:
    """Send a new prompt to one replica, then to the other, and tell what the second one did with it.

    A block must be offered `min_reuse` times before it is stored. Prompts of other subjects follow once text is proven.
    """
    pair = _Pair(first=first, second=second, min_reuse=min_reuse, waiting=waiting)
    try:
        served, reading = await first.engine.model(), await first.engine.metrics()
    except EngineError as error:
        return _unanswered(pair, first.name, error)
    length = _length(served, reading, chunk)
    found = await _try(pair, _text(served.name, length), length)
    if not found.outcome.is_proof:
        return found
    for subject, ask in _asks(subjects, served, length, _chunk_tokens(reading, chunk)):
        other = await _try(pair, ask, length)
        if other.outcome.is_disproof:
            return replace(other, subject=subject)
        if other.outcome.is_proof:
            found = replace(found, covered=(*found.covered, subject))
        else:
            found = replace(found, open=(*found.open, subject))
    return found


Ask = Callable[[HttpEngine], Awaitable["int | None"]]
"""Sends one prompt and returns how many of its tokens were cached; None if the engine does not tell."""


@dataclass(frozen=True, kw_only=True)
class _Pair:
    first: Replica
    second: Replica
    min_reuse: int
    waiting: Waiting


def _chunk_tokens(reading: EngineCounters, chunk: Chunk) -> int:
    return int(chunk.tokens or reading.block_tokens * chunk.blocks)


def _length(served: Served, reading: EngineCounters, chunk: Chunk) -> int:
    wanted = max(FEWEST_TOKENS, CHUNKS * _chunk_tokens(reading, chunk))
    return max(1, min(wanted + 1, MOST_TOKENS, (served.most_tokens or MOST_TOKENS) - 8))


def _text(model: str, length: int) -> Ask:
    chooser = random.SystemRandom()
    prompt = [chooser.randint(_LOWEST_TOKEN, _HIGHEST_TOKEN) for _ in range(length)]
    return lambda engine: engine.complete(model, prompt)


def _picture(model: str, count: int) -> Ask:
    chooser = random.SystemRandom()
    # A number of two digits and the space before it are one to three tokens.
    words = " ".join(str(chooser.randint(10, 99)) for _ in range(count))
    picture = new_picture()
    return lambda engine: engine.see(model, words, picture)


def _asks(subjects: Subjects, served: Served, length: int, chunk_tokens: int) -> list[tuple[str, Ask]]:
    found = []
    if subjects.adapters:
        name = random.SystemRandom().choice(subjects.adapters)
        found.append((f"the adapter {name}", _text(name, length)))
    # Room for a picture, three tokens a word, and the template of the chat.
    most = served.most_tokens or MOST_TOKENS
    words = max(1, min(length, MOST_TOKENS // 4, most // 4))
    # A prompt shorter than one chunk is not stored.
    if subjects.has_pictures and most >= _ROOM_FOR_PICTURES and words >= chunk_tokens:
        found.append(("a picture", _picture(served.name, words)))
    return found


async def _try(pair: _Pair, ask: Ask, length: int) -> CanaryResult:
    try:
        return await _run(pair, ask, length)
    except EngineError as error:
        return _unanswered(pair, pair.first.name, error)


def _unanswered(pair: _Pair, pod: str, error: EngineError) -> CanaryResult:
    outcome = CanaryOutcome.LOCKED if isinstance(error, EngineLocked) else CanaryOutcome.UNANSWERED
    return CanaryResult(outcome=outcome, first=pair.first.name, second=pair.second.name, problem=f"pod {pod} {error}")


async def _run(pair: _Pair, ask: Ask, length: int) -> CanaryResult:
    first, second, waiting = pair.first, pair.second, pair.waiting
    before = await first.engine.metrics()
    for _ in range(pair.min_reuse):
        await ask(first.engine)

    def result(outcome: CanaryOutcome, cached: float = 0) -> CanaryResult:
        return CanaryResult(
            outcome=outcome, first=first.name, second=second.name, prompt_tokens=length, cached_tokens=round(cached)
        )

    has_stored = await _wait_for_store(first.engine, before, waiting)
    await waiting.pause(VISIBLE_SECONDS)
    try:
        begin = await second.engine.metrics()
        cached = await ask(second.engine)
        if cached:
            return result(CanaryOutcome.LOADED, cached)
        end = await _wait_for_count(second.engine, begin, waiting)
    except EngineError as error:
        return _unanswered(pair, second.name, error)
    found = end.verdicts - begin.verdicts
    is_alone = (
        end.finished_requests - begin.finished_requests == 1
        and not begin.unfinished_requests
        and not end.unfinished_requests
    )
    if cached is None and not is_alone:
        return result(CanaryOutcome.BUSY)
    if cached is None and end.disk_tokens > begin.disk_tokens:
        return result(CanaryOutcome.LOADED, end.disk_tokens - begin.disk_tokens)
    if found > 0:
        return result(CanaryOutcome.FOUND if is_alone else CanaryOutcome.BUSY)
    return result(CanaryOutcome.MISSED if has_stored else CanaryOutcome.NOT_STORED)


async def _wait_for_store(engine: HttpEngine, before: EngineCounters, waiting: Waiting) -> bool:
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


async def _wait_for_count(engine: HttpEngine, before: EngineCounters, waiting: Waiting) -> EngineCounters:
    """Wait until the engine has counted the answer that it gave."""
    deadline = waiting.now() + COUNT_SECONDS
    while True:
        now = await engine.metrics()
        has_counted = now.finished_requests > before.finished_requests and not now.unfinished_requests
        if has_counted or waiting.now() >= deadline:
            return now
        await waiting.pause(POLL_SECONDS)
