# SPDX-License-Identifier: Apache-2.0
"""Walks one generation piece by piece: which blocks, partial files and trees of tenants it has.

A piece is one of the 4096 directories below ``blocks``, of the tier or of a tenant. Names only; a file that the caller
does not know is opened for its header, once in its life. What cannot be read is named, and the rest is read.

Keeps the ledger true to the files: one walk as fast as it goes, then one after another, a directory at a time.

What cannot be read is stated and tried again; until then its blocks count as they are known.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier_connector.janitor.catalog import Ledger, rows_below
from kvtier_connector.store.filesystems import mount_of
from kvtier_connector.store.fs import NO_FILE, READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.header import HEADER_BYTES, Header, decode_header
from kvtier_connector.store.layout import (
    BLOCKS,
    NO_LINEAGE,
    TENANTS,
    BlockKey,
    block_path,
    is_partial,
    is_tenant,
    parse_block_path,
    tenant_directory,
    tenant_of,
)

_PIECE = re.compile("[0-9a-f]{3}")
_NO_BLOCK = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, *NO_FILE}


class Piece(NamedTuple):
    """One directory of blocks."""

    generation: str
    """Digest: the name of the directory beside the others."""
    path: str
    """Relative to the generation's root."""


class Unread(NamedTuple):
    """A directory that could not be read, or a file in it."""

    path: str
    """Relative to the generation's root."""
    error: OSError


@dataclass(slots=True)
class Found:
    """What a piece holds."""

    piece: Piece
    keys: list[BlockKey] = field(default_factory=list)
    partials: dict[str, int] = field(default_factory=dict)
    """Bytes of half-written files, by path relative to the generation's root."""
    error: OSError | None = None
    """Why it could not be read."""


class Met(NamedTuple):
    """A block that was opened for its header."""

    key: BlockKey
    size: int
    mtime_ns: int
    header: Header | None
    """None for one that is damaged, or of another release: it takes room all the same."""


def list_own(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    """List a directory, nothing if there is none; raise OSError if it cannot be looked at.

    A link is not followed: whoever can write to the volume could have the janitor remove what lies somewhere else.
    """
    try:
        return fs.scandir(path) if stat.S_ISDIR(fs.stat(path).st_mode) else []
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_tenants(fs: FileSystem, root: str) -> list[str]:
    """Return the tenants that have a tree under the root; raise OSError if it cannot be looked at."""
    entries = list_own(fs, f"{root}/{TENANTS}")
    return sorted(entry.name for entry in entries if is_tenant(entry.name) and entry.is_dir(follow_symlinks=False))


def find_pieces(fs: FileSystem, tier_dir: str, generation: str) -> tuple[list[Piece], list[Unread]]:
    """Return the pieces of a generation, and which trees cannot be looked at."""
    root = f"{tier_dir}/{generation}"
    pieces: list[Piece] = []
    unread: list[Unread] = []
    tenants: list[str] = []
    try:
        tenants = find_tenants(fs, root)
    except OSError as error:
        unread.append(Unread(TENANTS, error))
    for tenant in ["", *tenants]:
        blocks = f"{tenant_directory(tenant)}{BLOCKS}"
        try:
            entries = list_own(fs, f"{root}/{blocks}")
        except OSError as error:
            unread.append(Unread(blocks, error))
            continue
        names = [each.name for each in entries if _PIECE.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
        pieces += [Piece(generation, f"{blocks}/{name}") for name in sorted(names)]
    return pieces, unread


def list_piece(fs: FileSystem, tier_dir: str, piece: Piece) -> Found:
    """Return what the piece holds."""
    found = Found(piece)
    try:
        entries = list_own(fs, f"{tier_dir}/{piece.generation}/{piece.path}")
    except OSError as error:
        found.error = error
        return found
    for entry in entries:
        key = parse_block_path(f"{piece.path}/{entry.name}")
        if not entry.is_file(follow_symlinks=False):
            # A link, a pipe or a directory takes no room, and an engine that wants its place removes it.
            continue
        if key is not None:
            found.keys.append(key)
        elif is_partial(entry.name):
            path = f"{piece.path}/{entry.name}"
            # One that is renamed meanwhile is a block.
            with contextlib.suppress(OSError):
                found.partials[path] = fs.stat(f"{tier_dir}/{piece.generation}/{path}").st_size
    return found


def meet(fs: FileSystem, root: str, key: BlockKey) -> Met | None:
    """Open a block for its header; None if it is gone, or no file. Raises OSError if the volume does not answer."""
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
        if error.errno in _NO_BLOCK:
            return None
        raise
    is_sound = isinstance(header, Header) and header.key == key
    return Met(key, status.st_size, status.st_mtime_ns, header if is_sound and isinstance(header, Header) else None)


def look_all(pool: Executor, fs: FileSystem, paths: Iterable[str]) -> list[os.stat_result | OSError | None]:
    """Look at several files at once, without opening them: None without a file, OSError if the volume refuses."""

    def look(path: str) -> os.stat_result | OSError | None:
        try:
            status = fs.stat(path)
        except OSError as error:
            return None if error.errno in _NO_BLOCK else error
        return status if stat.S_ISREG(status.st_mode) else None

    return list(pool.map(look, paths))


def meet_all(pool: Executor, fs: FileSystem, root: str, keys: Iterable[BlockKey]) -> tuple[list[Met], list[Unread]]:
    """Do as `meet` does for many, several at once; return those there are, and which directories have others."""

    def try_to_meet(key: BlockKey) -> Met | Unread | None:
        try:
            return meet(fs, root, key)
        except OSError as error:
            return Unread(block_path(key).rpartition("/")[0], error)

    answers = list(pool.map(try_to_meet, keys))
    return [met for met in answers if isinstance(met, Met)], [each for each in answers if isinstance(each, Unread)]


_MEET_AT_ONCE = 512
_CACHED_SECONDS = 120.0
"""An NFS client may have in mind for so long that there is no file."""
_PIECES_AT_ONCE = 64
_PIECES_PER_SECOND = 6.0
"""Most that a walk after the first looks at, however long it takes then."""
_REST = 20
"""So many times as long as one piece takes, such a walk rests after it: a twentieth of a core, or of the volume."""
_PARTIALS_SECONDS = 60.0
_MOST_PARTIALS = 1 << 16
_AGAIN_SECONDS = 60.0
_LONGEST_AGAIN_SECONDS = 3600.0
_MOST_UNREAD = 4096
"""Directories that are tried again before the next walk."""


class Patrol:
    """The walks over all generations of a tier. Owned by the thread of the ledger."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        ledger: Ledger,
        *,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings."""
        self._ledger = ledger
        self._fs = fs
        self._tier_dir = tier_dir
        self._pool = pool
        self._clock = clock
        self._now = now
        self._pieces: deque[Piece] = deque()
        self._pieces_of_walk = 0
        self._is_walking = False
        self._began_ns = 0
        self._next_at = now()
        self._pause = 0.0
        """Seconds between two pieces; 0 for the walk as fast as it goes."""
        self._read = self._failed = 0
        """Directories that this walk could read, and that it could not."""
        self._failure: OSError | None = None
        """Why it could not, the first time."""
        self._again: deque[Piece] = deque()
        """Pieces with what could not be read, whose turn it is to be tried again."""
        self._again_at = math.inf
        self._again_pause = _AGAIN_SECONDS
        self.unread: dict[tuple[str, str], str] = {}
        """Directories that could not be read, by generation and path, and the system's words."""
        self.walked_ns = 0
        """When the last complete walk began; 0 before the first."""
        self._unsure: NDArray[np.uint64] | None = None
        """Names of the blocks that `confirm` has yet to look at; None before it begins."""
        self._refused: OSError | None = None
        self._cached_ns = int(_CACHED_SECONDS * 1e9) if mount_of(tier_dir).is_nfs else 0
        self.partials: dict[str, int] = {}
        """Bytes of the half-written files of writers at work or dead, by path relative to the tier's directory."""
        self._partials_due: deque[str] = deque()
        self._partials_at = now()

    @property
    def is_counted(self) -> bool:
        """Whether every block that can be seen was seen once."""
        return self.walked_ns > 0

    @property
    def share(self) -> float:
        """How much of the walk that is under way is done, from 0 to 1."""
        return 1 - len(self._pieces) / self._pieces_of_walk if self._pieces_of_walk else 0.0

    @property
    def next_at(self) -> float:
        """When there is something to do again, by `now`."""
        return 0.0 if self._again else min(self._next_at, self._again_at)

    @property
    def problem(self) -> str:
        """What cannot be read, for people; empty if everything can."""
        if not self.unread:
            return ""
        more = f", and {len(self.unread) - 1} other places" if len(self.unread) > 1 else ""
        return f"unread: {next(iter(self.unread.values()))}{more}; blocks there count as far as they are known"

    def resume(self, walked_ns: int, *, unread: Collection[tuple[str, str, str]]) -> None:
        """Go on where an earlier process was, whose ledger this is."""
        self.walked_ns = walked_ns
        self.unread = {(generation, path): error for generation, path, error in unread}
        self._again_at = self._now() if self.unread else math.inf

    def step(self, digests: Iterable[str], *, verify_seconds: float, may_go_on: Callable[[], bool]) -> None:
        """Look at the pieces that are due; raise OSError if hardly any can be read: the walk begins anew then."""
        self._try_again(may_go_on)
        if self._now() < self._next_at:
            return
        if not self._is_walking:
            self._begin(digests, verify_seconds)
        self._walk(may_go_on)
        if self._pieces:
            return
        self._is_walking = False
        if self._failure is not None and self._failed > self._read:
            self._next_at = self._now() + _AGAIN_SECONDS
            raise self._failure
        self._ledger.end_walk()
        self.walked_ns = self._began_ns

    def confirm(self, may_go_on: Callable[[], bool]) -> bool:
        """Look at the files of all blocks that are known from journals only; say whether that is done.

        A block without a file is forgotten. The next call goes on where this one had no more time.

        Raises:
            OSError: at the end, if some could not be looked at; they stay as they are.
        """
        if self._unsure is None:
            self._unsure, self._refused, self._ledger.has_suspects = self._ledger.unconfirmed_names(), None, False
        is_first = True
        while self._unsure.size and (is_first or may_go_on()):
            some, self._unsure = self._unsure[:_MEET_AT_ONCE], self._unsure[_MEET_AT_ONCE:]
            self._confirm([row for row in map(self._ledger.find_name, some.tolist()) if row >= 0])
            is_first = False
        if self._unsure.size:
            return False
        self._unsure = None
        if self._refused is not None:
            raise self._refused
        return True

    def _confirm(self, rows: list[int]) -> None:
        ledger, now_ns = self._ledger, self._clock()
        paths = [
            f"{self._tier_dir}/{ledger.generations[int(ledger.rows['generation'][row])]}/{block_path(ledger.key(row))}"
            for row in rows
        ]
        for row, found in zip(rows, look_all(self._pool, self._fs, paths), strict=True):
            if isinstance(found, OSError):
                self._refused = self._refused or found
            elif found is not None:
                ledger.confirm(row, size=found.st_size, created_ns=min(found.st_mtime_ns, now_ns))
            elif int(ledger.rows["used"][row]) <= now_ns - self._cached_ns:
                ledger.forget([row])
            else:
                ledger.has_suspects = True

    def remove_partials(self, before_ns: int, may_go_on: Callable[[], bool]) -> int:
        """Remove half-written files without a write since `before_ns`, and measure the others, once a minute.

        Returns:
            The number of files removed.

        Raises:
            OSError: at the end, if the volume refused some.
        """
        if not self._partials_due and self._now() >= self._partials_at:
            self._partials_at = self._now() + _PARTIALS_SECONDS
            self._partials_due.extend(self.partials)
        removed, failed = 0, None
        while self._partials_due and may_go_on():
            path = self._partials_due.popleft()
            try:
                status = self._fs.stat(f"{self._tier_dir}/{path}")
                self.partials[path] = status.st_size
                if status.st_mtime_ns <= before_ns:
                    self._fs.unlink(f"{self._tier_dir}/{path}")
                    removed += 1
                    del self.partials[path]
            except (FileNotFoundError, NotADirectoryError):
                self.partials.pop(path, None)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return removed

    def meet(self, digest: str, keys: Iterable[BlockKey], may_go_on: Callable[[], bool]) -> list[BlockKey]:
        """Look at blocks that the ledger does not know, and at those before them that it does not know either.

        An engine may have died before it told of them. Those that cannot be looked at are tried again later. Returned
        are those before them for which there was no time; until everything has been walked once, the walk finds them.
        """
        wanted, is_first = list(keys), True
        while wanted and (is_first or may_go_on()):
            met, unread = self._meet(digest, wanted)
            self._keep(digest, unread)
            wanted = self._unknown_before(digest, met) if self.is_counted else []
            is_first = False
        return wanted

    def _begin(self, digests: Iterable[str], verify_seconds: float) -> None:
        self._read, self._failed, self._failure = 0, 0, None
        self._began_ns = self._clock()
        self._ledger.begin_walk()
        pieces: list[Piece] = []
        for digest in digests:
            some, unread = find_pieces(self._fs, self._tier_dir, digest)
            pieces += some
            self._fail(digest, unread)
        self._pause = verify_seconds / max(1, len(pieces)) if self.is_counted else 0.0
        self._pieces = deque(pieces)
        self._pieces_of_walk = len(self._pieces)
        self._is_walking = True
        if not pieces:
            self._next_at = self._now() + (verify_seconds if self.is_counted else 0.0)

    def _walk(self, may_go_on: Callable[[], bool]) -> None:
        if self._pause:
            self._look_at_one()
            return
        while self._pieces and may_go_on():
            for found in self._list(self._pieces):
                self._visit(found)

    def _list(self, pieces: deque[Piece]) -> Iterator[Found]:
        """Take some of the pieces, and look at all that they hold."""
        some = [pieces.popleft() for _ in range(min(_PIECES_AT_ONCE, len(pieces)))]
        return self._pool.map(lambda piece: list_piece(self._fs, self._tier_dir, piece), some)

    def _look_at_one(self) -> None:
        """Look at the next directory, and say when to look at another one."""
        began = self._now()
        if self._pieces:
            self._visit(list_piece(self._fs, self._tier_dir, self._pieces.popleft()))
        ended = self._now()
        self._next_at = ended + max(self._pause, 1 / _PIECES_PER_SECOND, _REST * (ended - began))

    def _visit(self, found: Found) -> None:
        unread = self._compare(found)
        self._read += not unread
        self._fail(found.piece.generation, unread)

    def _fail(self, digest: str, unread: Collection[Unread]) -> None:
        for each in unread:
            self._failed += 1
            self._failure = self._failure or each.error
        self._keep(digest, unread)

    def _compare(self, found: Found) -> list[Unread]:
        """Learn of the blocks there, and return what could not be read."""
        digest, path = found.piece
        unread = [] if found.error is None else [Unread(path, found.error)]
        unknown = []
        generation = self._ledger.generation(digest) if found.keys else -1
        for key in found.keys:
            row = self._ledger.find(generation, key)
            if row >= 0:
                self._ledger.see(row)
            else:
                unknown.append(key)
        for some in _parts(unknown):
            unread += self._meet(digest, some)[1]
        for path, size in found.partials.items():
            if len(self.partials) < _MOST_PARTIALS:
                self.partials[f"{digest}/{path}"] = size
        if found.error is None:
            self.unread.pop((digest, path), None)
        return unread

    def _keep(self, digest: str, unread: Collection[Unread]) -> None:
        """Note what cannot be read, and take its blocks for seen: it is not known that they are gone."""
        if not unread:
            return
        if self._again_at == math.inf:
            self._again_pause = _AGAIN_SECONDS
            self._again_at = self._now() + self._again_pause
        for path, error in unread:
            if len(self.unread) < _MOST_UNREAD:
                self.unread[digest, path] = str(error)
        self._ledger.see(rows_below(self._ledger, self._ledger.generation(digest), {each.path for each in unread}))

    def _try_again(self, may_go_on: Callable[[], bool]) -> None:
        """Look once more at what could not be read, first after a minute and then more and more seldom."""
        if self._now() >= self._again_at:
            self._again.extend(dict.fromkeys(self._pieces_unread()))
            self._again_pause = min(2 * self._again_pause, _LONGEST_AGAIN_SECONDS)
            self._again_at = self._now() + self._again_pause
        while self._again and may_go_on():
            for found in self._list(self._again):
                self._forget_unread(found.piece)
                self._keep(found.piece.generation, self._compare(found))
        if not self.unread:
            self._again_at = math.inf

    def _pieces_unread(self) -> Iterator[Piece]:
        for digest, path in list(self.unread):
            if path.startswith(f"{tenant_directory(tenant_of(f'{path}/'))}{BLOCKS}/"):
                yield Piece(digest, path)
                continue
            pieces, unread = find_pieces(self._fs, self._tier_dir, digest)
            if path not in {each.path for each in unread}:
                del self.unread[digest, path]
                yield from (piece for piece in pieces if piece.path.startswith(f"{path}/"))

    def _forget_unread(self, piece: Piece) -> None:
        for digest, path in list(self.unread):
            if digest == piece.generation and f"{path}/".startswith(f"{piece.path}/"):
                del self.unread[digest, path]

    def _unknown_before(self, digest: str, met: Iterable[Met]) -> list[BlockKey]:
        headers = [(each.key, each.header) for each in met if each.header is not None]
        before = [key._replace(hash=header.lineage.parent) for key, header in headers if header.lineage.parent]
        generation = self._ledger.generation(digest) if before else -1
        return [key for key in before if self._ledger.find(generation, key) < 0]

    def _meet(self, digest: str, keys: Iterable[BlockKey]) -> tuple[list[Met], list[Unread]]:
        met, unread = meet_all(self._pool, self._fs, f"{self._tier_dir}/{digest}", keys)
        generation = self._ledger.generation(digest) if met else -1
        for each in met:
            self._add(generation, each)
        return met, unread

    def _add(self, generation: int, met: Met) -> None:
        header = met.header
        # A file from the future must not stay for ever.
        written_ns = min(met.mtime_ns, self._clock())
        self._ledger.add(
            generation,
            met.key,
            size=met.size,
            created_ns=written_ns,
            used_ns=written_ns,
            lineage=header.lineage if header is not None else NO_LINEAGE,
        )


def _parts(keys: list[BlockKey]) -> Iterator[list[BlockKey]]:
    for start in range(0, len(keys), _MEET_AT_ONCE):
        yield keys[start : start + _MEET_AT_ONCE]
