# SPDX-License-Identifier: Apache-2.0
"""What pods say about themselves: whoever looks gets the last answer and never waits, and hears when there is another.

A pass over a tier may run many times a second: so what is asked is asked at most once per interval, and once per
interval by itself; where there are very many, as often as a fixed number of questions a second allows. Who does not
answer, or says what is about to change, is asked again after a second, and later each time. A pod that has just become
ready is asked at once.

Threads: `look` may be called from any thread. One lock guards all fields; asking is the asker's.
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
Meaning = Callable[[bytes], object]
"""Turns an answer into a value that compares equal when nothing that matters moved; raises ValueError if it cannot."""

FORGET_SECONDS: Final = 900.0
"""What nobody looked at for this long is gone; longer than a resync."""
SOON_SECONDS: Final = 1.0
"""After an answer that is about to change, or none; doubled each time."""
LONGEST_SECONDS: Final = 300.0
"""Between two questions to who does not answer."""
MOST_A_SECOND: Final = 20.0
"""Questions to those who answer: as many as cost a few percent of a processor."""


@dataclass(frozen=True, kw_only=True)
class PollAnswer:
    """What a pod said last: a value, or why there is none."""

    value: object = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class PollTarget:
    """Whom to ask what: an address, and who has it now, since another pod may have it tomorrow."""

    address: Address
    uid: str = ""


@dataclass
class _Known(Generic[Owner]):
    owner: Owner
    meaning: Meaning
    is_passing: Callable[[object], bool]
    since: str
    looked_at: float
    due: float | None = None
    """When it is asked next; None while it is being asked, or nobody looks."""
    is_asking: bool = False
    is_changed: bool = False
    """While it was asked, so that what it says is old already."""
    asked_at: float = 0.0
    restless: int = 0
    """Answers in a row that were none, or were about to change."""
    answer: PollAnswer | None = None


class Poller(Generic[Owner]):
    """The last answer of everybody who is looked at."""

    def __init__(
        self,
        asker: HttpClient,
        changed: Callable[[Owner], None],
        *,
        interval_seconds: float = 15.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask nobody yet.

        Args:
            asker: who asks.
            changed: told, from the asker's thread, whose answer means something else than before.
            interval_seconds: a pod that answers is asked this often.
            now: seconds that never go back.
        """
        self._asker = asker
        self._changed = changed
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
        subject: PollTarget,
        *,
        owner: Owner,
        meaning: Meaning,
        since: str = "",
        is_passing: Callable[[object], bool] = lambda _value: False,
    ) -> PollAnswer | None:
        """Return the last answer, None before the first, and have it asked again if it is old.

        Args:
            subject: whom to ask.
            owner: told when the answer changes.
            meaning: makes a value of the answer.
            is_passing: tells of a value whether it is about to change: then it is asked for again soon.
            since: another word than last time means that it is to be asked at once: since when it is ready, say.
        """
        with self._lock:
            now = self._now()
            known = self._known.get(subject)
            if known is None:
                self._forget(now)
                known = self._known[subject] = _Known(owner, meaning, is_passing, since=since, looked_at=now)
                self._ask_at(subject, known, now)
            elif known.since != since:
                known.since, known.restless, known.is_changed = since, 0, known.is_asking
                self._ask_at(subject, known, now)
            elif known.due is None:
                self._ask_at(subject, known, known.asked_at + self._interval_seconds)
            known.owner, known.meaning, known.looked_at = owner, meaning, now
            is_due = bool(self._due) and (self._due[0][0] <= now or self._due[0][2] == subject)
            answer = known.answer
        if is_due:
            self._asker.call(self._ask_due)
        return answer

    def _ask_at(self, subject: PollTarget, known: _Known[Owner], due: float) -> None:
        """Have it asked then, or earlier; who is being asked, afterwards. Caller holds the lock."""
        if not known.is_asking and (known.due is None or due < known.due):
            known.due = due
            heapq.heappush(self._due, (due, next(self._order), subject))

    def _ask_due(self) -> None:
        """Ask who is due, and come back when the next one is. On the asker's thread."""
        begun: list[tuple[PollTarget, _Known[Owner]]] = []
        with self._lock:
            now = self._now()
            while self._due and self._due[0][0] <= now:
                due, _, subject = heapq.heappop(self._due)
                known = self._known.get(subject)
                if known is None or known.due != due:
                    continue  # forgotten, or asked earlier
                known.due, known.is_asking, known.asked_at = None, True, now
                begun.append((subject, known))
            wait = self._due[0][0] - now if self._due else None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait is None else self._asker.call_later(wait, self._ask_due)
        for subject, known in begun:
            self._submit(subject, known)

    def _submit(self, subject: PollTarget, known: _Known[Owner]) -> None:
        def done(found: HttpReply | OSError) -> None:
            self._heard(subject, known, _read(subject.address, found, known.meaning))

        self._asker.submit(HttpRequest(address=subject.address), owner=known.owner, done=done)

    def _heard(self, subject: PollTarget, known: _Known[Owner], answer: PollAnswer) -> None:
        with self._lock:
            is_news = known.answer is None or _news(known.answer) != _news(answer)
            known.answer, known.is_asking = answer, False
            is_restless = bool(answer.problem) or known.is_passing(answer.value)
            known.restless = known.restless + 1 if is_restless else 0
            now = self._now()
            if known.is_changed:
                known.is_changed, known.restless = False, 0
                self._ask_at(subject, known, now)
            elif now - known.looked_at <= FORGET_SECONDS:
                self._ask_at(subject, known, now + self._pause(known, answer) * random.uniform(0.9, 1.0))  # noqa: S311  no secret
            owner = known.owner
        if is_news:
            self._changed(owner)
        self._ask_due()

    def _pause(self, known: _Known[Owner], answer: PollAnswer) -> float:
        """Return after how long it is asked again. Caller holds the lock."""
        steady = max(self._interval_seconds, len(self._known) / MOST_A_SECOND)
        soon = SOON_SECONDS * 2.0 ** min(known.restless - 1, 16)
        return min(soon, LONGEST_SECONDS if answer.problem else steady) if known.restless else steady

    def _forget(self, now: float) -> None:
        """Drop whom nobody looks at, now and then. Caller holds the lock."""
        if now - self._swept_at < FORGET_SECONDS / 10:
            return
        self._swept_at = now
        stale = [
            subject
            for subject, known in self._known.items()
            if not known.is_asking and now - known.looked_at > FORGET_SECONDS
        ]
        for subject in stale:
            del self._known[subject]


def _read(address: Address, found: HttpReply | OSError, meaning: Meaning) -> PollAnswer:
    if isinstance(found, OSError):
        return PollAnswer(problem=f"{address}: {found}")
    if not found.is_ok:
        return PollAnswer(problem=f"{address}: answers {found.status} {found.reason}")
    try:
        return PollAnswer(value=meaning(found.body))
    except ValueError as error:
        return PollAnswer(problem=f"{address}: {error}")
    except Exception:
        # An answer that nobody foresaw must not leave the pod unasked for ever.
        logger.exception("%s was not understood", address)
        return PollAnswer(problem=f"{address}: its answer was not understood; the operator's log says why")


def _news(answer: PollAnswer) -> tuple[object, bool]:
    """Return what of an answer is worth waking a tier for: not the words of a failure."""
    return answer.value, bool(answer.problem)
