# SPDX-License-Identifier: Apache-2.0
"""How many blocks of a request may be fetched from disk while it waits.

vLLM fetches block by block into the primary (CPU) tier, and a block that has landed can be evicted until the request
is scheduled. A prefix longer than that tier would evict its own head while its tail arrives, ask for the head again,
and so on for ever. So a request gets a share of the tier, gets each block once, and computes the rest.

The tier evicts what is oldest. The head of a waiting request therefore stays for as long as what was fetched since,
for anybody, is less than the tier holds. That window is what the budget limits, so a finished request does not give
room to fetch more while an older one still waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

USABLE_SHARE = 0.8
"""Of the primary tier: the rest takes what the engine stores meanwhile."""


@dataclass(slots=True)
class _Account:
    fetched: set[bytes] = field(default_factory=set)
    """Submitted for loading since the request began to wait."""
    offered: set[bytes] = field(default_factory=set)
    """Answered as a hit in this step; vLLM may find no room and not fetch it after all."""
    began: int | None = None
    """How many blocks had been fetched in all when the first one of this request was."""


class PromotionBudget:
    """The accounts of the requests that wait. Every method is the scheduler's; not thread-safe."""

    def __init__(self, slots: int) -> None:
        """Size the budget for a primary tier of so many blocks."""
        self._limit = max(1, int(slots * USABLE_SHARE))
        self._accounts: dict[str, _Account] = {}
        self._fetched = 0
        self._offered = 0
        self._window_began: int | None = None

    def join(self, request: str) -> None:
        """Count the request among those that share the budget."""
        self._accounts.setdefault(request, _Account())

    def admit(self, key: bytes, request: str) -> bool:
        """Say whether the request may have this block fetched, and hold room for it if so.

        A block that was fetched already and is asked for again was evicted in between: fetching it again could go on
        for ever, so the request does without.
        """
        self.join(request)
        account = self._accounts[request]
        if key in account.fetched:
            return False
        if key in account.offered:
            return True
        share = max(1, self._limit // len(self._accounts))
        window = self._offered + (0 if self._window_began is None else self._fetched - self._window_began)
        if len(account.fetched) + len(account.offered) >= share or window >= self._limit:
            return False
        account.offered.add(key)
        self._offered += 1
        return True

    def charge(self, keys: Iterable[bytes], request: str) -> None:
        """Note that the blocks are being fetched."""
        self.join(request)
        account = self._accounts[request]
        fetched = frozenset(keys)
        if account.began is None:
            account.began = self._fetched
        self._fetched += len(fetched)
        self._offered -= len(account.offered & fetched)
        account.fetched |= fetched
        account.offered -= fetched
        self._move_window()

    def end_step(self) -> None:
        """Give back the room of offers that vLLM did not take up."""
        for account in self._accounts.values():
            account.offered.clear()
        self._offered = 0

    def release(self, request: str) -> None:
        """Close the account: the request is scheduled and its blocks are on the GPU, or it is gone."""
        account = self._accounts.pop(request, None)
        if account is not None:
            self._offered -= len(account.offered)
            self._move_window()

    def _move_window(self) -> None:
        self._window_began = min(
            (account.began for account in self._accounts.values() if account.began is not None), default=None
        )
