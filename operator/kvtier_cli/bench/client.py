# SPDX-License-Identifier: Apache-2.0
"""Sends prompts to an OpenAI endpoint and times what comes back, as a stream.

Written rather than driven: none of guidellm, aiperf and `vllm bench serve` plays conversations and Mooncake's traces,
compares answers between targets token by token, and counts hits by tier, all of it at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from kvtier_cli.bench.workloads import Request

LOWEST_TOKEN: Final = 100
"""Below are, for most vocabularies, tokens with a meaning of their own."""
_LONGEST_SECONDS: Final = 1800.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where prompts go."""

    url: str
    """Without ``/v1``."""
    model: str
    key: str = ""
    is_plain: bool = False
    """Whether it is not vLLM, and refuses what only that knows."""
    vocabulary: int = 2000
    """Prompts are made of tokens below this number."""
    seed: int = 0
    turns: Iterator[str] | None = None
    """Whose turn it is, of several engines without end; None where all requests go to `url`."""

    def next_url(self) -> str:
        """Return where the next request goes."""
        return self.url if self.turns is None else next(self.turns)

    @property
    def headers(self) -> dict[str, str]:
        """Return what each request has."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass(kw_only=True)
class Sample:
    """One answered request, or one that failed. Times in seconds."""

    number: int
    label: str
    prompt_tokens: int
    started: float = 0.0
    """Since the pass began."""
    first_token: float | None = None
    """From sending the prompt to the first token of the answer (TTFT)."""
    took: float = 0.0
    output_tokens: int = 0
    cached_tokens: int | None = None
    """As the endpoint counts them in ``usage``; None where it does not."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Seconds from one token to the next (TPOT); None for answers of a single one."""
        if self.first_token is None or self.output_tokens < 2:  # noqa: PLR2004  one token has no next
            return None
        return (self.took - self.first_token) / (self.output_tokens - 1)

    @property
    def answer(self) -> tuple[int, ...] | str:
        """Return what is compared: the tokens, or the text where no tokens came."""
        return tuple(self.tokens) or self.text


def prompt_of(request: Request, *, vocabulary: int, seed: int) -> list[int]:
    """Return the tokens of a prompt: equal parts give equal tokens, in every run with this seed."""
    tokens: list[int] = []
    for part, count in request["parts"]:
        numbers = random.Random(f"{seed}/{part}")  # noqa: S311  no secret hangs on it
        tokens += numbers.choices(range(LOWEST_TOKEN, vocabulary), k=count)
    return tokens


async def play(
    endpoint: Endpoint,
    requests: Sequence[Request],
    *,
    at_a_time: int,
    samples: list[Sample],
    tell: Callable[[], None] = lambda: None,
) -> float:
    """Send the requests, each when its time has come, what it follows is answered, and there is room; return seconds.

    Each answer is added to `samples` as it ends, so that who interrupts it has those that there are.
    """
    room = asyncio.Semaphore(at_a_time)
    answered = [asyncio.Event() for _ in requests]
    began = time.perf_counter()

    async def one(number: int, request: Request) -> None:
        if "after" in request:
            await answered[request["after"]].wait()
        await asyncio.sleep(max(0.0, request.get("start", 0.0) - (time.perf_counter() - began)))
        async with room:
            samples.append(await ask(session, endpoint, number, request, began=began))
        answered[number].set()
        tell()

    timeout = aiohttp.ClientTimeout(total=_LONGEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    session = aiohttp.ClientSession(headers=endpoint.headers, timeout=timeout, connector=connector)
    async with session, asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            group.create_task(one(number, request))
    return time.perf_counter() - began


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, number: int, request: Request, *, began: float
) -> Sample:
    """Send one prompt and return what came; what goes wrong is part of it."""
    prompt = prompt_of(request, vocabulary=endpoint.vocabulary, seed=endpoint.seed)
    sample = Sample(number=number, label=request["label"], prompt_tokens=len(prompt))
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": prompt,
        "max_tokens": request["output_tokens"],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({} if endpoint.is_plain else {"ignore_eos": True, "return_token_ids": True}),
    }
    # By which routers keep a conversation with one engine: its first part is its own.
    headers = {"X-Session-ID": str(request["parts"][0][0])}
    sent = time.perf_counter()
    sample.started = sent - began
    try:
        async with session.post(f"{endpoint.next_url()}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:  # noqa: PLR2004  HTTP's word for fine
                sample.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
            else:
                async for event in _events(answer.content):
                    _take(sample, event, time.perf_counter() - sent)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.took = sample.took or time.perf_counter() - sent
    if not sample.error and sample.first_token is None:
        sample.error = "no token came"
    return sample


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    async for line in content:
        text = line.strip()
        if text.startswith(b"data:") and not text.endswith(b"[DONE]"):
            yield json.loads(text[5:])


def _take(sample: Sample, event: Mapping[str, Any], seconds: float) -> None:
    if "error" in event:
        sample.error = str(event["error"])[:300]
    for choice in event.get("choices") or ():
        tokens = choice.get("token_ids") or []
        if tokens or choice.get("text"):
            sample.first_token = seconds if sample.first_token is None else sample.first_token
            sample.took = seconds
        sample.tokens += tokens
        sample.text += choice.get("text") or ""
    usage = event.get("usage") or {}
    if usage:
        sample.output_tokens = usage.get("completion_tokens", sample.output_tokens)
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
