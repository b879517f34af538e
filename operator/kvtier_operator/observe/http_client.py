# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to thousands of pods, on one event loop of its own.

Every request has a deadline and a greatest length. No redirect is followed and nothing is unpacked. An owner has at
most `REQUESTS_EACH` requests open at a time, so that a tier whose pods hang holds up no other tier. All owners together
have as many as the process may open.

Threads: `start`, `close`, `call` are for any thread; everything else is for the thread of the loop.
"""

from __future__ import annotations

import asyncio
import errno
import http
import ipaddress
import logging
import os
import resource
import threading
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 3.0
"""Time-out of a connection: a pod accepts within milliseconds, or never where a policy drops packets."""
MOST_REQUESTS: Final = 2048
REQUESTS_EACH: Final = 4
MOST_HELD_BYTES: Final = 64 << 20
"""Of replies that are being read, all together."""


@dataclass(frozen=True, kw_only=True, order=True)
class Address:
    """A path of one host and port."""

    host: str
    port: int
    path: str

    def __str__(self) -> str:
        """Return the URL, for messages."""
        try:
            is_bracketed = ipaddress.ip_address(self.host).version == 6  # noqa: PLR2004  IPv6
        except ValueError:
            is_bracketed = False
        return f"http://{f'[{self.host}]' if is_bracketed else self.host}:{self.port}{self.path}"


@dataclass(frozen=True, kw_only=True)
class HttpRequest:
    """One request and its limits."""

    address: Address
    method: str = "GET"
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 5.0
    """From when it is sent until the last byte."""
    most_bytes: int = 4 << 20


@dataclass(frozen=True, kw_only=True)
class HttpReply:
    """The reply, whatever its status."""

    status: int
    reason: str
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Tell whether the status is 200."""
        return self.status == http.HTTPStatus.OK


OnReply = Callable[["HttpReply | OSError"], None]


class HttpClient:
    """One event loop and the requests on it."""

    def __init__(self, *, most_requests: int | None = None) -> None:
        """Store; `start` starts. By default, requests take a half of the files that this process may open."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = MOST_REQUESTS if files == resource.RLIM_INFINITY else min(MOST_REQUESTS, files // 2)
        self._free = asyncio.Semaphore(most_requests or most)
        self._free_of: dict[Hashable, tuple[asyncio.Semaphore, int]] = {}
        """Of each owner with requests: the semaphore, and the number of these requests."""
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        """Calls for the loop that it has not taken yet; guarded by the lock."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._session: aiohttp.ClientSession | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, and wait until it takes requests."""
        is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_up)), name="http-client", daemon=True)
        self._thread.start()
        is_up.wait()

    def close(self, *, timeout: float) -> bool:
        """Cancel every request without a call of its `on_reply`, and tell whether the thread ended in time."""
        if self._thread is None:
            return True
        stopping = self._stopping
        if stopping is not None:
            self.call(stopping.set)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function; does nothing before the start and after the end."""
        loop = self._loop
        if loop is None:
            return
        with self._lock:
            self._calls.append((function, arguments))
            if len(self._calls) > 1:
                return  # the loop has been woken, which takes a system call, and runs them all
        try:
            loop.call_soon_threadsafe(self._run_calls, loop)
        except RuntimeError:
            logger.debug("No pod is asked any more: the operator stops.")

    def _run_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for function, arguments in calls:
            loop.call_soon(function, *arguments)

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        """Have the loop call a function later."""
        return asyncio.get_running_loop().call_later(max(0.0, seconds), function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it or the client ends; it handles its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def send(self, request: HttpRequest, *, owner: Hashable) -> HttpReply:
        """Send a request as soon as its owner may have one more open, and return the reply.

        Raises:
            OSError: the pod does not answer, or too slowly, too much, or something else than HTTP.
        """
        own, count = self._free_of.get(owner) or (asyncio.Semaphore(REQUESTS_EACH), 0)
        self._free_of[owner] = own, count + 1
        try:
            async with own, self._free:
                return await self._fetch(request)
        finally:
            _, count = self._free_of[owner]
            if count > 1:
                self._free_of[owner] = own, count - 1
            else:
                del self._free_of[owner]

    def submit(self, request: HttpRequest, *, owner: Hashable, on_reply: OnReply) -> None:
        """Send a request and call a function with the reply or the error."""
        self.spawn(self._submitted(request, owner, on_reply))

    async def _submitted(self, request: HttpRequest, owner: Hashable, on_reply: OnReply) -> None:
        found: HttpReply | OSError
        try:
            found = await self.send(request, owner=owner)
        except OSError as error:
            found = error
        try:
            on_reply(found)
        except Exception:
            # The edge of the loop: one reply that breaks its reader must not keep others from theirs.
            logger.exception("The reply of %s was not understood.", request.address)

    async def _serve(self, is_up: threading.Event) -> None:
        self._stopping = asyncio.Event()
        async with aiohttp.ClientSession(
            # Each pod is asked rarely: an open connection would only hold a place of its server's.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as self._session:
            self._loop = asyncio.get_running_loop()
            is_up.set()
            await self._stopping.wait()
            self._loop = None
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _fetch(self, request: HttpRequest) -> HttpReply:
        assert self._session is not None
        body = bytearray()
        try:
            async with (
                asyncio.timeout(request.seconds),
                self._session.request(
                    request.method,
                    str(request.address),
                    data=request.body,
                    headers=request.headers,
                    allow_redirects=False,
                ) as reply,
            ):
                async for chunk in reply.content.iter_any():
                    body += chunk
                    self._held_bytes += len(chunk)
                    if len(body) > request.most_bytes:
                        raise OSError(f"answers more than {request.most_bytes} bytes")
                    if self._held_bytes > MOST_HELD_BYTES:
                        raise OSError("answers more than there is room for just now")
                return HttpReply(status=reply.status, reason=reply.reason or "", body=bytes(body))
        except aiohttp.ConnectionTimeoutError as error:
            raise TimeoutError("takes no connection; a NetworkPolicy may keep the operator out") from error
        except TimeoutError as error:
            raise TimeoutError("answers too slowly") from error
        except aiohttp.ClientOSError as error:
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number)) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(f"does not speak HTTP: {type(error).__name__}") from error
        finally:
            self._held_bytes -= len(body)
