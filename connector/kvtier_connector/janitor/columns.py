# SPDX-License-Identifier: Apache-2.0
"""Hands the ledger to the policy: the living rows as arrays, and back from their places there to rows.

Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier_connector.janitor.ledger import Ledger, Rows
from kvtier_connector.janitor.policy import Blocks, Flags, Ints, link
from kvtier_connector.store.layout import BLOCKS, MAX_HASH_BYTES, TENANTS, tenant_directory, tenant_of

_NEARLY_ALL = 0.9
_DIGITS = re.compile("[0-9a-f]{0,3}")
"""Of directories of blocks; no block is in others, which anybody may have made."""


def make_blocks(
    ledger: Ledger, *, order: Sequence[str], pins: Collection[bytes], is_aging: bool = True
) -> tuple[Blocks, Ints]:
    """Return the blocks, and the row of each.

    Args:
        ledger: All blocks.
        order: Generations, the one that goes last first; those that are not named go before all others.
        pins: Hashes that people want to keep.
        is_aging: Whether it matters when blocks were created.

    Blocks that are not confirmed take no room, have no age, and stay with all blocks before them.
    """
    rows = np.flatnonzero(ledger.rows["is_alive"]).astype(np.int32)
    living = ledger.rows

    def column(name: str, kind: type) -> NDArray[np.int64]:
        taken: NDArray[np.int64] = living[name][rows].astype(kind, copy=False)
        return taken

    ages = np.full(max(1, len(ledger.generations)), len(order), np.int32)
    age_of = {digest: age for age, digest in enumerate(order)}
    for number, digest in enumerate(ledger.generations):
        ages[number] = age_of.get(digest, len(order))
    # Narrow types, and names that are gone before the other columns come: a million blocks are decided on in little
    # memory.
    position = column("position", np.int32)
    before = link(living["name"][rows], living["parent"][rows], position)
    used = column("used", np.int64)
    is_unconfirmed = ~living["is_confirmed"][rows]
    size = column("size", np.int64)
    size[is_unconfirmed] = 0
    created = used
    if is_aging:
        created = column("created", np.int64)
        created[is_unconfirmed] = np.iinfo(np.int64).max
    blocks = Blocks(
        before=before,
        position=position,
        size=size,
        created=created,
        used=used,
        tenant=column("tenant", np.int32),
        age=ages[living["generation"][rows]],
        is_pinned=_pinned(living, rows, pins) | is_unconfirmed,
    )
    return blocks, rows


def used_by_tenant(ledger: Ledger) -> dict[int, int]:
    """Return the bytes of each tenant that has any."""
    used: Counter[int] = Counter()
    for (_, tenant), each in ledger.sums().items():
        used[tenant] += each.bytes
    return dict(used)


def expire_most(ledger: Ledger, before_ns: int) -> bool:
    """Say whether nearly all blocks were created before that."""
    rows = ledger.rows
    expired = int(np.count_nonzero(rows["is_alive"] & (rows["created"] < before_ns)))
    return expired > _NEARLY_ALL * ledger.total.blocks


def rows_below(ledger: Ledger, generation: int, paths: Collection[str]) -> Ints:
    """Return the rows of the blocks that lie below directories: of tenants, of all blocks, or of some.

    Args:
        ledger: All blocks.
        generation: As a number of the ledger.
        paths: Relative to the generation's root.
    """
    living = ledger.rows
    rows = np.flatnonzero(living["is_alive"] & (living["generation"] == generation))
    if not rows.size:
        return rows
    tenants = living["tenant"][rows]
    # The three hexadecimal digits that name a block's directory.
    digits = living["hash"][rows].view(np.uint8).reshape(-1, MAX_HASH_BYTES)[:, :2].astype(np.uint32)
    begins = (digits[:, 0] << 4 | digits[:, 1] >> 4).astype(np.uint32)
    is_below = np.zeros(rows.size, np.bool_)
    wanted: dict[tuple[int, int], set[int]] = {}
    for path in paths:
        if path == TENANTS:
            is_below |= tenants != ledger.tenant_number("")
            continue
        tenant = tenant_of(f"{path}/")
        name = path.removeprefix(f"{tenant_directory(tenant)}{BLOCKS}").replace("/", "")
        if _DIGITS.fullmatch(name) is not None:
            wanted.setdefault((ledger.tenant_number(tenant), len(name)), set()).add(int(name or "0", 16))
    for (tenant_number, length), names in wanted.items():
        is_named = np.isin(begins >> (12 - 4 * length), np.fromiter(names, np.uint32))
        is_below |= (tenants == tenant_number) & is_named
    return rows[is_below]


class Extremes:
    """The oldest block and the last use of each generation; that takes a look at every row, so now and then."""

    def __init__(self, ledger: Ledger, *, now: Callable[[], float], seconds: float = 60.0) -> None:
        """Store the settings; `seconds` is the least time between two looks."""
        self._ledger = ledger
        self._now = now
        self._seconds = seconds
        self._next_at = now()
        self._changes = -1
        self.oldest_ns: int | None = None
        """When the oldest block was created; None without blocks."""
        self.last_used_ns: dict[int, int] = {}
        """By generation, as a number of the ledger."""

    def forget(self) -> None:
        """Look again at the next refresh."""
        self._changes = -1
        self._next_at = self._now()

    def refresh(self) -> None:
        """Look, if anything changed and it is time to."""
        if self._changes == self._ledger.changes or self._now() < self._next_at:
            return
        self._changes, self._next_at = self._ledger.changes, self._now() + self._seconds
        rows = self._ledger.rows
        # Column by column: all columns of the living would be as much memory as the ledger.
        alive = np.flatnonzero(rows["is_alive"]).astype(np.int32)
        self.oldest_ns = int(rows["created"][alive].min()) if alive.size else None
        latest = np.zeros(max(1, len(self._ledger.generations)), np.int64)
        np.maximum.at(latest, rows["generation"][alive], rows["used"][alive])
        self.last_used_ns = {number: int(used) for number, used in enumerate(latest) if used}


def _pinned(living: Rows, rows: Ints, pins: Collection[bytes]) -> Flags:
    is_pinned = np.zeros(rows.size, np.bool_)
    if not pins or not rows.size:
        return is_pinned
    begins = np.array([int.from_bytes(pin[:8], "little") for pin in pins], np.uint64)
    hashes = living["hash"][rows].view("<u8")[:: MAX_HASH_BYTES // 8]
    for at in np.flatnonzero(np.isin(hashes, begins)).tolist():
        each = living[int(rows[at])]
        is_pinned[at] = each["hash"].tobytes()[: int(each["hash_bytes"])] in pins
    return is_pinned
