# SPDX-License-Identifier: Apache-2.0
"""Pods for the asker, some of which never take a connection, and engines that behave as a canary sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, TypeVar

import pytest

from kvtier_operator import names
from kvtier_operator.kube.http_server import HttpServer
from kvtier_operator.observe.engine_client import EngineError, EngineLocked, Served
from kvtier_operator.observe.http_client import Address, HttpClient, HttpReply, HttpRequest, OnReply
from kvtier_operator.observe.pod_reports import EngineCounters

Found = TypeVar("Found")


def on_loop(asker: HttpClient, work: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    """Run a coroutine on the asker's loop and return what comes of it."""
    told: list[Found | Exception] = []
    is_told = threading.Event()

    async def run() -> None:
        try:
            told.append(await work())
        except Exception as error:  # noqa: BLE001  raised again where the test is
            told.append(error)
        is_told.set()

    asker.call(lambda: asker.spawn(run()))
    assert is_told.wait(60)
    if isinstance(told[0], Exception):
        raise told[0]
    return told[0]


class Pods:
    """HTTP servers at any loopback address and one port; they say what `says` holds for their path."""

    def __init__(self) -> None:
        self.says: dict[str, bytes] = {"/": b"1"}
        self.asked: Counter[str] = Counter()
        """How many requests each address got."""
        self.may_answer = threading.Event()
        self.may_answer.set()
        pods = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pods.asked[self.connection.getsockname()[0]] += 1
                assert pods.may_answer.wait(60)
                with contextlib.suppress(OSError):
                    self.send_response(200 if self.path in pods.says else 404)
                    self.end_headers()
                    self.wfile.write(pods.says.get(self.path, b""))

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 512

        self._server = Server(("0.0.0.0", 0), Handler)
        self.port = self._server.server_port

    @contextmanager
    def serving(self) -> Iterator[Pods]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.may_answer.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@contextmanager
def unreachable() -> Iterator[int]:
    """Return a port at which no loopback address takes a connection or refuses one, as behind a policy that drops."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.bind(("0.0.0.0", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # what the kernel takes before it drops
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)  # noqa: FBT003  the library's signature
            filler.connect_ex(("127.0.0.1", port))
        yield port


class ScriptedAsker(HttpClient):
    """Asks a function instead of a pod; it may block, and may raise OSError."""

    def __init__(self, ask: Callable[[Address], bytes]) -> None:
        super().__init__()
        self._ask = ask

    def submit(self, request: HttpRequest, *, owner: Hashable, on_reply: OnReply) -> None:
        def run() -> None:
            try:
                found: HttpReply | OSError = HttpReply(status=200, reason="OK", body=self._ask(request.address))
            except OSError as error:
                found = error
            self.call(on_reply, found)

        threading.Thread(target=run, daemon=True).start()


@contextmanager
def running(**settings: Any) -> Iterator[HttpClient]:
    asker = HttpClient(**settings)
    asker.start()
    try:
        yield asker
    finally:
        assert asker.close(timeout=60)


async def nothing() -> None:
    """Be done when what was begun before has got as far as it can without waiting for anybody."""
    await asyncio.sleep(0.01)


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
