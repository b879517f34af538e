# SPDX-License-Identifier: Apache-2.0
"""Keeps every block of every generation of one tier in memory, 96 bytes a block, and over a restart in one file.

A block enters the catalog only after its file was looked at. The saved file is a hint like every index: it is used only
if it is whole, and the journals since then and the next walk correct it. A catalog belongs to one thread.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_connector.janitor.policy import BlockColumns, Flags, Ints, link
from kvtier_connector.store import layout
from kvtier_connector.store.fs import FileSystem, opened, read_bytes, read_into, replacing, write_all
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.journal import MAX_PAYLOAD_BYTES, MAX_TIME_NS
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage, find_home, is_tenant

CATALOG_FILE = "janitor.catalog"
"""Name of the saved file, beside the generations of the tier."""

ROW = np.dtype(
    [
        ("name", "<u8"),  # 64 bits of hash, group, tenant and generation; 0 is no name
        ("parent", "<u8"),  # name of the preceding block of the prefix; 0 where there is none
        ("size", "<i8"),  # bytes of the file
        ("created", "<i8"),  # when the file was written: nanoseconds since 1970, by the volume's clock
        ("used", "<i8"),  # likewise; of the last use
        ("position", "<u4"),
        ("group", "<u4"),
        ("hash", f"V{layout.MAX_HASH_BYTES}"),
        ("tenant", "<u4"),
        ("generation", "<u2"),
        ("hash_bytes", "u1"),
        ("epoch", "u1"),  # number of the last walk that saw it
        ("is_alive", "?"),
        ("", "V7"),
    ]
)
"""One block. Two of a million blocks have one name once in 4 * 10^7 times; one of them is then not counted."""

_MOST_NEW = 1 << 16
"""Rows found through a dict, before the sorted names are made anew."""
_EPOCHS = 250
_MOST_GENERATIONS = 1 << 16
NEARLY_ALL = 0.9
_VERSION = 7
"""Of the saved file, its document and its rows."""
_HEAD = struct.Struct("<IQ")
"""Checksum of everything after it, and length of the document."""
_MOST_DOCUMENT_BYTES = 64 << 20

Rows = NDArray[Any]


class Sum(NamedTuple):
    """Number and bytes of a set of files."""

    blocks: int = 0
    bytes: int = 0

    def plus(self, *others: Sum) -> Sum:
        """Return all together."""
        return Sum(*map(sum, zip(self, *others, strict=True)))


class Catalog:
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
        """Grows with every change that is worth saving."""
        self.on_new: Callable[[int], None] = lambda _row: None
        self.on_gone: Callable[[int], None] = lambda _row: None
        """Called while the row still has its values."""
        self.touched: list[int] = []
        """Rows used since it was last cleared."""
        self.refused: set[int] = set()
        """Names of rows whose files the volume lately refused to remove: others go before them."""
        self.largest_bytes = 0
        """Bytes of the largest file seen since the start."""
        self._rows: Rows = np.zeros(1024, ROW)
        self._count = 0
        self._dead = 0
        self._names: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._places: NDArray[np.int32] = np.zeros(0, np.int32)
        self._new: dict[int, int] = {}
        self._sums: dict[tuple[int, int], Sum] = {}

    @property
    def rows(self) -> Rows:
        """All rows, dead ones included; the next change may invalidate this view."""
        return self._rows[: self._count]

    @property
    def total(self) -> Sum:
        """All blocks together."""
        return Sum().plus(*self._sums.values())

    def sums(self, by: Literal["generation", "tenant"]) -> dict[int, Sum]:
        """Return the blocks of each generation or tenant that has any, by its number."""
        found: defaultdict[int, Sum] = defaultdict(Sum)
        for (generation, tenant), each in self._sums.items():
            number = tenant if by == "tenant" else generation
            found[number] = found[number].plus(each)
        return dict(found)

    def tenants_of(self, digest: str) -> set[str]:
        """Return the tenants that have blocks of a generation."""
        number = self.generation(digest)
        return {self.tenants[tenant] for generation, tenant in self._sums if generation == number}

    def generation(self, digest: str) -> int:
        """Return the number of a generation, a new one if need be; raise OverflowError where there are too many."""
        if digest in self.generations:
            return self.generations.index(digest)
        if "" in self.generations:
            number = self.generations.index("")
            self.generations[number] = digest
            return number
        if len(self.generations) == _MOST_GENERATIONS:
            raise OverflowError(f"{_MOST_GENERATIONS} generations on one volume: remove those that are not needed")
        self.generations.append(digest)
        return len(self.generations) - 1

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

    def parent_of(self, row: int) -> int:
        """Return the row of the preceding block of the prefix, -1 if it is not known."""
        parent = int(self._rows["parent"][row])
        return self.find_name(parent) if parent else -1

    def key(self, row: int) -> BlockKey:
        """Return the key of a row's block."""
        each = self._rows[row]
        return BlockKey(
            each["hash"].tobytes()[: int(each["hash_bytes"])], int(each["group"]), self.tenants[int(each["tenant"])]
        )

    def digest(self, row: int) -> str:
        """Return the generation of a row's block."""
        return self.generations[int(self._rows["generation"][row])]

    def add(self, generation: int, key: BlockKey, *, size: int, created_ns: int, lineage: Lineage = NO_LINEAGE) -> int:
        """Take in a block whose file was looked at, and that was used when it was made or later; return its row."""
        name = self._name(generation, key, key.hash)
        row = self.find_name(name)
        if row < 0:
            row = self._append(name, generation, key, size)
        self.update(row, size=size, created_ns=created_ns)
        each = self._rows[row]
        if lineage != NO_LINEAGE:
            each["position"] = lineage.position
            each["parent"] = self._name(generation, key, lineage.parent) if lineage.parent else 0
        each["used"] = max(int(each["used"]), created_ns)
        each["epoch"] = self.epoch
        return row

    def update(self, row: int, *, size: int, created_ns: int) -> None:
        """Take over the size and time of a block's file."""
        each = self._rows[row]
        if change := size - int(each["size"]):
            self._count_in(int(each["generation"]), int(each["tenant"]), 0, change)
        each["size"], each["created"] = size, created_ns
        self.largest_bytes = max(self.largest_bytes, size)
        self.changes += 1

    def use(self, row: int, time_ns: int) -> None:
        """Record a use of the block."""
        used = self._rows["used"]
        if time_ns > int(used[row]):
            used[row] = time_ns
        self.touched.append(row)
        self.changes += 1

    def see(self, rows: list[int]) -> None:
        """Record that the walk found the blocks."""
        self._rows["epoch"][rows] = self.epoch

    def forget(self, rows: Iterable[int]) -> None:
        """Remove blocks that are not on the volume."""
        for row in rows:
            each = self._rows[row]
            if not each["is_alive"]:
                continue
            self.on_gone(row)
            each["is_alive"] = False
            self._dead += 1
            self.changes += 1
            self._count_in(int(each["generation"]), int(each["tenant"]), -1, -int(each["size"]))
            self._new.pop(int(each["name"]), None)

    def begin_walk(self) -> None:
        """Begin a walk: blocks not seen from now on are gone at its end."""
        self.epoch = self.epoch % _EPOCHS + 1

    def end_walk(self, is_kept: Callable[[str, BlockKey], bool] = lambda _digest, _key: False) -> None:
        """Forget the blocks that the walk did not find, except those to keep."""
        rows = self.rows
        lost = np.flatnonzero(rows["is_alive"] & (rows["epoch"] != self.epoch)).tolist()
        self.forget([row for row in lost if not is_kept(self.digest(row), self.key(row))])

    def drop_generation(self, digest: str) -> None:
        """Forget all blocks of a generation, and the generation."""
        generation = self.generation(digest)
        rows = self.rows
        self.forget(np.flatnonzero(rows["is_alive"] & (rows["generation"] == generation)).tolist())
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

    def restore(self, rows: Rows, generations: list[str], tenants: list[str]) -> None:
        """Take over the blocks of an earlier process; the array belongs to the catalog from now on."""
        rows["epoch"] = self.epoch
        self.generations, self.tenants, self._rows, self._count = generations, tenants, rows, rows.size
        self._tenant_numbers = {name: number for number, name in enumerate(tenants)}
        pairs = rows["generation"].astype(np.uint64) << np.uint64(32) | rows["tenant"]
        places, place_of, blocks = np.unique(pairs, return_inverse=True, return_counts=True)
        sizes = np.zeros(places.size, np.int64)
        np.add.at(sizes, place_of, rows["size"])
        for place, *each in zip(places.tolist(), blocks.tolist(), sizes.tolist(), strict=True):
            self._sums[place >> 32, place & 0xFFFFFFFF] = Sum(*each)
        self.largest_bytes = int(rows["size"].max()) if rows.size else 0
        self._sort()

    def columns(self, order: Sequence[str]) -> tuple[BlockColumns, Ints]:
        """Return the blocks as the policy reads them, and the row of each.

        The generations of `order` are evicted after all others, its first one last.
        """
        living = self.rows
        rows = np.flatnonzero(living["is_alive"]).astype(np.int32)

        def column(name: str, kind: type) -> NDArray[np.int64]:
            taken: NDArray[np.int64] = living[name][rows].astype(kind, copy=False)
            return taken

        ages = np.full(max(1, len(self.generations)), len(order), np.int32)
        for number, digest in enumerate(self.generations):
            if digest in order:
                ages[number] = order.index(digest)
        # Narrow types, and names dropped before the other columns are made: memory is scarce.
        position = column("position", np.int32)
        blocks = BlockColumns(
            before=link(living["name"][rows], living["parent"][rows], position),
            position=position,
            size=column("size", np.int64),
            created=column("created", np.int64),
            used=column("used", np.int64),
            tenant=column("tenant", np.int32),
            age=ages[living["generation"][rows]] - self.is_refused(rows) * np.int32(len(order) + 1),
        )
        return blocks, rows

    def is_refused(self, rows: Ints) -> Flags:
        """Return which of the rows are among the `refused`."""
        return np.isin(self.rows["name"][rows], np.array([*self.refused], np.uint64))

    def expire_most(self, before_ns: int) -> bool:
        """Return whether nearly all blocks were created before that."""
        rows = self.rows
        expired = int(np.count_nonzero(rows["is_alive"] & (rows["created"] < before_ns)))
        return expired > NEARLY_ALL * self.total.blocks

    def extremes(self) -> tuple[int | None, dict[int, int]]:
        """Return when the oldest block was created, None without blocks, and the last use by generation number."""
        rows = self.rows
        # Column by column: all columns of the living rows would take as much memory as the catalog.
        alive = np.flatnonzero(rows["is_alive"]).astype(np.int32)
        latest = np.zeros(max(1, len(self.generations)), np.int64)
        np.maximum.at(latest, rows["generation"][alive], rows["used"][alive])
        oldest_ns = int(rows["created"][alive].min()) if alive.size else None
        return oldest_ns, {number: used for number, used in enumerate(latest.tolist()) if used}

    def _append(self, name: int, generation: int, key: BlockKey, size: int) -> int:
        if self._count == self._rows.size:
            # realloc moves pages and copies nothing: the old and the new array never exist together
            self._rows.resize(self._count + max(1024, self._count // 8), refcheck=False)
        row = self._count
        self._count += 1
        each = self._rows[row]
        each["name"], each["size"], each["group"] = name, size, key.group
        each["parent"] = each["position"] = each["created"] = each["used"] = 0
        each["hash"] = np.void(key.hash.ljust(layout.MAX_HASH_BYTES, b"\0"))
        tenant = self._tenant_numbers.setdefault(key.tenant, len(self.tenants))
        if tenant == len(self.tenants):
            self.tenants.append(key.tenant)
        each["hash_bytes"], each["generation"], each["tenant"] = len(key.hash), generation, tenant
        each["is_alive"], each["epoch"] = True, self.epoch
        self._count_in(generation, tenant, 1, size)
        self._new[name] = row
        self.on_new(row)
        if len(self._new) >= _MOST_NEW:
            self._sort()
        return row

    def _count_in(self, generation: int, tenant: int, blocks: int, size: int) -> None:
        place = (generation, tenant)
        self._sums[place] = self._sums.get(place, Sum()).plus(Sum(blocks, size))
        if self._sums[place] == Sum():
            del self._sums[place]

    def _renumber_tenants(self) -> None:
        """Leave out the tenants without blocks."""
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

    def _sort(self) -> None:
        alive = np.flatnonzero(self.rows["is_alive"]).astype(np.int32)
        names = self.rows["name"][alive]
        order = np.argsort(names, kind="stable")
        self._names, self._places = names[order], alive[order]
        self._new.clear()

    def _name(self, generation: int, key: BlockKey, hash_: bytes) -> int:
        place = f"{generation}/{key.group}/{key.tenant}/".encode()
        return int.from_bytes(hashlib.blake2b(place + hash_, digest_size=8).digest(), "little") or 1


class SavedCatalog(NamedTuple):
    """Everything that a restarted janitor needs besides the blocks."""

    taken_ns: int
    """When the journals had been read up to the places."""
    places: Mapping[str, Mapping[str, int]]
    """By generation, the position up to which each journal was read."""
    is_counted: bool
    """Whether a complete walk has seen every block."""


def save(catalog: Catalog, saved: SavedCatalog, tier_dir: str, *, fs: FileSystem) -> None:
    """Write the catalog, with its gaps closed.

    Raises:
        OSError: the volume does not take it; the old file stays.
    """
    catalog.renumber()
    document = json.dumps([_VERSION, catalog.generations, catalog.tenants, *saved]).encode()
    rows = memoryview(catalog.rows.view(np.uint8).data)
    head = _HEAD.pack(zlib.crc32(rows, zlib.crc32(document)), len(document))
    with replacing(fs, f"{tier_dir}/{CATALOG_FILE}") as fd:
        write_all(fs, fd, rows, write_all(fs, fd, memoryview(head + document)))


def load(catalog: Catalog, tier_dir: str, *, fs: FileSystem) -> SavedCatalog | None:
    """Fill an empty catalog from the file; None if there is no usable file.

    Raises:
        OSError: the volume does not give it.
    """
    try:
        with opened(fs, f"{tier_dir}/{CATALOG_FILE}") as fd:
            document, rows = _read_file(fs, fd)
        version, generations, tenants, *rest = document
        saved = SavedCatalog(*rest)
        offsets = [offset for places in saved.places.values() for offset in places.values()]
        is_known = version == _VERSION and tenants[0] == "" and saved.is_counted in {True, False}
        is_sound = (
            all(each == "" or find_home(each) for each in generations)
            and all(map(is_tenant, tenants[1:]))
            and all(type(each) is int and 0 <= each <= MAX_TIME_NS for each in [saved.taken_ns, *offsets])
        )
        if not (is_known and is_sound and _are_in_range(rows, len(generations), len(tenants))):
            return None
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError, struct.error):
        # Damaged, of another version, or not written by a janitor: other processes can write here, too.
        return None
    catalog.restore(rows, [*generations], [*tenants])
    return saved


def _read_file(fs: FileSystem, fd: int) -> tuple[Any, Rows]:
    """Return document and rows of an open file; raise ValueError if it is damaged."""
    checksum, document_bytes = _HEAD.unpack(read_bytes(fs, fd, _HEAD.size))
    count, rest = divmod(fs.fstat(fd).st_size - _HEAD.size - document_bytes, ROW.itemsize)
    if rest or count < 0 or document_bytes > _MOST_DOCUMENT_BYTES:
        raise ValueError(document_bytes)
    text = read_bytes(fs, fd, document_bytes, _HEAD.size)
    rows = np.zeros(count, ROW)
    body = memoryview(rows.view(np.uint8).data)
    is_cut = read_into(fs, fd, body, _HEAD.size + document_bytes) != rows.nbytes
    if is_cut or zlib.crc32(body, zlib.crc32(text)) != checksum:
        raise ValueError(checksum)
    return json.loads(text), rows


def _are_in_range(rows: Rows, generations: int, tenants: int) -> bool:
    """Return whether all numbers of all rows are in their range."""
    bounds = {
        "generation": (0, generations - 1),
        "tenant": (0, tenants - 1),
        "size": (0, HEADER_BYTES + MAX_PAYLOAD_BYTES),
        "created": (0, MAX_TIME_NS),
        "used": (0, MAX_TIME_NS),
        "position": (0, layout.MAX_POSITION),
        "hash_bytes": (layout.MIN_HASH_BYTES, layout.MAX_HASH_BYTES),
    }
    return not rows.size or (
        all(low <= int(rows[name].min()) and int(rows[name].max()) <= high for name, (low, high) in bounds.items())
        and bool(rows["is_alive"].all())
    )
