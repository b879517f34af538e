# SPDX-License-Identifier: Apache-2.0
"""Carries out what the policy chose, batch by batch: whatever was used since then is spared, with all before it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from kvtier_connector.janitor.ledger import Ledger
from kvtier_connector.janitor.news import News
from kvtier_connector.janitor.policy import Choice, Reason
from kvtier_connector.janitor.removal import Fate, Victim, remove_victims
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import block_path

BATCH = 1024
"""Files between two looks into the journals."""


class Eviction:
    """One decision that is being carried out. Owned by the ledger's thread, which compacts nothing meanwhile."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        choice: Choice,
        *,
        ledger: Ledger,
        news: News,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the decision."""
        self._choice = choice
        self._ledger = ledger
        self._news = news
        self._fs = fs
        self._tier_dir = tier_dir
        self._pool = pool
        self._clock = clock
        self._next = 0
        self._spared: set[int] = set()
        ledger.touched.clear()
        self.removed: Counter[Reason] = Counter()
        self.freed_bytes: Counter[Reason] = Counter()
        self.spared = 0

    @property
    def is_done(self) -> bool:
        """Whether every victim was dealt with."""
        return self._next >= self._choice.rows.size

    @property
    def share(self) -> float:
        """How many of the victims were dealt with, from 0 to 1."""
        return self._next / max(1, self._choice.rows.size)

    def step(self, is_told: Callable[[str], bool]) -> None:
        """Remove the next batch; read the journals first.

        Args:
            is_told: Whether engines of a generation are to be told; in one that nobody uses nothing is written.

        Raises:
            OSError: the volume refuses to remove anything.
        """
        self._spare(self._ledger.touched)
        self._ledger.touched.clear()
        reason = self._choice.reason(self._next)
        end = min(self._next + BATCH, next(each for each in self._choice.ends if each > self._next))
        rows = [int(row) for row in self._choice.rows[self._next : end]]
        self._next = end
        victims = [self._victim(row) for row in rows if self._may_go(row, reason)]
        try:
            fates = remove_victims(self._pool, self._fs, self._chains(victims))
        except OSError:
            self._spare(victim.row for victim in victims)
            raise
        # Refused, or before one that was written anew.
        kept = {victim.row for victim in victims} - {fate.row for fate in fates}
        self._spare([*kept, *(fate.row for fate in fates if fate.rewritten_ns)])
        for fate in fates:
            self._note(fate, reason, is_told)

    def _may_go(self, row: int, reason: Reason) -> bool:
        if not self._ledger.rows["is_alive"][row]:
            return False
        # Time to live is a promise: it holds for what is in use, too.
        is_spared = reason is not Reason.TTL and row in self._spared
        self.spared += is_spared
        return not is_spared

    def _victim(self, row: int) -> Victim:
        each = self._ledger.rows[row]
        digest = self._ledger.generations[int(each["generation"])]
        path = f"{self._tier_dir}/{digest}/{block_path(self._ledger.key(row))}"
        return Victim(row, path, int(each["created"]), self._clock())

    def _chains(self, victims: list[Victim]) -> list[list[Victim]]:
        """Put those together that continue one another, in the order of the decision: the end of a prefix first."""
        chains: list[list[Victim]] = []
        chain_of: dict[int, int] = {}
        for victim in reversed(victims):
            parent = int(self._ledger.rows["parent"][victim.row])
            chain = chain_of.get(self._ledger.find_name(parent)) if parent else None
            if chain is None:
                chain = len(chains)
                chains.append([])
            chain_of[victim.row] = chain
            chains[chain].append(victim)
        # The least recently used prefix first, too.
        return [chain[::-1] for chain in reversed(chains)]

    def _note(self, fate: Fate, reason: Reason, is_told: Callable[[str], bool]) -> None:
        each = self._ledger.rows[fate.row]
        if fate.rewritten_ns:
            each["created"] = fate.rewritten_ns
            self.spared += 1
            return
        digest = self._ledger.generations[int(each["generation"])]
        key = self._ledger.key(fate.row)
        self._ledger.forget([fate.row])
        if fate.freed_bytes:
            self.removed[reason] += 1
            self.freed_bytes[reason] += fate.freed_bytes
        if is_told(digest):
            self._news.tell_gone(digest, key, max(0, fate.freed_bytes - HEADER_BYTES))

    def _spare(self, rows: Iterable[int]) -> None:
        """Let these blocks stay, and all blocks before them."""
        for row in rows:
            while row >= 0 and row not in self._spared:
                self._spared.add(row)
                parent = int(self._ledger.rows["parent"][row])
                row = self._ledger.find_name(parent) if parent else -1  # noqa: PLW2901 - up the prefix
