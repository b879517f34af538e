# SPDX-License-Identifier: Apache-2.0
"""Keeps the ledger true to the files: one walk as fast as it goes, then one over days, some directories at a time."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor

from kvtier_connector.janitor.ledger import Ledger
from kvtier_connector.janitor.walk import (
    Found,
    Met,
    Piece,
    find_pieces,
    list_directories,
    list_files,
    list_piece,
    meet_all,
)
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey

_MEET_AT_ONCE = 512
_PIECES_AT_ONCE = 64
_DIRECTORIES_AT_ONCE = 16
"""Of the walk over days: a step for a small part of the time, so that it costs the same at any time."""
_DIRECTORIES_PER_SECOND = 6.0
"""What the walk over days looks at, at most, however long it takes then: a directory is five system calls."""


class Patrol:
    """The walks over all generations of a tier. Owned by the thread of the ledger."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        ledger: Ledger,
        *,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        walked_ns: int = 0,
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; `walked_ns` says when the last complete walk of an earlier process began."""
        self._ledger = ledger
        self._fs = fs
        self._tier_dir = tier_dir
        self._pool = pool
        self._clock = clock
        self._now = now
        self._pieces: deque[Piece] = deque()
        self._piece = Piece("", "")
        self._directories: deque[str] = deque()
        """Those of `_piece` that the walk over days has yet to look at."""
        self._is_walking = False
        self._began_ns = 0
        self._next_at = now()
        self._pause_of_piece = 0.0
        self._pause = 0.0
        """Seconds between two steps of the walk over days; 0 for the one as fast as it goes."""
        self.walked_ns = walked_ns
        """When the last complete walk began; 0 before the first."""
        self.partials: deque[str] = deque(maxlen=1 << 16)
        """Files of writers at work or dead, relative to the tier's directory, for somebody to look at."""

    @property
    def is_counted(self) -> bool:
        """Whether every block was seen once."""
        return self.walked_ns > 0

    @property
    def next_at(self) -> float:
        """When there is something to do again, by `now`."""
        return self._next_at

    def step(self, digests: Iterable[str], *, verify_seconds: float, may_go_on: Callable[[], bool]) -> None:
        """Look at the pieces that are due; raise OSError if the volume does not answer: the walk begins anew then."""
        if self._now() < self._next_at:
            return
        try:
            if not self._is_walking:
                self._begin(digests, verify_seconds)
            self._walk(may_go_on)
        except OSError:
            self._is_walking = False
            self._next_at = self._now() + 60.0
            raise
        if not self._pieces and not self._directories and self._is_walking:
            self._ledger.end_walk(self._began_ns)
            self._is_walking = False
            self.walked_ns = self._began_ns

    def restart(self) -> None:
        """Walk anew and at once, as at the first start."""
        self._is_walking, self.walked_ns, self._next_at = False, 0, self._now()

    def meet(self, digest: str, keys: Iterable[BlockKey]) -> None:
        """Look at blocks that the ledger does not know; raise OSError if the volume does not answer."""
        generation = self._ledger.generation(digest)
        for met in meet_all(self._pool, self._fs, f"{self._tier_dir}/{digest}", keys):
            self._add(generation, met)

    def _begin(self, digests: Iterable[str], verify_seconds: float) -> None:
        self._pieces = deque(piece for digest in digests for piece in find_pieces(self._fs, self._tier_dir, digest))
        self._directories.clear()
        self._began_ns = self._clock()
        self._pause = self._pause_of_piece = verify_seconds / max(1, len(self._pieces)) if self.is_counted else 0.0
        self._is_walking = True
        self._ledger.begin_walk()
        if not self._pieces:
            self._next_at = self._now() + (verify_seconds if self.is_counted else 0.0)

    def _walk(self, may_go_on: Callable[[], bool]) -> None:
        if self._pause:
            self._look_at_some()
            return
        while self._pieces and may_go_on():
            some = [self._pieces.popleft() for _ in range(min(_PIECES_AT_ONCE, len(self._pieces)))]
            for found in self._pool.map(lambda piece: list_piece(self._fs, self._tier_dir, piece), some):
                self._compare(found)

    def _look_at_some(self) -> None:
        """Look at the next few directories of a walk over days, and say when to look at more."""
        if not self._directories and self._pieces:
            self._piece = self._pieces.popleft()
            self._directories.extend(list_directories(self._fs, self._tier_dir, self._piece))
            self._pause = self._pause_of_piece / max(1, math.ceil(len(self._directories) / _DIRECTORIES_AT_ONCE))
        some = [self._directories.popleft() for _ in range(min(_DIRECTORIES_AT_ONCE, len(self._directories)))]
        self._compare(list_files(self._fs, self._tier_dir, self._piece, some))
        self._next_at = self._now() + max(self._pause, len(some) / _DIRECTORIES_PER_SECOND)

    def _compare(self, found: Found) -> None:
        digest = found.piece.generation
        generation = self._ledger.generation(digest)
        unknown = []
        for key in found.keys:
            row = self._ledger.find(generation, key)
            if row >= 0:
                self._ledger.see(row)
            else:
                unknown.append(key)
        for some in _parts(unknown):
            self.meet(digest, some)
        self.partials.extend(f"{digest}/{path}" for path in found.partials)

    def _add(self, generation: int, met: Met) -> None:
        header = met.header
        created_ns = header.created_ns if header is not None else met.mtime_ns
        # A clock far ahead must not keep a block for ever.
        created_ns = min(created_ns, self._clock())
        self._ledger.add(
            generation,
            met.key,
            size=met.size,
            created_ns=created_ns,
            used_ns=created_ns,
            lineage=header.lineage if header is not None else NO_LINEAGE,
        )


def _parts(keys: list[BlockKey]) -> Iterator[list[BlockKey]]:
    for start in range(0, len(keys), _MEET_AT_ONCE):
        yield keys[start : start + _MEET_AT_ONCE]


def remove_old_partials(
    fs: FileSystem, tier_dir: str, paths: deque[str], *, before_ns: int, may_go_on: Callable[[], bool]
) -> tuple[int, int]:
    """Remove those partial files that nobody wrote to since `before_ns`; return how many, and their bytes.

    Young ones are dropped from `paths`: the next walk finds what is left of them.
    """
    files = size = 0
    while paths and may_go_on():
        path = f"{tier_dir}/{paths.popleft()}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = fs.stat(path)
            if status.st_mtime_ns <= before_ns:
                fs.unlink(path)
                files, size = files + 1, size + status.st_size
    return files, size
