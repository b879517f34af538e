# SPDX-License-Identifier: Apache-2.0
"""Which requests may have blocks fetched from disk into the CPU tier, and which wait until there is room.

vLLM fetches block by block into the primary (CPU) tier, and a block that has landed can be evicted until the request
is scheduled. A prefix longer than that tier would evict its own head while its tail arrives, ask for the head again,
and so on for ever. So each block is fetched once for a request, and what all of them fetch is limited.

The tier evicts what is oldest. The head of a waiting request therefore stays for as long as what was fetched since,
for anybody, is less than the tier holds. That window is what the limit is on: a request that was scheduled gives its
room back only if no older one still waits. Requests are served whole, in the order of their arrival: the first of those
that found no room takes what becomes free, and those that came later take nothing, so they do not wait for each other.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

USABLE_SHARE = 0.8
"""Of the primary tier: the rest takes what the engine stores meanwhile."""
WAIT_SECONDS = 10.0
"""A request that found no room for so long computes what it has not got."""


class Admission(enum.Enum):
    """What a request may do about a block that the volume has."""

    FETCH = "fetch"
    WAIT = "wait"
    """Ask again in the next step."""
    COMPUTE = "compute"


@dataclass(slots=True)
class _Account:
    arrival: int
    fetched: set[bytes] = field(default_factory=set)
    """Submitted for loading since the request began to wait."""
    offered: set[bytes] = field(default_factory=set)
    """Answered as a hit in this step; vLLM may find no room and not fetch it after all."""
    began: int | None = None
    """How many blocks had been fetched in all when the first one of this request was."""
    gives_up_at: float | None = None
    """Set once the request had to wait for room."""
    takes_no_more: bool = False
    """It computes what it has not got."""
    was_let_in: bool = False
    """In this step, for a block at least."""
    was_turned_away: bool = False
    """In this step."""


class PromotionBudget:
    """The accounts of the requests that wait. Every method is the scheduler's; not thread-safe."""

    def __init__(
        self, slots: int, *, wait_seconds: float = WAIT_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Size the budget for a primary tier of so many blocks."""
        self._limit = max(1, int(slots * USABLE_SHARE))
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._arrived = 0
        self._line: dict[str, int] = {}
        """Those that found no room, with their arrival."""
        self._first_arrival: float = math.inf
        """Of those in the line: whoever came before may take room before them."""
        self._preempted: set[str] = set()
        """vLLM does not say when these are scheduled again."""
        self._fetched = 0
        self._offered = 0
        self._window_began: int | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for room."""
        return len(self._line)

    def admit(self, key: bytes, request: str) -> Admission:
        """Say what the request may do about this block, and hold room for it if it may be fetched.

        A block that was fetched already and is asked for again was evicted in between: fetching it again could go on
        for ever, so the request does without.
        """
        account = self._account(request)
        if key in account.fetched:
            return Admission.COMPUTE
        if key in account.offered:
            return Admission.FETCH
        if account.takes_no_more:
            return Admission.COMPUTE
        is_next = account.arrival <= self._first_arrival
        window = self._offered + (0 if self._window_began is None else self._fetched - self._window_began)
        if is_next and window < self._limit:
            account.offered.add(key)
            account.was_let_in = True
            self._offered += 1
            return Admission.FETCH
        if not self._is_anybody_else_holding(request):
            # Longer than the tier: nobody's leaving would ever make room for the rest.
            account.takes_no_more = is_next
        if account.takes_no_more:
            self._leave_line(request)
            return Admission.COMPUTE
        return self._queue(account, request)

    def charge(self, keys: Iterable[bytes], request: str) -> None:
        """Note that the blocks are being fetched."""
        account = self._account(request)
        fetched = frozenset(keys)
        if account.began is None and request not in self._preempted:
            account.began = self._fetched
        self._fetched += len(fetched)
        self._offered -= len(account.offered & fetched)
        account.fetched |= fetched
        account.offered -= fetched
        self._move_window()

    def end_step(self) -> None:
        """Give back the room of offers that vLLM did not take up, and let those that got all they asked for go."""
        for request, account in self._accounts.items():
            if account.was_let_in and not account.was_turned_away:
                self._leave_line(request)
            account.offered.clear()
            account.was_let_in = account.was_turned_away = False
        self._offered = 0
        now = self._clock()
        for request in [name for name in self._line if (self._accounts[name].gives_up_at or now) < now]:
            # It may not even ask any more, and must not hold up those behind it.
            self._accounts[request].takes_no_more = True
            self._leave_line(request)

    def release(self, request: str) -> None:
        """Close the account: the request is scheduled and its blocks are on the GPU, or it is gone."""
        self._leave_line(request)
        self._preempted.discard(request)
        account = self._accounts.pop(request, None)
        if account is not None:
            self._offered -= len(account.offered)
            self._move_window()

    def preempt(self, request: str) -> None:
        """Close the account. What the request fetches to go on keeps nobody from fetching, since its end is not told.

        It is the first that vLLM schedules again; should its blocks be evicted before, it computes them.
        """
        self.release(request)
        self._preempted.add(request)

    def _queue(self, account: _Account, request: str) -> Admission:
        now = self._clock()
        if account.gives_up_at is None:
            account.gives_up_at = now + self._wait_seconds
        if account.gives_up_at <= now:
            account.takes_no_more = True
            self._leave_line(request)
            return Admission.COMPUTE
        self._line[request] = account.arrival
        self._first_arrival = min(self._first_arrival, account.arrival)
        account.was_turned_away = True
        return Admission.WAIT

    def _leave_line(self, request: str) -> None:
        if self._line.pop(request, None) is not None:
            self._first_arrival = min(self._line.values(), default=math.inf)

    def _account(self, request: str) -> _Account:
        account = self._accounts.get(request)
        if account is None:
            account = self._accounts[request] = _Account(self._arrived)
            self._arrived += 1
        return account

    def _is_anybody_else_holding(self, request: str) -> bool:
        return any(
            account.began is not None or account.offered for name, account in self._accounts.items() if name != request
        )

    def _move_window(self) -> None:
        self._window_began = min(
            (account.began for account in self._accounts.values() if account.began is not None), default=None
        )
