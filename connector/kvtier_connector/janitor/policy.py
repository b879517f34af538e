# SPDX-License-Identifier: Apache-2.0
"""Decides how much a tier may hold, and which blocks to remove.

Pure: arrays and settings in, row numbers out. The order is least recently used first, and the end of a prefix before
its beginning: a prefix is never older than its continuations, so a block that stays keeps all blocks before it. Only
the time to live breaks this order: an expired block goes, whatever continues it.
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

UNBELIEVABLE_BYTES = 1 << 59
"""A file system that claims more than half an exbibyte hides its quota, as Amazon EFS does."""
_FREE_MORE = 1.25
"""Once too little is free, this multiple of the wanted free bytes is made free, so that evictions are rare."""
_PORTION = 4
"""By default one decision frees this fraction of the lacking bytes: other users of the volume may free some, too."""
_CRITICAL_SHARE = 0.5
"""Share of the wanted free bytes below which engines must stop storing: eviction alone does not keep up."""
_MOST_QUOTAS = 256
"""Tenants brought down to their quotas in one decision: each costs a pass over all blocks."""


class EvictionReason(enum.Enum):
    """Why a block is removed."""

    TTL = "ttl"
    QUOTA = "quota"
    BUDGET = "budget"
    VOLUME = "volume"


class Space(NamedTuple):
    """Size and free bytes of the file system; both 0 where it does not tell, or tells an impossible size."""

    total_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockColumns:
    """Properties of all blocks, one array each, all of the same length."""

    before: Ints
    """Row of the preceding block of the prefix, -1 where it is not among these; see `link`."""
    position: Ints
    size: Ints
    created: Ints
    used: Ints
    tenant: Ints
    age: Ints
    """Of the generation: 0 for the current one; higher numbers are evicted earlier. Below 0 for a block that the volume
    lately refused to remove: it goes last, and counts as if it stays."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds for one decision."""

    high_bytes: int = 0
    """Eviction begins above this; 0 means no budget."""
    low_bytes: int = 0
    """Eviction ends at this."""
    other_bytes: int = 0
    """Bytes of files that count against the budget and are no blocks."""
    quotas: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """High and low bytes of the tenants above their high mark."""
    wanted_free_bytes: int = 0
    """Bytes that the file system lacks; only blocks above the floor are removed for them."""
    floor_bytes: int = 0
    portion: int = _PORTION
    """One decision frees this fraction of these bytes."""
    expire_before: int | None = None
    """Blocks created earlier have expired; nanoseconds since 1970."""


Choice = list[tuple[EvictionReason, Ints]]
"""Rows to remove, in this order, by reason."""


def quota_of(config: JanitorConfig, tenant: str) -> int:
    """Return the quota of a tenant in bytes; 0 means no limit. Blocks without a tenant have no quota."""
    return config.quotas.get(tenant, config.default_quota_bytes if tenant else 0)


def make_limits(  # noqa: PLR0913 - keywords
    config: JanitorConfig,
    space: Space,
    *,
    tenants: Sequence[str],
    used: Mapping[int, int],
    other_bytes: int,
    now_ns: int,
) -> Limits:
    """Return the limits of one decision; `tenants` are names by number, `used` bytes likewise."""
    above: dict[int, tuple[int, int]] = {}
    for number, have in used.items():
        quota = quota_of(config, tenants[number])
        if quota and have > int(quota * config.high_watermark):
            above[number] = (int(quota * config.high_watermark), int(quota * config.low_watermark))
    wanted = _min_free_bytes(config, space)
    return Limits(
        high_bytes=int(config.max_bytes * config.high_watermark),
        low_bytes=int(config.max_bytes * config.low_watermark),
        other_bytes=other_bytes,
        quotas={number: above[number] for number in heapq.nlargest(_MOST_QUOTAS, above, key=used.__getitem__)},
        wanted_free_bytes=int(wanted * _FREE_MORE) - space.free_bytes if wanted > space.free_bytes else 0,
        floor_bytes=config.min_bytes,
        expire_before=None if config.ttl_seconds is None else now_ns - int(config.ttl_seconds * 1e9),
    )


def is_due(limits: Limits, *, used_bytes: int, oldest_ns: int | None) -> bool:
    """Return whether anything may have to go, judged by sums alone."""
    if limits.quotas or (limits.high_bytes and used_bytes + limits.other_bytes > limits.high_bytes):
        return True
    if limits.wanted_free_bytes > 0 and used_bytes > limits.floor_bytes:
        return True
    return limits.expire_before is not None and oldest_ns is not None and oldest_ns < limits.expire_before


def _min_free_bytes(config: JanitorConfig, space: Space) -> int:
    """Return how much of the file system must stay free; 0 where its size is not known."""
    return min(max(config.min_free_bytes, int(config.min_free_fraction * space.total_bytes)), space.total_bytes)


class Room(NamedTuple):
    """How much engines may still write."""

    bytes: int | None
    """None means no limit; 0 or less means that engines must stop."""
    reason: str = ""
    """Why they must stop, for people; empty while they may write."""


def make_room(config: JanitorConfig, space: Space, *, used_bytes: int, is_paused: bool, is_full: bool) -> Room:
    """Return how much the engines of the tier may still write.

    Engines that are paused resume only at the high mark, or with all free bytes there. The volume `is_full` if it
    lately refused a write of the janitor for want of room.
    """
    if is_full:
        return Room(0, "the volume has no room left")
    share = config.high_watermark if is_paused else 1.0
    if config.max_bytes and used_bytes > config.max_bytes * share:
        return Room(0, f"blocks take more than {share:.0%} of max_bytes={config.max_bytes}")
    wanted = int(_min_free_bytes(config, space) * (1.0 if is_paused else _CRITICAL_SHARE))
    if space.free_bytes < wanted:
        return Room(0, f"the volume has less than {wanted} bytes free")
    rooms = [config.max_bytes - used_bytes] if config.max_bytes else []
    rooms += [space.free_bytes - wanted] if wanted else []
    return Room(min(rooms, default=None))


def link(name: NDArray[np.uint64], parent: NDArray[np.uint64], position: Ints) -> Ints:
    """Return the row of each block's parent, -1 where it is not among them.

    A parent that does not precede its block in the prefix is left out, so there is no circle.
    """
    # Narrow types, and no array kept longer than needed: a million blocks must fit into little memory.
    order = np.argsort(name, kind="stable").astype(np.int32)
    rows = np.searchsorted(name, parent, sorter=order).astype(np.int32)
    np.minimum(rows, name.size - 1, out=rows)
    rows = order[rows]
    del order
    rows[name[rows] != parent] = -1
    rows[(parent == 0) | (position[rows] >= position)] = -1
    return rows


def spread(values: NDArray[Any], parents: Ints, position: Ints) -> NDArray[Any]:
    """Return for each block the largest value among it and all its continuations."""
    spread_values = values.copy()
    linked = np.flatnonzero(parents >= 0).astype(np.int32)
    linked = linked[np.argsort(-position[linked], kind="stable").astype(np.int32)]
    # All blocks of one position at a time, the last position first, so that values travel the whole prefix.
    bounds = np.flatnonzero(np.diff(position[linked])) + 1
    for rows in np.split(linked, bounds):
        np.maximum.at(spread_values, parents[rows], spread_values[rows])
    return spread_values


def choose(blocks: BlockColumns, limits: Limits) -> Choice:
    """Decide which blocks are removed."""
    used = spread(blocks.used, blocks.before, blocks.position)
    order = np.lexsort((-blocks.position, used, -blocks.age)).astype(np.int32)
    del used
    picker, stays = _Picker(blocks, order), blocks.age < 0
    if limits.expire_before is not None:
        expired = np.flatnonzero(blocks.created < limits.expire_before)
        picker.take_rows(expired[np.argsort(-blocks.position[expired], kind="stable")], EvictionReason.TTL)
    for tenant, (high, low) in sorted(limits.quotas.items()):
        mine = blocks.tenant == tenant
        have = int(blocks.size[mine & (stays | ~picker.is_taken)].sum())
        if have > high:
            picker.take(have - low, EvictionReason.QUOTA, among=mine)
    have = int(blocks.size[stays | ~picker.is_taken].sum()) + limits.other_bytes
    if limits.high_bytes and have > limits.high_bytes:
        picker.take(have - limits.low_bytes, EvictionReason.BUDGET)
    wanted = limits.wanted_free_bytes - int(blocks.size[picker.is_taken & ~stays].sum())
    above_floor = int(blocks.size[~picker.is_taken].sum()) - limits.floor_bytes
    if wanted > 0 and above_floor > 0:
        picker.take(-(-wanted // limits.portion), EvictionReason.VOLUME, most=above_floor)
    return picker.choice


class _Picker:
    """Takes blocks from the front of an order, and remembers the taken ones."""

    def __init__(self, blocks: BlockColumns, order: Ints) -> None:
        self._blocks = blocks
        self._order = order
        self.is_taken: Flags = np.zeros(blocks.size.size, np.bool_)
        self.choice: Choice = []

    def take(self, wanted: int, reason: EvictionReason, *, among: Flags | None = None, most: int | None = None) -> None:
        """Take the first blocks that have `wanted` bytes together, never more than `most`."""
        rows = self._order[~self.is_taken[self._order]] if self.choice else self._order
        if among is not None:
            rows = rows[among[rows]]
        sums = np.cumsum(self._blocks.size[rows])
        count = int(np.searchsorted(sums, wanted)) + 1
        if most is not None:
            count = min(count, int(np.searchsorted(sums, most, side="right")))
        self.take_rows(rows[:count], reason)

    def take_rows(self, rows: Ints, reason: EvictionReason) -> None:
        if rows.size:
            self.is_taken[rows] = True
            self.choice.append((reason, rows))
