# SPDX-License-Identifier: Apache-2.0
"""Polls the reports of pods: a reconcile reads the last answer at once, and an answer that changed wakes its tier.

A reconcile may run many times a second, so a pod is asked once in an interval. With very many pods, the interval grows:
all of them get a fixed number of requests a second. A pod that does not answer, or whose answer is about to change, is
asked again after a second, and later each time. A pod that has just become ready is asked at once.

Threads: `answer` may be called from any thread. One lock guards all fields; requests are sent by the HTTP client.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvtier_operator.observe.http_client import Address, HttpClient, HttpReply, HttpRequest

logger = logging.getLogger(__name__)

Owner = TypeVar("Owner", bound=Hashable)
Parse = Callable[[bytes], object]
"""Parses an answer to a value that compares equal while nothing that matters changed; raises ValueError."""

FORGET_SECONDS: Final = 900.0
"""An answer that no reconcile read for this long is dropped; longer than a resync."""
SOON_SECONDS: Final = 1.0
"""Delay after an answer that is about to change, or none; doubles each time."""
LONGEST_SECONDS: Final = 300.0
"""Longest delay between two requests to a pod that does not answer."""
MOST_A_SECOND: Final = 20.0
"""Requests to pods that answer: as many as cost a few percent of a processor."""


@dataclass(frozen=True, kw_only=True)
class PollAnswer:
    """The last answer of a pod: a value, or why there is none."""

    value: object = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class PollTarget:
    """An address and the uid of the pod that has it now: another pod may have it tomorrow."""

    address: Address
    uid: str = ""


@dataclass
class _Known(Generic[Owner]):
    owner: Owner
    parse: Parse
    is_passing: Callable[[object], bool]
    since: str
    looked_at: float
    due: float | None = None
    """When it is asked next; None while it is being asked, or no reconcile reads it."""
    is_asking: bool = False
    is_changed: bool = False
    """Whether it changed while it was asked, so that the answer is out of date."""
    asked_at: float = 0.0
    restless: int = 0
    """Number of answers in a row that were none, or were about to change."""
    answer: PollAnswer | None = None


class Poller(Generic[Owner]):
    """The last answers of all pods that reconciles read."""

    def __init__(
        self,
        http: HttpClient,
        on_change: Callable[[Owner], None],
        *,
        interval_seconds: float = 15.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store; the first call of `answer` asks. `on_change` is called on the thread of the loop."""
        self._http = http
        self._on_change = on_change
        self._interval_seconds = interval_seconds
        self._now = now
        self._lock = threading.Lock()
        self._known: dict[PollTarget, _Known[Owner]] = {}
        self._due: list[tuple[float, int, PollTarget]] = []
        self._order = itertools.count()
        self._swept_at = now()
        self._timer: asyncio.TimerHandle | None = None

    def answer(
        self,
        target: PollTarget,
        *,
        owner: Owner,
        parse: Parse,
        since: str = "",
        is_passing: Callable[[object], bool] = lambda _value: False,
    ) -> PollAnswer | None:
        """Return the last answer, None before the first, and have it asked again if it is old.

        A pod whose value is about to change is asked again soon, and at once if `since` changes: when it became ready.
        """
        with self._lock:
            now = self._now()
            known = self._known.get(target)
            if known is None:
                self._forget(now)
                known = self._known[target] = _Known(owner, parse, is_passing, since=since, looked_at=now)
                self._ask_at(target, known, now)
            elif known.since != since:
                known.since, known.restless, known.is_changed = since, 0, known.is_asking
                self._ask_at(target, known, now)
            elif known.due is None:
                self._ask_at(target, known, known.asked_at + self._interval_seconds)
            known.owner, known.parse, known.looked_at = owner, parse, now
            is_due = bool(self._due) and (self._due[0][0] <= now or self._due[0][2] == target)
            answer = known.answer
        if is_due:
            self._http.call(self._ask_due)
        return answer

    def _ask_at(self, target: PollTarget, known: _Known[Owner], due: float) -> None:
        """Have it asked then, or earlier; after the request that is open. Caller holds the lock."""
        if not known.is_asking and (known.due is None or due < known.due):
            known.due = due
            heapq.heappush(self._due, (due, next(self._order), target))

    def _ask_due(self) -> None:
        """Ask the pods that are due, and set a timer for the next one. On the thread of the loop."""
        begun: list[tuple[PollTarget, _Known[Owner]]] = []
        with self._lock:
            now = self._now()
            while self._due and self._due[0][0] <= now:
                due, _, target = heapq.heappop(self._due)
                known = self._known.get(target)
                if known is None or known.due != due:
                    continue  # forgotten, or asked earlier
                known.due, known.is_asking, known.asked_at = None, True, now
                begun.append((target, known))
            wait = self._due[0][0] - now if self._due else None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait is None else self._http.call_later(wait, self._ask_due)
        for target, known in begun:
            self._submit(target, known)

    def _submit(self, target: PollTarget, known: _Known[Owner]) -> None:
        def on_reply(found: HttpReply | OSError) -> None:
            self._on_answer(target, known, _read(target.address, found, known.parse))

        self._http.submit(HttpRequest(address=target.address), owner=known.owner, on_reply=on_reply)

    def _on_answer(self, target: PollTarget, known: _Known[Owner], answer: PollAnswer) -> None:
        with self._lock:
            wakes = known.answer is None or _essence(known.answer) != _essence(answer)
            known.answer, known.is_asking = answer, False
            known.restless = known.restless + 1 if (bool(answer.problem) or known.is_passing(answer.value)) else 0
            now = self._now()
            if known.is_changed:
                known.is_changed, known.restless = False, 0
                self._ask_at(target, known, now)
            elif now - known.looked_at <= FORGET_SECONDS:
                self._ask_at(target, known, now + self._pause(known, answer) * random.uniform(0.9, 1.0))  # noqa: S311  no secret
            owner = known.owner
        if wakes:
            self._on_change(owner)
        self._ask_due()

    def _pause(self, known: _Known[Owner], answer: PollAnswer) -> float:
        """Return the delay before it is asked again. Caller holds the lock."""
        steady = max(self._interval_seconds, len(self._known) / MOST_A_SECOND)
        soon = SOON_SECONDS * 2.0 ** min(known.restless - 1, 16)
        return min(soon, LONGEST_SECONDS if answer.problem else steady) if known.restless else steady

    def _forget(self, now: float) -> None:
        """Drop pods that no reconcile reads any more, now and then. Caller holds the lock."""
        if now - self._swept_at < FORGET_SECONDS / 10:
            return
        self._swept_at = now
        stale = [
            target
            for target, known in self._known.items()
            if not known.is_asking and now - known.looked_at > FORGET_SECONDS
        ]
        for target in stale:
            del self._known[target]


def _read(address: Address, found: HttpReply | OSError, parse: Parse) -> PollAnswer:
    if isinstance(found, OSError):
        return PollAnswer(problem=f"{address}: {found}")
    if not found.is_ok:
        return PollAnswer(problem=f"{address}: answers {found.status} {found.reason}")
    try:
        return PollAnswer(value=parse(found.body))
    except ValueError as error:
        return PollAnswer(problem=f"{address}: {error}")
    except Exception:
        # An unforeseen answer must not leave the pod unasked for ever.
        logger.exception("%s was not understood", address)
        return PollAnswer(problem=f"{address}: its answer was not understood; the operator's log says why")


def _essence(answer: PollAnswer) -> tuple[object, bool]:
    """Return the part of an answer whose change wakes the tier: not the words of a failure."""
    return answer.value, bool(answer.problem)
