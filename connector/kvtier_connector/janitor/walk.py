# SPDX-License-Identifier: Apache-2.0
"""Looks at the files of a tier: at those that journals name, and at all directories in a walk that never ends.

The first walk goes as fast as it can, each later one takes about an hour. A walk lists directories; only a file that
the catalog does not know is opened for its header, once in its life. Unreadable directories are reported and tried
again; until then the catalog keeps their blocks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvtier_connector.janitor.catalog import Catalog
from kvtier_connector.store.fs import NO_FILE, READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.header import HEADER_BYTES, Header, decode_header
from kvtier_connector.store.journal import Op, Record
from kvtier_connector.store.layout import (
    BLOCKS,
    NO_LINEAGE,
    TENANTS,
    BlockKey,
    Lineage,
    block_path,
    is_partial,
    is_tenant,
    parse_block_path,
    tenant_directory,
)
from kvtier_connector.store.mounts import mount_of

_FILES_AT_ONCE = 512
_BUNDLE = 32
"""Files that one thread looks at in a row."""
_PIECES_AT_ONCE = 64
_PIECES_PER_SECOND = 6.0
"""Upper bound for walks after the first, however long they take then."""
_REST = 20
"""A walk after the first rests this many times as long as a directory took: it uses a twentieth of a core or volume."""
_HURRY_REST = 4
"""Walks at full speed follow each other after so many times the duration of one."""
_FRESH_SECONDS = 60.0
"""A partial file written to within this time is most likely a block soon, which counts then."""
_MOST_UNSEEN = 1 << 16
_RETRY_SECONDS = 60.0
_LONGEST_RETRY_SECONDS = 3600.0
_MOST_UNREAD = 4096
_CACHED_SECONDS = 120.0
"""An NFS client may remember for so long that a file does not exist."""
_PIECE = re.compile("[0-9a-f]{3}")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, *NO_FILE})

Looked = TypeVar("Looked")
Place = tuple[str, BlockKey]
"""A block with the digest of its generation."""


class BlockDirectory(NamedTuple):
    """One of the 4096 directories of blocks, of the tier or of a tenant; or a tree that holds such directories."""

    generation: str
    """Digest, which is the name of the generation's directory."""
    path: str
    """Relative to the generation's root."""

    @property
    def is_tree(self) -> bool:
        """Whether it holds directories instead of blocks."""
        return self.path.rpartition("/")[2] in {BLOCKS, TENANTS}


@dataclass(slots=True)
class Listing:
    """Contents of one directory."""

    piece: BlockDirectory
    children: list[BlockDirectory] = field(default_factory=list)
    """Of a tree."""
    keys: list[BlockKey] = field(default_factory=list)
    partials: dict[str, os.stat_result] = field(default_factory=dict)
    """Partial files, by path relative to the generation's root."""
    error: OSError | None = None
    """Why the directory could not be read."""


class Opened(NamedTuple):
    """A block whose header was read."""

    size: int
    mtime_ns: int
    lineage: Lineage
    """None is known of one that is damaged or of another release; the file takes room all the same."""


def list_directory(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    """List a directory, nothing if there is none; raise OSError if it cannot be read.

    A file system that is rooted at the tier takes a link for none: it could lead the janitor to files of others.
    """
    try:
        return fs.scandir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_tenants(fs: FileSystem, root: str) -> list[str]:
    """Return the tenants that have a tree under the root; raise OSError if it cannot be read."""
    entries = list_directory(fs, f"{root}/{TENANTS}")
    return sorted(entry.name for entry in entries if is_tenant(entry.name) and entry.is_dir(follow_symlinks=False))


def list_piece(fs: FileSystem, tier_dir: str, piece: BlockDirectory) -> Listing:
    """Return the contents of a directory."""
    listing = Listing(piece)
    digest, root = piece.generation, f"{tier_dir}/{piece.generation}"
    try:
        if piece.path == TENANTS:
            trees = [f"{tenant_directory(tenant)}{BLOCKS}" for tenant in find_tenants(fs, root)]
            listing.children = [BlockDirectory(digest, tree) for tree in trees]
            return listing
        entries = list_directory(fs, f"{root}/{piece.path}")
    except OSError as error:
        listing.error = error
        return listing
    for entry in entries:
        path = f"{piece.path}/{entry.name}"
        if piece.is_tree:
            if _PIECE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                listing.children.append(BlockDirectory(digest, path))
        # A link, pipe or directory takes no room, and an engine that needs its place removes it.
        elif not entry.is_file(follow_symlinks=False):
            continue
        elif (key := parse_block_path(path)) is not None:
            listing.keys.append(key)
        elif is_partial(entry.name):
            # One that was renamed meanwhile is a block.
            with contextlib.suppress(OSError):
                listing.partials[path] = fs.stat(f"{root}/{path}")
    listing.children.sort()
    return listing


def open_block(fs: FileSystem, root: str, key: BlockKey) -> Opened | OSError | None:
    """Read the header of a block; None if there is no such file."""
    try:
        fd = fs.open(f"{root}/{block_path(key)}", READ_FLAGS)
        try:
            status = fs.fstat(fd)
            page = memoryview(bytearray(HEADER_BYTES))
            header = decode_header(page[: read_page(fs, fd, page)])
        finally:
            with contextlib.suppress(OSError):
                fs.close(fd)
    except OSError as error:
        return None if error.errno in _ABSENT else error
    lineage = header.lineage if isinstance(header, Header) and header.key == key else NO_LINEAGE
    return Opened(status.st_size, status.st_mtime_ns, lineage)


def stat_block(fs: FileSystem, root: str, key: BlockKey) -> os.stat_result | OSError | None:
    """Look at the file of a block without opening it; None if there is no such file."""
    try:
        status = fs.stat(f"{root}/{block_path(key)}")
    except OSError as error:
        return None if error.errno in _ABSENT else error
    return status if stat.S_ISREG(status.st_mode) else None


class _Unseen(NamedTuple):
    """A block named by a journal and not seen."""

    look_at: float
    """When to look for it."""
    used_ns: int
    size: int = 0
    """Bytes of its file according to the journal, if the volume did not let the janitor look; else 0."""


class Scrub:
    """Keeps the catalog of a tier true to the files. Owned by the catalog's thread."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        catalog: Catalog,
        *,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings."""
        self._catalog, self._fs, self._tier_dir, self._pool = catalog, fs, tier_dir, pool
        self._clock, self._now = clock, now
        self._pieces: deque[BlockDirectory] = deque()
        self._pieces_of_walk = 0
        self._is_walking = self._is_hurried = False
        self._began_ns = 0
        self._began_at = -math.inf
        self._rested_at = now()
        """When everything may be walked again at once."""
        self.walked_at = -math.inf
        """When the last complete walk of this process began, by `now`."""
        self._next_at = now()
        self._pause = 0.0
        """Seconds between two directories; 0 in the first walk."""
        self._read = self._failed = 0
        """Directories that this walk could read, and could not."""
        self._failure: OSError | None = None
        self._retry_at = math.inf
        self._retry_pause = _RETRY_SECONDS
        self.unread: dict[BlockDirectory, str] = {}
        """Directories that could not be read, pieces or trees, with the system's message."""
        self.walked_ns = 0
        """When the last complete walk began, also one of an earlier process; 0 before the first."""
        self._unseen: dict[Place, _Unseen] = {}
        """Blocks named by a journal and not seen."""
        self._look_error = ""
        """Why the last of them could not be looked at."""
        self._recounted: NDArray[np.uint64] | None = None
        """Names of the blocks that `recount` has still to look at; None while it does not run."""
        self._refused: OSError | None = None
        """Why `recount` could not look at one of them."""
        self._is_cached = mount_of(tier_dir).is_nfs
        self._partial_bytes: dict[BlockDirectory, int] = {}
        """Bytes of the partial files of each directory that had some when it was listed."""
        self._partials_age_seconds: float | None = None
        """Older partial files are removed; None removes none."""
        self.partials_problem = ""
        """Why a partial file could not be removed in this walk."""
        self.removed_partials = 0

    @property
    def is_counted(self) -> bool:
        """Whether a complete walk has seen every readable block."""
        return self.walked_ns > 0

    @property
    def share(self) -> float:
        """Share of the current walk that is done, from 0 to 1."""
        return 1 - len(self._pieces) / self._pieces_of_walk if self._pieces_of_walk else 0.0

    @property
    def next_at(self) -> float:
        """When there is something to do again, by `now`."""
        return min(self._next_at, self._retry_at)

    @property
    def problem(self) -> str:
        """Message about unreadable directories; empty without any."""
        if not self.unread:
            return ""
        more = f", and {len(self.unread) - 1} other places" if len(self.unread) > 1 else ""
        return f"unread: {next(iter(self.unread.values()))}{more}; blocks there count as far as they are known"

    @property
    def partial_bytes(self) -> int:
        """Bytes of partial files."""
        return sum(self._partial_bytes.values())

    @property
    def unseen_bytes(self) -> int:
        """Bytes of blocks that journals say were stored and that the volume did not let the janitor look at."""
        largest = self._catalog.largest_bytes or math.inf
        return int(sum(min(unseen.size, largest) for unseen in self._unseen.values()))

    @property
    def look_problem(self) -> str:
        """Message about such blocks; empty without any."""
        count = sum(unseen.size > 0 for unseen in self._unseen.values())
        return f"look: {count} blocks that journals name cannot be looked at: {self._look_error}" if count else ""

    def apply(self, digest: str, records: Sequence[Record]) -> None:
        """Take in records of a journal, after a look at each file that they say was stored or removed."""
        generation = self._catalog.generation(digest)
        named = self._sort_out(digest, generation, records)
        for key, found in self._at_once(stat_block, digest, list(named)):
            record, row = named[key], self._catalog.find(generation, key)
            if isinstance(found, OSError):
                self._look_error = str(found)
                size = 0 if row >= 0 else HEADER_BYTES + record.payload_bytes
                self._look_later(digest, key, used_ns=record.time_ns, after_seconds=_RETRY_SECONDS, size=size)
            elif found is not None:
                row = self._add(generation, key, found.st_size, found.st_mtime_ns, record.lineage)
                if record.op == Op.STORED:
                    self._catalog.use(row, record.time_ns)
            else:
                self._catalog.forget([row] if row >= 0 else [])
                if self._is_cached and record.op == Op.STORED:
                    self._look_later(digest, key, used_ns=record.time_ns, after_seconds=_CACHED_SECONDS)
        for record in named.values():
            before = record.key._replace(hash=record.lineage.parent)
            if before.hash and self._catalog.find(generation, before) < 0:
                self._look_later(digest, before, used_ns=0)

    def _sort_out(self, digest: str, generation: int, records: Sequence[Record]) -> dict[BlockKey, Record]:
        """Take in the uses of known blocks; return the records whose files must be looked at."""
        named: dict[BlockKey, Record] = {}
        for record in records:
            key = record.key
            row = self._catalog.find(generation, key)
            if record.op == Op.STORED or (record.op == Op.GONE and row >= 0 and key not in named):
                named[key] = record
            elif record.op in {Op.USED, Op.RETAINED}:
                # A retained block counts as used when its time is over.
                if row >= 0:
                    self._catalog.use(row, record.time_ns)
                elif key in named:
                    named[key] = named[key]._replace(time_ns=max(record.time_ns, named[key].time_ns))
                else:
                    self._look_later(digest, key, used_ns=record.time_ns)
        return named

    def resolve(self, may_go_on: Callable[[], bool]) -> None:
        """Open the due blocks that journals named and that were not seen, and the unknown blocks before them."""
        now = self._now()
        due: dict[str, list[BlockKey]] = {}
        for (digest, key), unseen in self._unseen.items():
            if unseen.look_at <= now:
                due.setdefault(digest, []).append(key)
        for digest, keys in due.items():
            for start in range(0, len(keys), _FILES_AT_ONCE):
                if not may_go_on():
                    return
                self._resolve(digest, keys[start : start + _FILES_AT_ONCE], may_go_on)

    def _resolve(self, digest: str, keys: Sequence[BlockKey], may_go_on: Callable[[], bool]) -> None:
        generation = self._catalog.generation(digest)
        wanted_of = {key: self._unseen.pop((digest, key)) for key in keys}
        wanted = [key for key in keys if self._catalog.find(generation, key) < 0]
        while wanted:
            before = [each._replace(hash=parent) for each, parent in self._open(digest, wanted) if parent]
            # Until everything was walked once, the walk finds the blocks before them.
            wanted = [
                key for key in dict.fromkeys(before) if self.is_counted and self._catalog.find(generation, key) < 0
            ]
            if wanted and not may_go_on():
                for key in wanted:
                    self._look_later(digest, key, used_ns=0)
                break
        for key, unseen in wanted_of.items():
            if (row := self._catalog.find(generation, key)) >= 0:
                self._catalog.use(row, unseen.used_ns)
            elif unseen.size and BlockDirectory(digest, block_path(key).rpartition("/")[0]) in self.unread:
                self._unseen[digest, key] = unseen._replace(look_at=self._now() + _RETRY_SECONDS)

    def recount(self, may_go_on: Callable[[], bool]) -> bool:
        """Look at the file of every block once more; return whether that is done.

        Raises:
            OSError: at the end, if some could not be looked at; they stay as they are.
        """
        catalog = self._catalog
        if self._recounted is None:
            self._recounted, self._refused = catalog.rows["name"][catalog.rows["is_alive"]], None
        while self._recounted.size and may_go_on():
            names, self._recounted = self._recounted[:_FILES_AT_ONCE], self._recounted[_FILES_AT_ONCE:]
            rows = [row for row in map(catalog.find_name, names.tolist()) if row >= 0]
            for digest in {catalog.digest(row) for row in rows}:
                row_of = {catalog.key(row): row for row in rows if catalog.digest(row) == digest}
                for key, found in self._at_once(stat_block, digest, list(row_of)):
                    if isinstance(found, OSError):
                        self._refused = self._refused or found
                    elif found is None:
                        catalog.forget([row_of[key]])
                    else:
                        written_ns = min(found.st_mtime_ns, self._clock())
                        catalog.update(row_of[key], size=found.st_size, created_ns=written_ns)
        if self._recounted.size:
            return False
        self._recounted = None
        if self._refused is not None:
            raise self._refused
        return True

    def hurry(self, since: float) -> None:
        """Walk as fast as possible, and from the beginning unless the present walk began after `since`."""
        if self._is_walking and self._began_at > since:
            self._pause = 0.0
        elif self._now() >= self._rested_at:
            self._is_walking, self._is_hurried = False, True
        self._next_at = min(self._next_at, max(self._now(), self._rested_at))

    def step(
        self,
        digests: Iterable[str],
        *,
        verify_seconds: float,
        partials_age_seconds: float | None,
        may_go_on: Callable[[], bool],
    ) -> None:
        """Look at the due pieces; raise OSError if hardly any can be read, and begin anew then.

        Partial files of that age are removed.
        """
        self._partials_age_seconds = partials_age_seconds
        self._retry(may_go_on)
        if self._now() < self._next_at:
            return
        if not self._is_walking:
            self._begin(digests, verify_seconds)
        if self._pause:
            self._look_at_one()
        while not self._pause and self._pieces and may_go_on():
            for listing in self._list(self._pieces):
                self._visit(listing)
        if self._pieces:
            return
        self._is_walking = False
        if self._failure is not None and self._failed > self._read:
            self._next_at = self._now() + _RETRY_SECONDS
            raise self._failure
        self._catalog.end_walk()
        self.walked_ns, self.walked_at = self._began_ns, self._began_at
        self._rested_at = self._now() + _HURRY_REST * (self._now() - self._began_at)

    def _begin(self, digests: Iterable[str], verify_seconds: float) -> None:
        self._read, self._failed, self._failure = 0, 0, None
        self._began_ns, self._began_at = self._clock(), self._now()
        self._catalog.begin_walk()
        self._pieces.clear()
        self.partials_problem = ""
        digests = set(digests)
        self._partial_bytes = {
            piece: size for piece, size in self._partial_bytes.items() if piece.generation in digests
        }
        trees = deque(BlockDirectory(digest, tree) for digest in sorted(digests) for tree in (BLOCKS, TENANTS))
        while trees:
            for child in self._visit(list_piece(self._fs, self._tier_dir, trees.popleft())):
                (trees if child.is_tree else self._pieces).append(child)
        self._pieces_of_walk = len(self._pieces)
        is_slow = self.is_counted and not self._is_hurried
        self._pause = verify_seconds / max(1, len(self._pieces)) if is_slow else 0.0
        self._is_walking, self._is_hurried = True, False
        self._next_at = self._now()

    def _list(self, pieces: deque[BlockDirectory]) -> Iterator[Listing]:
        """List some of the pieces at once."""
        some = [pieces.popleft() for _ in range(min(_PIECES_AT_ONCE, len(pieces)))]
        return self._pool.map(lambda piece: list_piece(self._fs, self._tier_dir, piece), some)

    def _look_at_one(self) -> None:
        """Look at the next directory, and set the time of the one after it."""
        began = self._now()
        if self._pieces:
            self._visit(list_piece(self._fs, self._tier_dir, self._pieces.popleft()))
        ended = self._now()
        self._next_at = ended + max(self._pause, 1 / _PIECES_PER_SECOND, _REST * (ended - began))

    def _visit(self, listing: Listing) -> list[BlockDirectory]:
        """Compare a directory with the catalog; return the directories in it."""
        piece = listing.piece
        self.unread.pop(piece, None)
        generation = self._catalog.generation(piece.generation) if listing.keys else -1
        rows = {key: self._catalog.find(generation, key) for key in listing.keys}
        for row in rows.values():
            if row >= 0:
                self._catalog.see(row)
        if listing.error is not None:
            self._fail(piece, listing.error)
        self._open(piece.generation, [key for key, row in rows.items() if row < 0])
        self._look_at_partials(listing)
        if piece in self.unread:
            self._failed += 1
        elif not piece.is_tree:
            self._read += 1
        return listing.children

    def _look_at_partials(self, listing: Listing) -> None:
        """Remove partial files whose writers are gone, and count the others that are none of a store at work."""
        counted = 0
        for path, status in listing.partials.items():
            seconds = (self._clock() - status.st_mtime_ns) / 1e9
            if self._partials_age_seconds is not None and seconds >= self._partials_age_seconds:
                try:
                    self._fs.unlink(f"{self._tier_dir}/{listing.piece.generation}/{path}")
                    self.removed_partials += 1
                    continue
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.partials_problem = f"partials: {error}"
            counted += status.st_size if seconds >= _FRESH_SECONDS else 0
        self._partial_bytes.pop(listing.piece, None)
        if counted:
            self._partial_bytes[listing.piece] = counted

    def _retry(self, may_go_on: Callable[[], bool]) -> None:
        """Look once more at unreadable directories, first after a minute and then more and more seldom."""
        if self._now() < self._retry_at:
            return
        due = deque(self.unread)
        while due and may_go_on():
            for listing in self._list(due):
                due += self._visit(listing)
        self._retry_pause = min(2 * self._retry_pause, _LONGEST_RETRY_SECONDS) if self.unread else _RETRY_SECONDS
        self._retry_at = self._now() + self._retry_pause if self.unread else math.inf

    def _fail(self, piece: BlockDirectory, error: OSError) -> None:
        """Record an unreadable directory, and keep its blocks: it is not known that they are gone."""
        self._failure = self._failure or error
        if len(self.unread) < _MOST_UNREAD:
            self.unread[piece] = str(error)
        self._retry_at = min(self._retry_at, self._now() + self._retry_pause)
        self._catalog.see(self._catalog.rows_below(*piece))

    def _look_later(
        self, digest: str, key: BlockKey, *, used_ns: int, after_seconds: float = 0.0, size: int = 0
    ) -> None:
        if len(self._unseen) < _MOST_UNSEEN:
            known = self._unseen.get((digest, key), _Unseen(0.0, 0))
            self._unseen[digest, key] = _Unseen(
                self._now() + after_seconds, max(known.used_ns, used_ns), max(known.size, size)
            )

    def _at_once(
        self, look: Callable[[FileSystem, str, BlockKey], Looked], digest: str, keys: Sequence[BlockKey]
    ) -> Iterator[tuple[BlockKey, Looked]]:
        """Look at several blocks at once, a bundle a thread, since handing over work takes time, too."""
        root = f"{self._tier_dir}/{digest}"
        bundles = [keys[start : start + _BUNDLE] for start in range(0, len(keys), _BUNDLE)]
        for found in self._pool.map(lambda bundle: [(key, look(self._fs, root, key)) for key in bundle], bundles):
            yield from found

    def _add(self, generation: int, key: BlockKey, size: int, mtime_ns: int, lineage: Lineage) -> int:
        """Take in a block that was looked at; return its row. A file from the future must not stay for ever."""
        written_ns = min(mtime_ns, self._clock())
        return self._catalog.add(generation, key, size=size, created_ns=written_ns, used_ns=written_ns, lineage=lineage)

    def _open(self, digest: str, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, bytes]]:
        """Open unknown blocks and take them in; return those that exist, with the hash of the block before each."""
        opened = []
        for key, found in self._at_once(open_block, digest, keys):
            if isinstance(found, OSError):
                self._fail(BlockDirectory(digest, block_path(key).rpartition("/")[0]), found)
            elif found is not None:
                self._add(self._catalog.generation(digest), key, *found)
                opened.append((key, found.lineage.parent))
        return opened
