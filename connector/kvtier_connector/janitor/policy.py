# SPDX-License-Identifier: Apache-2.0
"""Decides which blocks to remove: arrays in, row numbers out, the same answer for the same blocks.

Pure. Least recently used first, and the end of a prefix before its beginning: a prefix is never older than what
continues it, so nothing that stays has lost a block before it. Two things go before that: a block beyond its time to
live goes however much continues it, and a pinned block stays however old it is, with all blocks before it.

What the tier may take now, from its settings and from what the file system says; and when to brake the engines.

Pure.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_connector.contract.janitor import JanitorConfig

Ints = NDArray[np.signedinteger[Any]]
Flags = NDArray[np.bool_]


class Reason(enum.Enum):
    """Why a block goes."""

    TTL = "ttl"
    QUOTA = "quota"
    BUDGET = "budget"
    VOLUME = "volume"


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """What is known of each block; all arrays have one length."""

    before: Ints
    """Row of the block before it in its prefix, -1 where that is not among them; see `link`."""
    position: Ints
    size: Ints
    created: Ints
    used: Ints
    tenant: Ints
    age: Ints
    """Of its generation: 0 for the current one, more for those that go earlier."""
    is_pinned: Flags


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the blocks may take."""

    high_bytes: int = 0
    """More than this is over the budget; 0 means no budget."""
    low_bytes: int = 0
    """What is over the budget is brought down to this."""
    other_bytes: int = 0
    """Files that count as well but are no blocks."""
    quotas: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """High and low bytes of tenants that are above."""
    wanted_free_bytes: int = 0
    """What the file system lacks; taken from what is above the floor only."""
    floor_bytes: int = 0
    expire_before: int | None = None
    """Blocks created earlier have outlived their time; nanoseconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rows to remove, in this order, and why each."""

    rows: Ints
    reasons: tuple[Reason, ...]
    """Of the stretches of `rows` that `ends` ends."""
    ends: tuple[int, ...]
    missing_bytes: int
    """What should have been freed and cannot be: pins hold it."""

    def reason(self, index: int) -> Reason:
        """Return why the block at this place of `rows` goes."""
        return next(reason for reason, end in zip(self.reasons, self.ends, strict=True) if index < end)


def link(name: NDArray[np.uint64], parent: NDArray[np.uint64], position: Ints) -> Ints:
    """Return the row of each block's parent, -1 where it is not among them.

    A link to a block that does not stand before it in the prefix makes no sense and is left out, so there is no circle.
    """
    if name.size == 0:
        return np.zeros(0, np.int32)
    # Narrow types, and nothing kept longer than needed: a million blocks are decided on in little memory.
    order = np.argsort(name, kind="stable").astype(np.int32)
    rows = np.searchsorted(name, parent, sorter=order).astype(np.int32)
    np.minimum(rows, name.size - 1, out=rows)
    rows = order[rows]
    del order
    rows[name[rows] != parent] = -1
    rows[(parent == 0) | (position[rows] >= position)] = -1
    return rows


def spread(values: NDArray[Any], parents: Ints, position: Ints) -> NDArray[Any]:
    """Return for each block the largest value among it and all that continues it."""
    spread_values = values.copy()
    linked = np.flatnonzero(parents >= 0).astype(np.int32)
    linked = linked[np.argsort(-position[linked], kind="stable").astype(np.int32)]
    # The blocks of one position at a time, the last first: each has heard of all that continues it by then.
    bounds = np.flatnonzero(np.diff(position[linked])) + 1
    for rows in np.split(linked, bounds):
        np.maximum.at(spread_values, parents[rows], spread_values[rows])
    return spread_values


def choose(blocks: Blocks, limits: Limits) -> Choice:
    """Decide which blocks go."""
    used = spread(blocks.used, blocks.before, blocks.position)
    order = np.lexsort((-blocks.position, used, -blocks.age)).astype(np.int32)
    del used  # a million blocks are decided on in little memory
    if blocks.is_pinned.any():
        order = order[~spread(blocks.is_pinned, blocks.before, blocks.position)[order]]
    picker = _Picker(blocks, order)
    if limits.expire_before is not None:
        picker.take_expired(np.flatnonzero(blocks.created < limits.expire_before))
    missing = 0
    for tenant, (high, low) in sorted(limits.quotas.items()):
        mine = blocks.tenant == tenant
        have = int(blocks.size[mine & ~picker.is_taken].sum())
        if have > high:
            missing += picker.take(have - low, Reason.QUOTA, among=mine)
    have = int(blocks.size[~picker.is_taken].sum()) + limits.other_bytes
    if limits.high_bytes and have > limits.high_bytes:
        missing += picker.take(have - limits.low_bytes, Reason.BUDGET)
    wanted = limits.wanted_free_bytes - int(blocks.size[picker.is_taken].sum())
    above_floor = int(blocks.size[~picker.is_taken].sum()) - limits.floor_bytes
    if wanted > 0 and above_floor > 0:
        picker.take(wanted, Reason.VOLUME, most=above_floor)
    return picker.choice(missing)


class _Picker:
    """Takes blocks from the front of an order, and remembers which are taken."""

    def __init__(self, blocks: Blocks, order: Ints) -> None:
        self._blocks = blocks
        self._order = order
        self.is_taken: Flags = np.zeros(blocks.size.size, np.bool_)
        self._rows: list[Ints] = []
        self._reasons: list[Reason] = []

    def take_expired(self, rows: Ints) -> None:
        self._take(rows[np.argsort(-self._blocks.position[rows], kind="stable")], Reason.TTL)

    def take(self, wanted: int, reason: Reason, *, among: Flags | None = None, most: int | None = None) -> int:
        """Take just as many blocks as have `wanted` bytes, never more than `most`; return what is missing."""
        rows = self._order[~self.is_taken[self._order]] if self._rows else self._order
        if among is not None:
            rows = rows[among[rows]]
        sums = np.cumsum(self._blocks.size[rows])
        count = int(np.searchsorted(sums, wanted)) + 1
        if most is not None:
            count = min(count, int(np.searchsorted(sums, most, side="right")))
        self._take(rows[:count], reason)
        return max(0, wanted - int(sums[-1])) if rows.size else wanted

    def choice(self, missing: int) -> Choice:
        rows = np.concatenate(self._rows) if self._rows else np.zeros(0, np.int64)
        ends = tuple(np.cumsum([each.size for each in self._rows]).tolist())
        return Choice(rows=rows, reasons=tuple(self._reasons), ends=ends, missing_bytes=missing)

    def _take(self, rows: Ints, reason: Reason) -> None:
        if rows.size:
            self.is_taken[rows] = True
            self._rows.append(rows.astype(np.int64))
            self._reasons.append(reason)


_MOST_BYTES = 1 << 59
"""A file system that claims more than half an exbibyte hides its quota, as Amazon EFS does."""
_FREE_MORE = 1.25
"""Once too little is free, so much more than what is wanted is made free, so that it does not begin again at once."""
_CRITICAL = 0.5
"""Share of what shall stay free below which engines are to stop storing: eviction alone does not keep up."""


_MOST_QUOTAS = 256
"""Tenants that are brought down to their quotas in one decision: each takes a look at all blocks. The next ones follow
in the next."""


class Space(NamedTuple):
    """What the file system says of itself."""

    total_bytes: int = 0
    """0 where it does not say, or says what cannot be."""
    free_bytes: int = 0

    @property
    def is_known(self) -> bool:
        """Whether there is anything to go by."""
        return self.total_bytes > 0


def make_space(total_bytes: int, free_bytes: int) -> Space:
    """Return what is to be believed of a file system's answer."""
    return Space(total_bytes, max(0, free_bytes)) if 0 < total_bytes < _MOST_BYTES else Space()


def min_free_bytes(config: JanitorConfig, space: Space) -> int:
    """Return what shall stay free of the file system; 0 where it does not say how large it is."""
    if not space.is_known:
        return 0
    wanted = max(config.min_free_bytes, int(config.min_free_fraction * space.total_bytes))
    return min(wanted, space.total_bytes)


def make_limits(  # noqa: PLR0913 - keywords
    config: JanitorConfig,
    space: Space,
    *,
    tenants: Sequence[str],
    used: Mapping[int, int],
    other_bytes: int,
    now_ns: int,
) -> Limits:
    """Return the limits of one decision.

    Args:
        config: The settings.
        space: Of the file system.
        tenants: Names by number.
        used: Bytes by tenant.
        other_bytes: Of files that are no blocks but count against the budget.
        now_ns: Nanoseconds since 1970.
    """
    over: dict[int, tuple[int, int]] = {}
    for number, have in used.items():
        quota = config.quotas.get(tenants[number], config.default_quota_bytes if tenants[number] else 0)
        if quota and have > int(quota * config.high_watermark):
            over[number] = (int(quota * config.high_watermark), int(quota * config.low_watermark))
    quotas = {number: over[number] for number in heapq.nlargest(_MOST_QUOTAS, over, key=used.__getitem__)}
    wanted = min_free_bytes(config, space)
    lacks = wanted > space.free_bytes
    return Limits(
        high_bytes=int(config.max_bytes * config.high_watermark),
        low_bytes=int(config.max_bytes * config.low_watermark),
        other_bytes=other_bytes,
        quotas=quotas,
        wanted_free_bytes=int(wanted * _FREE_MORE) - space.free_bytes if lacks else 0,
        floor_bytes=config.min_bytes,
        expire_before=None if config.ttl_seconds is None else now_ns - int(config.ttl_seconds * 1e9),
    )


def is_due(limits: Limits, *, used: Mapping[int, int], oldest_ns: int | None) -> bool:
    """Say whether anything has to go, from sums alone; the policy says what."""
    total = sum(used.values())
    if limits.high_bytes and total + limits.other_bytes > limits.high_bytes:
        return True
    if any(used.get(tenant, 0) > high for tenant, (high, _) in limits.quotas.items()):
        return True
    if limits.wanted_free_bytes > 0 and total > limits.floor_bytes:
        return True
    return limits.expire_before is not None and oldest_ns is not None and oldest_ns < limits.expire_before


def brake_reason(config: JanitorConfig, space: Space, *, used_bytes: int, is_braking: bool, is_full: bool) -> str:
    """Return why engines should stop storing, empty if they need not.

    Args:
        config: The settings.
        space: Of the file system.
        used_bytes: All that counts against the budget.
        is_braking: Whether they were asked already: then it takes more room for them to be let go again.
        is_full: Whether the volume refused a write of the janitor for want of room.
    """
    if is_full:
        return "the volume has no room left"
    share = config.high_watermark if is_braking else 1.0
    if config.max_bytes and used_bytes > config.max_bytes * share:
        return f"blocks take {used_bytes} bytes, which is more than {share:.0%} of max_bytes={config.max_bytes}"
    wanted = int(min_free_bytes(config, space) * (1.0 if is_braking else _CRITICAL))
    if space.is_known and space.free_bytes < wanted:
        return f"the volume has {space.free_bytes} bytes free, which is less than {wanted}"
    return ""
