# SPDX-License-Identifier: Apache-2.0
"""Every block of every generation of one tier, as rows of one array: 96 bytes a block, whatever the volume holds.

Pure memory, fed by journals and walks. A journal can be wrong, so a row is confirmed only once its file was looked at;
rows that are not confirmed are never a reason to remove anything. A ledger belongs to one thread.

Hands the ledger to the policy: the living rows as arrays, and back from their places there to rows.

Pure.

Keeps the ledger over a restart: one file beside the generations, so that a new janitor need not open every block.

The file is a hint like every index: it is believed only if it is whole, and the journals since then and the next walk
correct it. It is written aside and renamed, so a crash leaves the old one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.janitor.pins import check_name, parse_hash
from kvtier_connector.janitor.policy import Blocks, Flags, Ints, link
from kvtier_connector.store.fs import READ_FLAGS, FileSystem, replacing, write_all
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.journal import MAX_PAYLOAD_BYTES, Op, Record
from kvtier_connector.store.layout import (
    BLOCKS,
    MAX_HASH_BYTES,
    MAX_POSITION,
    MIN_HASH_BYTES,
    NO_LINEAGE,
    TENANTS,
    BlockKey,
    Lineage,
    tenant_directory,
    tenant_of,
)

ROW = np.dtype(
    [
        ("name", "<u8"),  # 64 bits of hash, group, tenant's name and generation; 0 is nobody's
        ("parent", "<u8"),  # name of the block before it in its prefix; 0 where there is none
        ("size", "<i8"),  # bytes of the file
        ("created", "<i8"),  # when the file was written: nanoseconds since 1970, by the volume's clock once confirmed
        ("used", "<i8"),  # likewise; of the last use
        ("position", "<u4"),
        ("group", "<u4"),
        ("hash", f"V{MAX_HASH_BYTES}"),
        ("tenant", "<u4"),
        ("generation", "<u2"),
        ("hash_bytes", "u1"),
        ("epoch", "u1"),  # the walk that saw it last
        ("is_alive", "?"),
        ("is_confirmed", "?"),  # size and time were read from the file, and no journal tells of the block since
        ("", "V6"),  # the numbers of the next row lie as these do
    ]
)
"""One block. Two of a million blocks have one name once in 4 * 10^7 times; one of them is then not counted."""

_MOST_NEW = 1 << 16
"""Rows that are found through a dict, before the sorted names are made anew."""
_MOST_GONE = 1 << 16
"""So many removals are remembered, and up to twice as many: a record of such a block may be older than its removal."""
_EPOCHS = 250
_MOST_GENERATIONS = 1 << 16  # each update of the weights of an engine makes one
_MOST_SALTS = 1 << 14
"""Clients may name as many tenants as they like; those that are in use are soon there again."""
_NAME_BITS = (1 << 64) - 1

Rows = NDArray[Any]


class Sum(NamedTuple):
    """Some blocks together."""

    blocks: int = 0
    bytes: int = 0

    def plus(self, other: Sum) -> Sum:
        """Return both together."""
        return Sum(self.blocks + other.blocks, self.bytes + other.bytes)

    def minus(self, other: Sum) -> Sum:
        """Return what is left without the other."""
        return Sum(self.blocks - other.blocks, self.bytes - other.bytes)


def sum_of(sums: Iterable[Sum]) -> Sum:
    """Return all of them together."""
    return functools.reduce(Sum.plus, sums, Sum())


class Ledger:
    """Rows are appended and die in place; `compact` closes the gaps and renumbers, so call it between two decisions."""

    def __init__(self) -> None:
        """Start with no block."""
        self.generations: list[str] = []
        """Digests; a row's generation is an index into them. Empty where one was dropped: the next takes its place."""
        self.tenants: list[str] = [""]
        """Names; a row's tenant is an index into them, until the rows are renumbered."""
        self._tenant_numbers = {"": 0}
        self.epoch = 0
        self.changes = 0
        """Grows with every change that is worth keeping over a restart."""
        self.on_new: Callable[[int], None] = lambda _row: None
        self.on_gone: Callable[[int], None] = lambda _row: None
        """Called while the row still says what it was."""
        self.touched: list[int] = []
        """Rows that somebody used or continued since it was last cleared."""
        self.unconfirmed = Sum()
        """Blocks that are known from journals only."""
        self.has_suspects = False
        """Whether some of those may be no blocks any more: look at them soon."""
        self.damaged = 0
        """Records that could not be applied."""
        self._largest: dict[int, int] = {}
        """Bytes of the largest confirmed file, by generation."""
        self._rows: Rows = np.zeros(1024, ROW)
        self._count = 0
        self._dead = 0
        self._names: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._places: NDArray[np.int32] = np.zeros(0, np.int32)
        self._new: dict[int, int] = {}
        self._gone: set[int] = set()
        self._gone_earlier: set[int] = set()
        self._salts: dict[tuple[int, str, int], int] = {}
        self._sums: dict[tuple[int, int], Sum] = {}

    @property
    def rows(self) -> Rows:
        """All rows, the dead ones too; a view that the next change may invalidate."""
        return self._rows[: self._count]

    @property
    def total(self) -> Sum:
        """All blocks together."""
        return sum_of(self._sums.values())

    def sums(self) -> Mapping[tuple[int, int], Sum]:
        """Return the blocks by generation and tenant, as numbers of this ledger."""
        return dict(self._sums)

    def generation(self, digest: str) -> int:
        """Return the number of a generation, a new one if need be; raise OverflowError where there are too many."""
        if digest in self.generations:
            return self.generations.index(digest)
        if "" in self.generations:
            number = self.generations.index("")
            self.generations[number] = digest
            return number
        if len(self.generations) == _MOST_GENERATIONS:
            raise OverflowError(f"{_MOST_GENERATIONS} generations on one volume: remove those that nobody needs")
        self.generations.append(digest)
        return len(self.generations) - 1

    def tenant_number(self, name: str) -> int:
        """Return the number of a tenant, -1 if it has none, since it has no blocks."""
        return self._tenant_numbers.get(name, -1)

    def find(self, generation: int, key: BlockKey) -> int:
        """Return the row of a block, -1 if it is not known."""
        return self.find_name(self._name(generation, key, key.hash))

    def find_name(self, name: int) -> int:
        """Return the row that has the name, -1 if none has."""
        row = self._new.get(name, -1)
        if row < 0 and self._names.size:
            at = int(np.searchsorted(self._names, np.uint64(name)))
            if at < self._names.size and int(self._names[at]) == name:
                row = int(self._places[at])
        return row if row >= 0 and self._rows["is_alive"][row] and int(self._rows["name"][row]) == name else -1

    def key(self, row: int) -> BlockKey:
        """Return the key of a row's block."""
        each = self._rows[row]
        return BlockKey(
            each["hash"].tobytes()[: int(each["hash_bytes"])], int(each["group"]), self.tenants[int(each["tenant"])]
        )

    def apply(self, generation: int, records: Iterable[Record]) -> list[Record]:
        """Learn what engines did; return the uses of unknown blocks, and the unknown blocks that new ones continue.

        A record is a hint: its block is not confirmed. Times of two hosts do not say which of two events came first, so
        a removal, and a record of a block that was removed lately, set `has_suspects`. Records that cannot be applied
        are counted in `damaged`.
        """
        doubtful: list[Record] = []
        for record in records:
            try:
                doubtful += self._apply(generation, record)
            except (ArithmeticError, LookupError, TypeError, ValueError):
                self.damaged += 1
        return doubtful

    def _apply(self, generation: int, record: Record) -> list[Record]:
        name = self._name(generation, record.key, record.key.hash)
        row = self.find_name(name)
        if record.op == Op.GONE:
            if row >= 0:
                self._set_confirmed(row, is_confirmed=False)
                self.has_suspects = True
        elif record.op == Op.STORED:
            self.has_suspects |= name in self._gone or name in self._gone_earlier
            self._store(name, row, generation, record)
            before = record.lineage.parent
            if before and self.find_name(self._name(generation, record.key, before)) < 0:
                # To go on from a block is no use of it.
                return [Record(Op.USED, record.key._replace(hash=before), 0, 0)]
        elif record.op in {Op.USED, Op.RETAINED}:
            if row < 0:
                return [record]
            # What is retained counts as used last when its time is over.
            self.use(row, record.time_ns)
        return []

    def add(  # noqa: PLR0913 - keywords
        self,
        generation: int,
        key: BlockKey,
        *,
        size: int,
        created_ns: int,
        used_ns: int,
        lineage: Lineage = NO_LINEAGE,
    ) -> int:
        """Note a block whose file was looked at; return its row."""
        name = self._name(generation, key, key.hash)
        row = self.find_name(name)
        if row < 0:
            row = self._append(name, generation, key, size)
        self.confirm(row, size=size, created_ns=created_ns)
        each = self._rows[row]
        each["used"] = max(int(each["used"]), used_ns)
        each["position"] = lineage.position
        each["parent"] = self._name(generation, key, lineage.parent) if lineage.parent else 0
        each["epoch"] = self.epoch
        self.changes += 1
        return row

    def confirm(self, row: int, *, size: int, created_ns: int) -> None:
        """Note what the file of a block says: its bytes, and when it was written by the volume's clock."""
        each = self._rows[row]
        self._set_confirmed(row, is_confirmed=False)
        self._resize(row, size)
        self._set_confirmed(row, is_confirmed=True)
        each["created"] = created_ns
        each["used"] = max(int(each["used"]), created_ns)
        generation = int(each["generation"])
        self._largest[generation] = max(self._largest.get(generation, 0), size)
        self.changes += 1

    def is_confirmed(self, row: int) -> bool:
        """Whether the file of this row was looked at; False for -1."""
        return row >= 0 and bool(self._rows["is_confirmed"][row])

    def unconfirmed_names(self) -> NDArray[np.uint64]:
        """Return the names of the blocks that are known from journals only."""
        names: NDArray[np.uint64] = self.rows["name"][self.rows["is_alive"] & ~self.rows["is_confirmed"]]
        return names

    def unconfirm_all(self) -> None:
        """Have every block looked at again."""
        self.rows["is_confirmed"] = False
        self.unconfirmed = self.total

    def use(self, row: int, time_ns: int) -> None:
        """Note that somebody used the block."""
        used = self._rows["used"]
        if time_ns > int(used[row]):
            used[row] = time_ns
        self.touched.append(row)
        self.changes += 1

    def see(self, rows: int | NDArray[np.signedinteger[Any]]) -> None:
        """Note that the walk found the blocks."""
        self._rows["epoch"][rows] = self.epoch

    def forget(self, rows: Iterable[int]) -> None:
        """Note that blocks are not on the volume; what a journal tells of them now may be older than that."""
        for row in rows:
            each = self._rows[row]
            if not each["is_alive"]:
                continue
            self.on_gone(row)
            if not each["is_confirmed"]:
                self.unconfirmed = self.unconfirmed.minus(Sum(1, int(each["size"])))
            each["is_alive"] = False
            self._dead += 1
            self.changes += 1
            self._count_in(int(each["generation"]), int(each["tenant"]), -1, -int(each["size"]))
            self._new.pop(int(each["name"]), None)
            self._gone.add(int(each["name"]))
            if len(self._gone) >= _MOST_GONE:
                self._gone, self._gone_earlier = set(), self._gone

    def begin_walk(self) -> None:
        """Begin to see every block that a walk finds."""
        self.epoch = (self.epoch + 1) % _EPOCHS

    def end_walk(self) -> int:
        """Forget the blocks that the walk did not find and no journal told of since it began; return their number."""
        rows = self.rows
        lost = np.flatnonzero(rows["is_alive"] & (rows["epoch"] != self.epoch))
        self.forget(lost.tolist())
        return int(lost.size)

    def drop_generation(self, generation: int) -> None:
        """Forget all blocks of a generation, and the generation."""
        rows = self.rows
        self.forget(np.flatnonzero(rows["is_alive"] & (rows["generation"] == generation)).tolist())
        self._largest.pop(generation, None)
        self.generations[generation] = ""

    def compact(self) -> None:
        """Close the gaps, if they are many; row numbers change."""
        self.touched.clear()
        if self._dead > max(_MOST_NEW, self._count // 8):
            self.renumber()

    def renumber(self) -> None:
        """Close the gaps; in place and piece by piece, since a copy would double the memory."""
        target = 0
        for start in range(0, self._count, _MOST_NEW):
            piece = self._rows[start : min(start + _MOST_NEW, self._count)]
            alive = piece[piece["is_alive"]]
            self._rows[target : target + alive.size] = alive
            target += alive.size
        self._count, self._dead = target, 0
        self._rows.resize(max(1024, target + target // 8), refcheck=False)
        self._renumber_tenants()
        self._sort()

    def restore(self, rows: Rows, *, generations: list[str], tenants: list[str], epoch: int) -> None:
        """Take over the rows of an earlier process; they are the ledger's own from now on."""
        self.generations, self.tenants, self.epoch = generations, tenants, epoch
        self._rows, self._count, self._dead = rows, rows.size, int(rows.size - np.count_nonzero(rows["is_alive"]))
        alive = rows["is_alive"]
        self._tenant_numbers = {name: number for number, name in enumerate(tenants)}
        living = np.flatnonzero(alive)
        pairs = rows["generation"][living].astype(np.uint64) << np.uint64(32) | rows["tenant"][living]
        places, place_of = np.unique(pairs, return_inverse=True)
        blocks, sizes = np.bincount(place_of, minlength=places.size), np.zeros(places.size, np.int64)
        np.add.at(sizes, place_of, rows["size"][living])
        is_unseen = alive & ~rows["is_confirmed"]
        self.unconfirmed = Sum(int(np.count_nonzero(is_unseen)), int(rows["size"][is_unseen].sum()))
        is_seen = alive & rows["is_confirmed"]
        largest = np.zeros(len(generations) + 1, np.int64)
        np.maximum.at(largest, rows["generation"][is_seen], rows["size"][is_seen])
        self._largest = {number: size for number, size in enumerate(largest.tolist()) if size}
        self._sums = {
            (place >> 32, place & 0xFFFFFFFF): Sum(*sums)
            for place, *sums in zip(places.tolist(), blocks.tolist(), sizes.tolist(), strict=True)
        }
        self._sort()

    def _set_confirmed(self, row: int, *, is_confirmed: bool) -> None:
        each = self._rows[row]
        if bool(each["is_confirmed"]) != is_confirmed:
            one = Sum(1, int(each["size"]))
            self.unconfirmed = self.unconfirmed.minus(one) if is_confirmed else self.unconfirmed.plus(one)
            each["is_confirmed"] = is_confirmed

    def _store(self, name: int, row: int, generation: int, record: Record) -> None:
        if row < 0:
            # No block is larger than the largest of its generation; of a new generation the first look tells.
            claimed = HEADER_BYTES + record.payload_bytes
            row = self._append(name, generation, record.key, min(claimed, self._largest.get(generation, claimed)))
            self._rows[row]["created"] = record.time_ns
        else:
            self._set_confirmed(row, is_confirmed=False)
        each = self._rows[row]
        each["epoch"] = self.epoch
        if record.lineage != NO_LINEAGE:
            each["position"] = record.lineage.position
            parent = record.lineage.parent
            each["parent"] = self._name(generation, record.key, parent) if parent else 0
        self.use(row, record.time_ns)

    def _append(self, name: int, generation: int, key: BlockKey, size: int) -> int:
        if self._count == self._rows.size:
            # realloc moves pages, it does not copy: the old and the new array are never both there
            self._rows.resize(self._count + max(1024, self._count // 8), refcheck=False)
        row = self._count
        self._count += 1
        each = self._rows[row]
        each["name"], each["size"], each["group"] = name, size, key.group
        each["parent"] = each["position"] = each["created"] = each["used"] = 0
        each["hash"] = np.void(key.hash.ljust(MAX_HASH_BYTES, b"\0"))
        each["hash_bytes"], each["generation"], each["tenant"] = len(key.hash), generation, self._new_tenant(key.tenant)
        each["is_alive"], each["epoch"], each["is_confirmed"] = True, self.epoch, False
        self._count_in(generation, int(each["tenant"]), 1, size)
        self.unconfirmed = self.unconfirmed.plus(Sum(1, size))
        self._new[name] = row
        self.on_new(row)
        if len(self._new) >= _MOST_NEW:
            self._sort()
        return row

    def _resize(self, row: int, size: int) -> None:
        each = self._rows[row]
        change = Sum(0, size - int(each["size"]))
        self._count_in(int(each["generation"]), int(each["tenant"]), 0, change.bytes)
        if not each["is_confirmed"]:
            self.unconfirmed = self.unconfirmed.plus(change)
        each["size"] = size

    def _count_in(self, generation: int, tenant: int, blocks: int, size: int) -> None:
        place = (generation, tenant)
        self._sums[place] = self._sums.get(place, Sum()).plus(Sum(blocks, size))
        if self._sums[place] == Sum():
            del self._sums[place]

    def _renumber_tenants(self) -> None:
        """Leave out the tenants that have no blocks any more."""
        old = [0, *sorted({tenant for _, tenant in self._sums} - {0})]
        if len(old) == len(self.tenants):
            return
        new = np.zeros(len(self.tenants), np.uint32)
        new[old] = np.arange(len(old), dtype=np.uint32)
        for start in range(0, self._count, _MOST_NEW):
            piece = self.rows[start : start + _MOST_NEW]
            piece["tenant"] = new[piece["tenant"]]
        self._sums = {(generation, int(new[tenant])): each for (generation, tenant), each in self._sums.items()}
        self.tenants = [self.tenants[tenant] for tenant in old]
        self._tenant_numbers = {name: number for number, name in enumerate(self.tenants)}

    def _new_tenant(self, name: str) -> int:
        number = self._tenant_numbers.get(name)
        if number is None:
            number = self._tenant_numbers[name] = len(self.tenants)
            self.tenants.append(name)
        return number

    def _sort(self) -> None:
        alive = np.flatnonzero(self.rows["is_alive"]).astype(np.int32)
        names = self.rows["name"][alive]
        order = np.argsort(names, kind="stable")
        self._names, self._places = names[order], alive[order]
        self._new.clear()

    def _name(self, generation: int, key: BlockKey, hash_: bytes) -> int:
        place = (generation, key.tenant, key.group)
        salt = self._salts.get(place)
        if salt is None:
            if len(self._salts) >= _MOST_SALTS:
                self._salts.clear()
            # Of its name and not its number, which may become another one's.
            tenant = int.from_bytes(hashlib.blake2b(key.tenant.encode(), digest_size=8).digest(), "little")
            salt = self._salts[place] = _mix(_mix(generation << 32 | key.group) ^ tenant)
        return (int.from_bytes(hash_[:8], "little") ^ salt) or 1


def _mix(number: int) -> int:
    """Return 64 bits that look nothing like the number (SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _NAME_BITS
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & _NAME_BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & _NAME_BITS
    return number ^ number >> 31


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


LEDGER_FILE = "janitor.ledger"
"""Name of the file, beside the generations of the tier."""

_MAGIC = b"KVTL"
_VERSION = 4
_HEAD = struct.Struct("<4sIQQII")
_PIECE_BYTES = 1 << 22
_MOST_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a ledger needs besides its rows to go on."""

    taken_ns: int
    """When the journals had been read up to the places."""
    places: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By generation, up to where each journal is in the ledger."""
    walked_ns: int = 0
    """When the last complete walk began; 0 if there was none."""
    unread: Sequence[tuple[str, str, str]] = ()
    """Directories that could not be read: generation, path and why."""
    pins: dict[str, bytes] = field(default_factory=dict)
    """What was pinned when the list was last read."""


def save(ledger: Ledger, snapshot: Snapshot, tier_dir: Path, *, fs: FileSystem) -> int:
    """Write the ledger, with its gaps closed; return the bytes.

    Raises:
        OSError: the volume does not take it; the old file stays.
    """
    ledger.renumber()
    document = json.dumps(
        {
            "generations": ledger.generations,
            "tenants": ledger.tenants,
            "epoch": ledger.epoch,
            "taken_ns": snapshot.taken_ns,
            "walked_ns": snapshot.walked_ns,
            "unread": list(snapshot.unread),
            "pins": {name: pinned.hex() for name, pinned in snapshot.pins.items()},
            "places": {digest: dict(places) for digest, places in snapshot.places.items()},
        }
    ).encode()
    rows = memoryview(ledger.rows.view(np.uint8).data)
    checksum = zlib.crc32(rows, zlib.crc32(document))
    head = _HEAD.pack(_MAGIC, _VERSION, len(document), ledger.rows.size, ROW.itemsize, checksum)
    with replacing(fs, f"{tier_dir}/{LEDGER_FILE}") as fd:
        end_of_document = write_all(fs, fd, memoryview(head + document))
        write_all(fs, fd, rows, end_of_document)
    return end_of_document + rows.nbytes


def load(ledger: Ledger, tier_dir: Path, *, fs: FileSystem) -> Snapshot | None:
    """Fill an empty ledger from the file; None if there is none that is whole.

    Raises:
        OSError: the volume does not give it.
    """
    try:
        fd = fs.open(f"{tier_dir}/{LEDGER_FILE}", READ_FLAGS)
    except FileNotFoundError:
        return None
    try:
        return _load(ledger, fs, fd)
    finally:
        with contextlib.suppress(OSError):
            fs.close(fd)


def _load(ledger: Ledger, fs: FileSystem, fd: int) -> Snapshot | None:
    head = _read(fs, fd, memoryview(bytearray(_HEAD.size)), 0)
    if len(head) != _HEAD.size:
        return None
    magic, version, document_bytes, count, row_bytes, checksum = _HEAD.unpack(head)
    size = _HEAD.size + document_bytes + count * row_bytes
    is_ours = (magic, version, row_bytes) == (_MAGIC, _VERSION, ROW.itemsize)
    if not is_ours or document_bytes > _MOST_DOCUMENT_BYTES or size != fs.fstat(fd).st_size:
        return None
    text = bytes(_read(fs, fd, memoryview(bytearray(document_bytes)), _HEAD.size))
    rows = np.zeros(count, ROW)
    body = memoryview(rows.view(np.uint8).data)
    if len(_read(fs, fd, body, _HEAD.size + document_bytes)) != len(body) or zlib.crc32(body, zlib.crc32(text)) != (
        checksum
    ):
        return None
    try:
        document: dict[str, Any] = json.loads(text)
        snapshot = Snapshot(
            unread=[(generation, path, error) for generation, path, error in document["unread"]],
            # The janitors before this one kept none.
            pins={check_name(name): parse_hash(pinned) for name, pinned in document.get("pins", {}).items()},
            **{name: document[name] for name in ("taken_ns", "walked_ns", "places")},
        )
        known = {name: document[name] for name in ("generations", "tenants", "epoch")}
        if not _are_numbered(rows, known) or not _is_understood(snapshot):
            return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigInvalid):
        # Whole, and yet nothing that a janitor wrote: others can write here too.
        return None
    ledger.restore(rows, **known)
    return snapshot


def _are_numbered(rows: Rows, known: Mapping[str, Any]) -> bool:
    """Say whether every row is of a generation and a tenant that are named, and its numbers are in range."""
    are_names = all(isinstance(name, str) for key in ("generations", "tenants") for name in known[key])
    most = {
        "generation": len(known["generations"]) - 1,
        "tenant": len(known["tenants"]) - 1,
        "size": HEADER_BYTES + MAX_PAYLOAD_BYTES,
        "position": MAX_POSITION,
        "hash_bytes": MAX_HASH_BYTES,
    }
    is_in_range = not rows.size or (
        all(int(rows[name].max()) <= limit for name, limit in most.items())
        and all(int(rows[name].min()) >= 0 for name in ("size", "created", "used"))
        and int(rows["hash_bytes"].min()) >= MIN_HASH_BYTES
    )
    # The first tenant stands for nobody in particular.
    return are_names and known["tenants"][0] == "" and is_in_range and isinstance(known["epoch"], int)


def _is_understood(snapshot: Snapshot) -> bool:
    """Say whether everything is of the type that it is declared with."""
    offsets = [offset for places in snapshot.places.values() for offset in places.values()]
    names = [name for each in snapshot.unread for name in each]
    numbers = [snapshot.taken_ns, snapshot.walked_ns, *offsets]
    return all(isinstance(each, int) for each in numbers) and all(isinstance(each, str) for each in names)


def _read(fs: FileSystem, fd: int, into: memoryview, offset: int) -> memoryview:
    done = 0
    while done < into.nbytes and (count := fs.preadv(fd, [into[done : done + _PIECE_BYTES]], offset + done)):
        done += count
    return into[:done]
