# SPDX-License-Identifier: Apache-2.0
"""Engines that behave as a canary sees them: they store, find, count and fail, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvtier_operator.observe.engine_client import EngineError, EngineLocked, Served
from kvtier_operator.observe.pod_reports import EngineCounters


@dataclass
class SharedVolume:
    """What engines have stored, prompt by prompt."""

    prompts: set[tuple[int, ...]] = field(default_factory=set)


@dataclass
class ScriptedEngine:
    """One engine; its switches say what goes wrong."""

    volume: SharedVolume
    most_tokens: int = 4096
    stores: bool = True
    tells_cached: bool = True
    computes_hits: bool = False
    other_requests: int = 0
    """Finished beside each of ours."""
    failure: str = ""
    wants_another_key: bool = False
    counted: EngineCounters = field(default_factory=lambda: EngineCounters(block_tokens=16))
    loses: str = ""
    """Finds none of what came with it: the name of an adapter, or a picture."""
    is_blind: bool = False
    """Takes no picture."""
    asked: list[tuple[int, ...]] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    """Those it was asked for."""
    read: int = 0
    """How many times its counters were."""

    async def model(self) -> Served:
        self._fail()
        return Served(name="tiny", most_tokens=self.most_tokens)

    async def complete(self, model: str, tokens: Sequence[int]) -> int | None:
        self._fail()
        self.asked.append(tuple(tokens))
        if model != "tiny":
            self.adapters.append(model)
        return self._answer(model, tuple(tokens))

    async def see(self, model: str, words: str, picture: bytes) -> int | None:
        self._fail()
        assert model == "tiny"
        assert picture.startswith(b"\x89PNG")
        if self.is_blind:
            raise EngineError("answers /v1/chat/completions with 400")
        return self._answer("picture", tuple(map(int, words.split())))

    def _answer(self, kind: str, tokens: tuple[int, ...]) -> int | None:
        prompt = (hash(kind), *tokens)
        is_hit = prompt in self.volume.prompts and kind != self.loses
        cached = len(tokens) // 16 * 16 if is_hit and not self.computes_hits else 0
        self.counted = replace(
            self.counted,
            finished_requests=self.counted.finished_requests + 1 + self.other_requests,
            disk_tokens=self.counted.disk_tokens + cached,
            verdicts=self.counted.verdicts + is_hit,
            written_blocks=self.counted.written_blocks + (1 if self.stores else 0),
        )
        if self.stores:
            self.volume.prompts.add(prompt)
        return cached if self.tells_cached else None

    async def metrics(self) -> EngineCounters:
        self.read += 1
        self._fail()
        return self.counted

    def _fail(self) -> None:
        if self.wants_another_key:
            raise EngineLocked("answers /v1/models with 401")
        if self.failure:
            raise EngineError(self.failure)


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    async def pause(self, seconds: float) -> None:
        self.seconds += seconds
