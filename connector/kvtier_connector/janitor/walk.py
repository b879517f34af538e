# SPDX-License-Identifier: Apache-2.0
"""Looks at the files of a tier: at those that journals name, and at all directories in a walk that never ends.

The first walk goes as fast as it can, each later one takes about an hour. A walk lists directories; only a file that
the catalog does not know is opened for its header, once in its life. Unreadable directories are reported, and another
walk follows soon; until then the catalog keeps their blocks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier_connector.janitor.catalog import Catalog
from kvtier_connector.store import layout
from kvtier_connector.store.fs import NO_FILE, FileSystem, list_directory, opened, read_bytes
from kvtier_connector.store.header import HEADER_BYTES, Header, decode_header
from kvtier_connector.store.journal import Op, Record
from kvtier_connector.store.layout import BLOCKS, NO_LINEAGE, TENANTS, BlockKey, Lineage, block_path, is_tenant
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
_MOST_NAMED = 1 << 16
_RETRY_SECONDS = 60.0
_LONGEST_RETRY_SECONDS = 3600.0
_CACHED_SECONDS = 120.0
"""An NFS client may remember for so long that a file does not exist."""
_PIECE = re.compile("[0-9a-f]{3}")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, *NO_FILE})

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


class BlockFile(NamedTuple):
    """The file of a block."""

    size: int
    mtime_ns: int
    lineage: Lineage
    """None is known of one that is damaged or of another release; the file takes room all the same."""


Looked = BlockFile | OSError | None
"""None: there is no such file. An error: it is not known."""


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
            trees = [f"{layout.tenant_directory(tenant)}{BLOCKS}" for tenant in find_tenants(fs, root)]
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
        elif (key := layout.parse_block_path(path)) is not None:
            listing.keys.append(key)
        elif layout.is_partial(entry.name):
            # One that was renamed meanwhile is a block.
            with contextlib.suppress(OSError):
                listing.partials[path] = fs.stat(f"{root}/{path}")
    listing.children.sort()
    return listing


def look_at_block(fs: FileSystem, root: str, key: BlockKey, lineage: Lineage | None) -> Looked:
    """Look at the file of a block, and read its header where the lineage is None; None if there is no such file."""
    path = f"{root}/{block_path(key)}"
    try:
        if lineage is not None:
            status = fs.stat(path)
            return BlockFile(status.st_size, status.st_mtime_ns, lineage) if stat.S_ISREG(status.st_mode) else None
        with opened(fs, path) as fd:
            status = fs.fstat(fd)
            header = decode_header(read_bytes(fs, fd, HEADER_BYTES))
    except OSError as error:
        return None if error.errno in _ABSENT else error
    known = header.lineage if isinstance(header, Header) and header.key == key else NO_LINEAGE
    return BlockFile(status.st_size, status.st_mtime_ns, known)


class _Named(NamedTuple):
    """A block named by a journal, whose file was not seen."""

    look_at: float
    """When to look for it."""
    used_ns: int = 0
    """When it was used; 0 if it was not."""
    size: int = 0
    """Bytes of its file according to the journal, 0 if they do not count."""
    lineage: Lineage | None = None
    """None if only the header tells."""
    has_failed: bool = False
    """Whether the volume did not let the janitor look."""


class Scrub:
    """Keeps the catalog of a tier true to the files. Owned by the catalog's thread."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        catalog: Catalog,
        *,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        clock: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        """Store the settings."""
        self._catalog, self._fs, self._tier_dir, self._pool = catalog, fs, tier_dir, pool
        self._clock, self._now = clock, now
        self.is_counted = False
        """Whether a complete walk, also one of an earlier process, has seen every readable block."""
        self.is_whole = False
        """Whether one of them could read all directories; later walks keep the blocks of those that they cannot."""
        self._pieces: deque[BlockDirectory] = deque()
        self._pieces_of_walk = 0
        self._is_walking = self._is_hurried = self._is_thorough = False
        self._began_at = -math.inf
        self._rested_at = now()
        """When everything may be walked again at once."""
        self.walked_at = -math.inf
        """When the last complete walk of this process began, by `now`."""
        self.recounted_at = -math.inf
        """The same of the last one that looked at known blocks, too."""
        self.next_at = now()
        """When to look at the next directory, by `now`."""
        self._pause = 0.0
        """Seconds between two directories; 0 at full speed."""
        self._read = 0
        """Directories that this walk could read."""
        self._failures: dict[BlockDirectory, OSError] = {}
        """Those that it could not read, pieces or trees."""
        self._retry_pause = _RETRY_SECONDS
        self.unread: dict[BlockDirectory, OSError] = {}
        """The same of the last walk."""
        self._named: dict[Place, _Named] = {}
        """Blocks to look at later."""
        self._look_error = ""
        """Why the last of them could not be looked at."""
        self._is_cached = mount_of(tier_dir).is_nfs
        self._partial_bytes: dict[BlockDirectory, int] = {}
        """Bytes of the partial files of each directory that had some when it was listed."""
        self._partials_age_seconds: float | None = None
        """Older partial files are removed; None removes none."""
        self.partials_problem = ""
        """Why a partial file could not be removed in this walk."""
        self.removed_partials = 0

    @property
    def share(self) -> float:
        """Share of the current walk that is done, from 0 to 1."""
        return 1 - len(self._pieces) / self._pieces_of_walk if self._pieces_of_walk else 0.0

    @property
    def problem(self) -> str:
        """Message about unreadable directories; empty without any."""
        if not self.unread:
            return ""
        more = f", and {len(self.unread) - 1} other places" if len(self.unread) > 1 else ""
        effect = "" if self.is_whole else "; under a budget or quota, engines store nothing until all was read once"
        return f"unread: {next(iter(self.unread.values()))}{more}; blocks there count as far as they are known{effect}"

    @property
    def partial_bytes(self) -> int:
        """Bytes of partial files."""
        return sum(self._partial_bytes.values())

    @property
    def unseen_bytes(self) -> int:
        """Bytes of blocks that journals say were stored and that the volume did not let the janitor look at."""
        largest = self._catalog.largest_bytes or math.inf
        return int(sum(min(named.size, largest) for named in self._named.values()))

    @property
    def look_problem(self) -> str:
        """Message about blocks that could not be looked at; empty without any."""
        count = sum(named.has_failed for named in self._named.values())
        return f"look: {count} blocks that journals name cannot be looked at: {self._look_error}" if count else ""

    def apply(self, digest: str, records: Sequence[Record]) -> None:
        """Take in records of a journal, after a look at each file that they say was stored or removed."""
        generation = self._catalog.generation(digest)
        noted: dict[Place, _Named] = {}
        for record in records:
            place, row = (digest, record.key), self._catalog.find(generation, record.key)
            used_ns = max(record.time_ns, noted[place].used_ns if place in noted else 0)
            if record.op == Op.STORED:
                noted[place] = _Named(0.0, used_ns, HEADER_BYTES + record.payload_bytes, record.lineage)
            elif record.op == Op.GONE:
                if row >= 0 and place not in noted:
                    noted[place] = _Named(0.0, lineage=NO_LINEAGE)
            elif record.op not in {Op.USED, Op.RETAINED}:
                continue
            # A retained block counts as used when its time is over.
            elif row >= 0:
                self._catalog.use(row, record.time_ns)
            elif place in noted:
                noted[place] = noted[place]._replace(used_ns=used_ns)
            else:
                self._look_later(place, _Named(self._now(), used_ns))
        self._look(noted)

    def resolve(self, may_go_on: Callable[[], bool]) -> None:
        """Look at the due blocks that journals named and that were not seen, and the unknown blocks before them."""
        while due := [place for place, named in self._named.items() if named.look_at <= self._now()]:
            for start in range(0, len(due), _FILES_AT_ONCE):
                if not may_go_on():
                    return
                self._look({place: self._named.pop(place) for place in due[start : start + _FILES_AT_ONCE]})

    def _look(self, named: Mapping[Place, _Named]) -> None:
        """Look at named blocks, and take in or forget them."""
        for place, found in self._look_at({place: each.lineage for place, each in named.items()}):
            (digest, key), each = place, named[place]
            generation = self._catalog.generation(digest)
            row = self._catalog.find(generation, key)
            if isinstance(found, OSError):
                self._look_error = str(found)
                retry_at, size = self._now() + _RETRY_SECONDS, 0 if row >= 0 else each.size
                self._look_later(place, each._replace(look_at=retry_at, size=size, has_failed=True))
            elif found is not None:
                row = self._add(place, found)
                if each.used_ns:
                    self._catalog.use(row, each.used_ns)
                before = key._replace(hash=found.lineage.parent)
                # Until everything was walked once, the walk finds the blocks before this one.
                if before.hash and self.is_counted and self._catalog.find(generation, before) < 0:
                    self._look_later((digest, before), _Named(self._now()))
            else:
                self._catalog.forget([row] if row >= 0 else [])
                if self._is_cached and each.lineage is not None:
                    self._look_later(place, _Named(self._now() + _CACHED_SECONDS, each.used_ns))

    def hurry(self, since: float) -> None:
        """Walk as fast as possible, and from the beginning unless the present walk began after `since`."""
        if self._is_walking and self._began_at > since:
            self._pause = 0.0
        elif self._now() >= self._rested_at:
            self._is_walking, self._is_hurried = False, True
        self.next_at = min(self.next_at, max(self._now(), self._rested_at))

    def recount(self) -> None:
        """Walk as fast as possible from the beginning, and look at known blocks, too."""
        self._is_walking, self._is_hurried, self._is_thorough = False, True, True
        self.next_at = self._now()

    def step(
        self,
        digests: Iterable[str],
        *,
        verify_seconds: float,
        partials_age_seconds: float | None,
        may_go_on: Callable[[], bool],
    ) -> None:
        """Look at the due pieces; raise OSError if hardly any can be read, and begin anew later.

        For calls at `next_at` or later. Partial files of that age are removed.
        """
        self._partials_age_seconds = partials_age_seconds
        if not self._is_walking:
            self._begin(digests, verify_seconds)
        while self._pieces and self._now() >= self.next_at and may_go_on():
            began = self._now()
            some = [
                self._pieces.popleft() for _ in range(min(1 if self._pause else _PIECES_AT_ONCE, len(self._pieces)))
            ]
            for listing in self._pool.map(lambda piece: list_piece(self._fs, self._tier_dir, piece), some):
                self._visit(listing)
            if self._pause:
                ended = self._now()
                self.next_at = ended + max(self._pause, 1 / _PIECES_PER_SECOND, _REST * (ended - began))
        if not self._pieces:
            self._end()

    def _begin(self, digests: Iterable[str], verify_seconds: float) -> None:
        self._read, self._failures = 0, {}
        self._began_at = self._now()
        self._catalog.begin_walk()
        self._pieces.clear()
        self.partials_problem = ""
        digests = set(digests)
        self._partial_bytes = {
            piece: size for piece, size in self._partial_bytes.items() if piece.generation in digests
        }
        is_slow = self.is_counted and not self._is_hurried
        self._is_walking, self._is_hurried = True, False
        trees = deque(BlockDirectory(digest, tree) for digest in sorted(digests) for tree in (BLOCKS, TENANTS))
        while trees:
            for child in self._visit(list_piece(self._fs, self._tier_dir, trees.popleft())):
                (trees if child.is_tree else self._pieces).append(child)
        self._pieces_of_walk = len(self._pieces)
        self._pause = verify_seconds / max(1, len(self._pieces)) if is_slow and not self._failures else 0.0
        self.next_at = self._now()

    def _end(self) -> None:
        """End a walk. One after unreadable directories follows soon, at full speed, and then more and more seldom."""
        self._is_walking = False
        self.unread = self._failures
        self._is_hurried |= bool(self.unread)
        self.next_at = max(self.next_at, self._now() + (self._retry_pause if self.unread else self._pause))
        # Engines wait for the first count.
        longest = _LONGEST_RETRY_SECONDS if self.is_counted else _RETRY_SECONDS
        self._retry_pause = min(2 * self._retry_pause, longest) if self.unread else _RETRY_SECONDS
        self._rested_at = self._now() + _HURRY_REST * (0.0 if self._pause else self._now() - self._began_at)
        if len(self.unread) > self._read:
            raise next(iter(self.unread.values()))
        self._fs.require_mount(self._tier_dir)
        self._catalog.end_walk(self._is_unread)
        self.is_counted, self.is_whole, self.walked_at = True, self.is_whole or not self.unread, self._began_at
        if self._is_thorough:
            self.recounted_at, self._is_thorough = self._began_at, False

    def _visit(self, listing: Listing) -> list[BlockDirectory]:
        """Compare a directory with the catalog; return the directories in it."""
        piece = listing.piece
        generation = self._catalog.generation(piece.generation) if listing.keys else -1
        rows = {key: self._catalog.find(generation, key) for key in listing.keys}
        self._catalog.see([row for row in rows.values() if row >= 0])
        if listing.error is not None:
            self._fail(piece, listing.error)
        wanted = {(piece.generation, key): None for key, row in rows.items() if row < 0}
        known = {(piece.generation, key): NO_LINEAGE for key, row in rows.items() if row >= 0 and self._is_thorough}
        looked = dict(self._look_at({**wanted, **known}))
        # A file that cannot be opened in two walks is counted without its header, and keeps no other from being stored.
        if self.is_counted and piece in self.unread:
            again = {place: NO_LINEAGE for place, found in looked.items() if isinstance(found, OSError)}
            looked |= self._look_at(again)
        for place, found in looked.items():
            if isinstance(found, OSError):
                self._fail(piece, found)
            elif found is not None:
                self._add(place, found)
            elif place in known:
                self._catalog.forget([rows[place[1]]])
        self._look_at_partials(listing)
        self._read += piece not in self._failures and not piece.is_tree
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

    def _fail(self, piece: BlockDirectory, error: OSError) -> None:
        """Record an unreadable directory."""
        self._failures.setdefault(piece, error)
        # It is reported at the end of the walk, and tried again soon afterwards.
        self._pause, self.next_at = 0.0, self._now()

    def _is_unread(self, digest: str, key: BlockKey) -> bool:
        """Return whether a block lies below an unreadable directory: then it is not known whether it is gone."""
        path = block_path(key)
        while path := path.rpartition("/")[0]:
            if (digest, path) in self._failures:
                return True
        return False

    def _look_later(self, place: Place, named: _Named) -> None:
        if len(self._named) < _MOST_NAMED:
            before = self._named.get(place, named)
            used_ns, size = max(named.used_ns, before.used_ns), max(named.size, before.size)
            self._named[place] = named._replace(used_ns=used_ns, size=size)

    def _look_at(self, lineages: Mapping[Place, Lineage | None]) -> Iterator[tuple[Place, Looked]]:
        """Look at several blocks at once, a bundle a thread, since handing over work takes time, too."""

        def look(places: Sequence[Place]) -> list[tuple[Place, Looked]]:
            roots = ((place, f"{self._tier_dir}/{place[0]}") for place in places)
            return [(place, look_at_block(self._fs, root, place[1], lineages[place])) for place, root in roots]

        places = list(lineages)
        bundles = [places[start : start + _BUNDLE] for start in range(0, len(places), _BUNDLE)]
        for found in self._pool.map(look, bundles):
            yield from found

    def _add(self, place: Place, found: BlockFile) -> int:
        """Take in a block that was looked at; return its row. A file from the future must not stay for ever."""
        digest, key = place
        written_ns, generation = min(found.mtime_ns, self._clock()), self._catalog.generation(digest)
        return self._catalog.add(generation, key, size=found.size, created_ns=written_ns, lineage=found.lineage)
