# SPDX-License-Identifier: Apache-2.0
"""Tells routers what lies on the volume: BlockStored and BlockRemoved, once for the whole tier.

The janitor alone knows of every block, whoever stored or removed it, so it is the one that tells. What it tells is what
its ledger says: stored minus removed, since the last AllBlocksCleared, is what the ledger holds of the generation that
engines use now. Owned by the keeper's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

import numpy as np

from kvtier_connector.janitor.kv_events import (
    MEDIUM,
    REMOTE,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    encode,
    shown,
)
from kvtier_connector.janitor.ledger import Ledger
from kvtier_connector.store.layout import find_home

BATCH = 512
"""Events of one message."""


class Outlet(Protocol):
    """Where messages go."""

    def send(self, payload: bytes) -> bool:
        """Take a message; say whether it will be published."""
        ...

    def wants_all(self) -> bool:
        """Say, once, whether somebody has missed what was told before."""
        ...


class Feed:
    """The events of one tier."""

    def __init__(
        self,
        outlet: Outlet,
        *,
        tier: str,
        block_tokens: int,
        is_integer: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the settings.

        Args:
            outlet: Where messages go.
            tier: ``<namespace>/<name>``, which each event names as its owner.
            block_tokens: Tokens of a chunk.
            is_integer: Whether hashes are numbers of 64 bits, as vLLM's by default, and not all their bytes.
            clock: Seconds since 1970.
        """
        self._outlet = outlet
        self._tier = tier
        self._block_tokens = block_tokens
        self._is_integer = is_integer
        self._clock = clock
        self._ledger = Ledger()
        self._current = ""
        self._is_whole = False
        """Whether all that the ledger holds was told, but for what is pending."""
        self._stored: dict[int, None] = {}
        """Names of rows that are to be told of, in their order."""
        self._removed: list[BlockRemoved] = []

    def begin(self, ledger: Ledger, current: str) -> None:
        """Tell from now on of this ledger; all that was told before is void."""
        self._ledger, self._current, self._is_whole = ledger, current, False
        ledger.on_new, ledger.on_gone = self._note_new, self._note_gone

    def publish(self, current: str) -> None:
        """Tell what has changed; of another generation, and to whoever missed something, everything."""
        if current != self._current or self._outlet.wants_all():
            self._current, self._is_whole = current, False
        events = self._changes() if self._is_whole else self._everything()
        self._is_whole = True
        while some := tuple(islice(events, BATCH)):
            if not self._outlet.send(encode(some, seconds=self._clock())):
                self._is_whole = False  # the rest would make no sense
                break
        self._stored.clear()
        self._removed.clear()

    def _note_new(self, row: int) -> None:
        """Note a block by its name: rows are renumbered, and names stay."""
        if self._is_whole:
            self._stored[int(self._ledger.rows["name"][row])] = None

    def _note_gone(self, row: int) -> None:
        if not self._is_whole:
            return
        name = int(self._ledger.rows["name"][row])
        if name in self._stored:
            del self._stored[name]  # nobody was told of it
        elif self._is_told(int(self._ledger.rows["generation"][row])):
            self._removed.append(self._removed_event(row))

    def _changes(self) -> Iterator[Event]:
        yield from self._removed
        for name in self._stored:
            row = self._ledger.find_name(name)
            if row >= 0 and self._is_told(int(self._ledger.rows["generation"][row])):
                yield self._stored_event(row)

    def _everything(self) -> Iterator[Event]:
        yield AllBlocksCleared()
        for row in np.flatnonzero(self._ledger.rows["is_alive"]).tolist():
            if self._is_told(int(self._ledger.rows["generation"][row])):
                yield self._stored_event(row)

    def _is_told(self, generation: int) -> bool:
        """Tell whether engines read these blocks: another generation may have other blocks of the same hash."""
        home = find_home(self._ledger.generations[generation])
        return home is not None and home.digest == self._current

    def _owner(self, row: int) -> str:
        """Return whose the block is: the tier, the directory of its weights, and its tenant if it has one."""
        each = self._ledger.rows[row]
        tenant = self._ledger.tenants[int(each["tenant"])]
        return "/".join(filter(None, (self._tier, self._ledger.generations[int(each["generation"])], tenant)))

    def _stored_event(self, row: int) -> BlockStored:
        key, parent = self._ledger.key(row), int(self._ledger.rows["parent"][row])
        before = self._ledger.find_name(parent) if parent else -1
        return BlockStored(
            block_hashes=[self._shown(key.hash)],
            parent_block_hash=self._shown(self._ledger.key(before).hash) if before >= 0 else None,
            token_ids=[],
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            group_idx=key.group,
            locality=REMOTE,
            ownership=self._owner(row),
        )

    def _removed_event(self, row: int) -> BlockRemoved:
        key = self._ledger.key(row)
        return BlockRemoved(
            block_hashes=[self._shown(key.hash)],
            medium=MEDIUM,
            group_idx=key.group,
            locality=REMOTE,
            ownership=self._owner(row),
        )

    def _shown(self, block_hash: bytes) -> BlockHash:
        return shown(block_hash, is_integer=self._is_integer)
