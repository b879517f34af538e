# SPDX-License-Identifier: Apache-2.0
"""Who is asked next when more is to be asked than at once: owners take turns, and who answers goes before who does not.

Without a clock and without a thread: for one event loop.

Asks pods over HTTP, thousands of them, on one event loop of its own: who hangs delays nobody else's answer.

Every conversation has a deadline and a greatest length, no redirect is followed and nothing is unpacked. Owners take
turns for a number of places; a conversation that has not ended within `PATIENCE_SECONDS` gives its place to the next
one and goes on beside it. Where too many go on so, the one that would end first is cut off; where they hold too many
bytes, the longest.

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
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import aiohttp

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items that wait for one of a few places, each on behalf of an owner."""

    def __init__(self, *, places: int, places_each: int) -> None:
        """Have all places free.

        Args:
            places: items that may have one at the same time.
            places_each: items of one owner that may.
        """
        self._free = places
        self._places_each = places_each
        self._taken: Counter[Hashable] = Counter()
        self._hopeful: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        self._doubtful: OrderedDict[Hashable, deque[Item]] = OrderedDict()

    def add(self, item: Item, *, owner: Hashable, is_hopeful: bool) -> None:
        """Let an item wait; what is not hopeful waits for everything that is."""
        waiting = self._hopeful if is_hopeful else self._doubtful
        waiting.setdefault(owner, deque()).append(item)

    def take(self) -> tuple[Hashable, Item] | None:
        """Return who has a place now, for `leave`, and what; None where nobody may have one."""
        if not self._free:
            return None
        for waiting in (self._hopeful, self._doubtful):
            # At most as many owners are passed over as can hold all places between them.
            owner = next((each for each in waiting if self._taken[each] < self._places_each), None)
            if owner is None:
                continue
            item = waiting[owner].popleft()
            if waiting[owner]:
                waiting.move_to_end(owner)
            else:
                del waiting[owner]
            self._taken[owner] += 1
            self._free -= 1
            return owner, item
        return None

    def leave(self, owner: Hashable) -> None:
        """Free a place of that owner."""
        self._free += 1
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]


logger = logging.getLogger(__name__)

PATIENCE_SECONDS: Final = 0.5
"""How long a conversation keeps others from having its place."""
CONNECT_SECONDS: Final = 3.0
"""In which a pod takes a connection; in a cluster that takes milliseconds, or never where a policy drops it."""
MOST_PLACES: Final = 512
PLACES_EACH: Final = 16
MOST_HELD_BYTES: Final = 64 << 20
"""Of answers that are being read, all together."""
MOST_SILENT: Final = 20_000
"""Hosts that did not answer last, remembered so that they wait for those that do."""


@dataclass(frozen=True, kw_only=True, order=True)
class Address:
    """What is asked: a path of one host and port."""

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
    """One request and what it may take."""

    address: Address
    method: str = "GET"
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 5.0
    """From when it is its turn until the last byte."""
    most_bytes: int = 4 << 20


@dataclass(frozen=True, kw_only=True)
class HttpReply:
    """What came back, whatever its status."""

    status: int
    reason: str
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Tell whether that is what was asked for."""
        return self.status == http.HTTPStatus.OK


Done = Callable[["HttpReply | OSError"], None]


@dataclass(eq=False)
class _Talk:
    question: HttpRequest
    done: Done
    owner: Hashable = None
    has_place: bool = True
    limit: asyncio.Timeout | None = None
    ends_at: float = 0.0
    body: bytearray = field(default_factory=bytearray)
    is_dropped: bool = False


class HttpClient:
    """One event loop and the conversations on it."""

    def __init__(self, *, places: int | None = None) -> None:
        """Store; `start` starts.

        Args:
            places: conversations at the same time, and as many that take longer; None for what this process may open.
        """
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._places = places or (MOST_PLACES if files == resource.RLIM_INFINITY else min(MOST_PLACES, files // 4))
        self._turns: Turns[_Talk] = Turns(places=self._places, places_each=PLACES_EACH)
        self._talks: set[_Talk] = set()
        self._aside: set[_Talk] = set()
        self._held_bytes = 0
        self._silent: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._session: aiohttp.ClientSession | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, and wait until it can be asked for something."""
        is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_up)), name="asker", daemon=True)
        self._thread.start()
        is_up.wait()

    def close(self, *, timeout: float) -> bool:
        """End every conversation without a word to who waits for it, and tell whether that took no longer."""
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
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.debug("Nobody is asked any more: the operator stops.")

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
        """Have the loop call a function later."""
        return asyncio.get_running_loop().call_later(max(0.0, seconds), function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it or the asker ends; it handles its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ask(self, question: HttpRequest, *, owner: Hashable) -> HttpReply:
        """Ask when it is the owner's turn.

        Raises:
            OSError: nobody answers, or too slowly, too much, or something else than HTTP.
        """
        told: asyncio.Future[HttpReply | OSError] = asyncio.get_running_loop().create_future()
        self.submit(question, owner=owner, done=lambda found: None if told.done() else told.set_result(found))
        found = await told
        if isinstance(found, OSError):
            raise found
        return found

    def submit(self, question: HttpRequest, *, owner: Hashable, done: Done) -> None:
        """Ask when it is the owner's turn, and tell what came of it; takes less memory than who waits for `ask`."""
        is_hopeful = question.address.host not in self._silent
        self._turns.add(_Talk(question=question, done=done), owner=owner, is_hopeful=is_hopeful)
        self._begin()

    async def _serve(self, is_up: threading.Event) -> None:
        self._stopping = asyncio.Event()
        async with aiohttp.ClientSession(
            # Each pod is asked once in a while: a connection kept open would only hold a place of its server's.
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

    def _begin(self) -> None:
        # At the end, whoever goes makes room for nobody.
        while self._loop is not None and (found := self._turns.take()) is not None:
            owner, talk = found
            talk.owner = owner
            self._talks.add(talk)
            self.spawn(self._run(talk))

    async def _run(self, talk: _Talk) -> None:
        timer = self.call_later(PATIENCE_SECONDS, self._step_aside, talk)
        found: HttpReply | OSError
        try:
            found = await self._fetch(talk)
        except OSError as error:
            found = error
        finally:
            timer.cancel()
            self._leave_place(talk)
            self._talks.discard(talk)
            self._aside.discard(talk)
            self._drop(talk)
        self._remember(talk.question.address.host, is_silent=isinstance(found, OSError))
        try:
            talk.done(found)
        except Exception:
            # The edge of the loop: who breaks over an answer must not keep others from theirs.
            logger.exception("What %s answered was not understood.", talk.question.address)
        self._begin()

    async def _fetch(self, talk: _Talk) -> HttpReply:
        question, address = talk.question, talk.question.address
        assert self._session is not None
        try:
            async with asyncio.timeout(question.seconds) as talk.limit:
                talk.ends_at = talk.limit.when() or 0.0
                async with self._session.request(
                    question.method,
                    str(address),
                    data=question.body,
                    headers=question.headers,
                    allow_redirects=False,
                ) as answer:
                    async for chunk in answer.content.iter_any():
                        self._keep(talk, chunk)
                    return HttpReply(status=answer.status, reason=answer.reason or "", body=bytes(talk.body))
        except aiohttp.ConnectionTimeoutError as error:
            raise TimeoutError("takes no connection; a NetworkPolicy may keep the operator out") from error
        except TimeoutError as error:
            raise TimeoutError("answers too slowly") from error
        except aiohttp.ClientOSError as error:
            number = error.errno or errno.EIO
            raise OSError(number, os.strerror(number)) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(f"does not speak HTTP: {type(error).__name__}") from error

    def _keep(self, talk: _Talk, chunk: bytes) -> None:
        talk.body += chunk
        self._held_bytes += len(chunk)
        if len(talk.body) > talk.question.most_bytes:
            raise OSError(f"answers more than {talk.question.most_bytes} bytes")
        if self._held_bytes > MOST_HELD_BYTES:
            longest = max(self._talks, key=lambda each: len(each.body))
            longest.is_dropped = True
            self._drop(longest)
        if talk.is_dropped:
            raise OSError("answers more than there is room for just now")

    def _drop(self, talk: _Talk) -> None:
        self._held_bytes -= len(talk.body)
        talk.body = bytearray()

    def _step_aside(self, talk: _Talk) -> None:
        self._leave_place(talk)
        self._aside.add(talk)
        if len(self._aside) > self._places:
            first = min(self._aside, key=lambda each: each.ends_at)
            self._aside.discard(first)
            if first.limit is not None and not first.limit.expired():
                first.limit.reschedule(0.0)
        self._begin()

    def _leave_place(self, talk: _Talk) -> None:
        if talk.has_place:
            talk.has_place = False
            self._turns.leave(talk.owner)

    def _remember(self, host: str, *, is_silent: bool) -> None:
        self._silent.pop(host, None)
        if is_silent:
            self._silent[host] = None
            if len(self._silent) > MOST_SILENT:
                self._silent.popitem(last=False)
