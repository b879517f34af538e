# SPDX-License-Identifier: Apache-2.0
"""Engines that behave as a canary sees them: they store, find, count and fail, without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import pytest

from kvtier_operator import names
from kvtier_operator.kube.http_server import HttpServer
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


class StubEngine(BaseHTTPRequestHandler):
    """An engine as far as HTTP goes: it answers as told, asks for a key at its API as vLLM does, and notes requests."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}
    key: ClassVar[str] = ""
    bodies: ClassVar[list[dict[str, Any]]] = []
    given: ClassVar[dict[str, str | None]] = {}
    """The authorization that each path was asked with."""

    def do_GET(self) -> None:
        self.given[self.path] = self.headers.get("Authorization")
        is_open = not self.key or not self.path.startswith("/v1") or self.given[self.path] == f"Bearer {self.key}"
        status, body = self.answers.get(self.path, (404, b"")) if is_open else (401, b"")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Stay quiet."""


MODELS = b'{"data": [{"id": "tiny", "max_model_len": 4096}]}'


@contextmanager
def stub_engine(monkeypatch: pytest.MonkeyPatch, key: str = "") -> Iterator[str]:
    """Serve as an engine where the operator looks for one, and return the host."""
    for name, value in {"answers": {"/v1/models": (200, MODELS)}, "bodies": [], "given": {}, "key": key}.items():
        monkeypatch.setattr(StubEngine, name, value)
    server = HttpServer("127.0.0.1", 0, StubEngine)
    monkeypatch.setattr(names, "HTTP_PORT", server.server_address[1])
    stop = server.serve_on_thread("engine")
    yield "127.0.0.1"
    stop()
