# SPDX-License-Identifier: Apache-2.0
"""Pods for the asker: real sockets on loopback addresses, some of which never take a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

from kvtier_operator.observe.http_client import Address, HttpClient, HttpReply, HttpRequest, OnReply

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
