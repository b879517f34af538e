# SPDX-License-Identifier: Apache-2.0
"""Ask the pods of a tier over HTTP, in the background: whoever looks gets the last answer and never waits.

A pass over a tier may run many times a second, and a pod may hang: so an address is asked at most once per interval,
by threads of its own, each answer has a deadline and a greatest length, and an answer that means something new wakes
the tier that looked.

Threads: `look` may be called from any thread. All fields are guarded by one lock; asking runs outside it.
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvtier_operator.deadlines import within

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner", bound=Hashable)
Meaning = Callable[[bytes], object]
"""Turns an answer into a value that compares equal when nothing that matters moved; raises ValueError if it cannot."""

DEADLINE_SECONDS: Final = 5.0
MOST_BYTES: Final = 4 << 20
FORGET_SECONDS: Final = 900.0
"""An address that nobody looked at for this long belongs to a pod that is gone."""


@dataclass(frozen=True, kw_only=True, order=True)
class Address:
    """What is asked: ``GET path`` of one host and port."""

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
class Answer:
    """What an address said last: a value, or why there is none."""

    value: object = None
    problem: str = ""


@dataclass
class _Known(Generic[Owner]):
    owner: Owner
    looked_at: float
    answer: Answer | None = None
    asked_at: float = float("-inf")
    is_asking: bool = False


def fetch(address: Address) -> bytes:
    """Return the body of the answer.

    Raises:
        OSError: no answer, a status other than 200, or one that is too slow or too long.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=DEADLINE_SECONDS)
    try:
        with within(connection, DEADLINE_SECONDS):
            connection.request("GET", address.path, headers={"Connection": "close"})
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise OSError(f"answers {answer.status} {answer.reason}")
            body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise OSError(f"answers more than {MOST_BYTES} bytes")
    except http.client.HTTPException as error:
        raise OSError(f"does not speak HTTP: {type(error).__name__}") from error
    else:
        return body
    finally:
        connection.close()


class Probes(Generic[Owner]):
    """The last answer of every address that is looked at."""

    def __init__(
        self,
        changed: Callable[[Owner], None],
        *,
        interval_seconds: float = 15.0,
        workers: int = 4,
        ask: Callable[[Address], bytes] = fetch,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nobody yet.

        Args:
            changed: told, from a thread of ours, whose answer means something else than before.
            interval_seconds: an address is asked at most this often.
            workers: addresses that are asked at the same time.
            ask: returns the body of an answer, or raises OSError.
            now: seconds that never go back.
        """
        self._changed = changed
        self._interval_seconds = interval_seconds
        self._ask = ask
        self._now = now
        self._lock = threading.Lock()
        self._known: dict[Address, _Known[Owner]] = {}
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="probe")

    def look(self, address: Address, *, owner: Owner, meaning: Meaning) -> Answer | None:
        """Return the last answer, None before the first, and have it asked again if it is old."""
        with self._lock:
            now = self._now()
            known = self._known.get(address)
            if known is None:
                self._forget(now)
                known = self._known[address] = _Known(owner=owner, looked_at=now)
            known.owner, known.looked_at = owner, now
            is_due = not known.is_asking and now - known.asked_at >= self._interval_seconds
            if is_due:
                known.is_asking, known.asked_at = True, now
            answer = known.answer
        if is_due:
            self._submit(address, known, meaning)
        return answer

    def close(self) -> None:
        """Ask nobody any more; what is being asked ends at its deadline."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, address: Address, known: _Known[Owner], meaning: Meaning) -> None:
        try:
            self._pool.submit(self._run, address, known, meaning)
        except RuntimeError:
            logger.debug("%s is not asked: the operator stops", address)

    def _run(self, address: Address, known: _Known[Owner], meaning: Meaning) -> None:
        try:
            answer = Answer(value=meaning(self._ask(address)))
        except (OSError, ValueError) as error:
            answer = Answer(problem=f"{address}: {error}")
        except Exception:
            # The edge of the thread: an answer that nobody foresaw must not leave the address unasked for ever.
            logger.exception("%s was not understood", address)
            answer = Answer(problem=f"{address}: its answer was not understood; the operator's log says why")
        with self._lock:
            is_news = known.answer is None or _news(known.answer) != _news(answer)
            known.answer, known.is_asking = answer, False
            owner = known.owner
        if is_news:
            self._changed(owner)

    def _forget(self, now: float) -> None:
        """Drop what nobody looks at. Caller holds the lock."""
        stale = [
            address
            for address, known in self._known.items()
            if not known.is_asking and now - known.looked_at > FORGET_SECONDS
        ]
        for address in stale:
            del self._known[address]


def _news(answer: Answer) -> tuple[object, bool]:
    """Return what of an answer is worth waking a tier for: not the words of a failure."""
    return answer.value, bool(answer.problem)
