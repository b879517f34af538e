# SPDX-License-Identifier: Apache-2.0
"""Removes the blocks that the policy chose, in batches, each file looked at again just before.

Blocks used since the decision stay, with all blocks before them. A prefix goes from its end: a process that dies at any
system call leaves no hole in it.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import NamedTuple, Self

from kvtier_connector.janitor.catalog import Catalog
from kvtier_connector.janitor.policy import Choice, EvictionReason
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import block_path

BATCH = 1024
"""Files between two reads of the journals."""
_BUNDLES = 16
"""Of one batch, each for one thread, since handing over work takes time, too."""
_MOST_REFUSALS = 8
"""Of one bundle: a few files that cannot be removed must not keep all others, and a volume that refuses all will."""


class ActiveFileSystem(FileSystem):
    """Another file system, rooted at the tier's directory, that removes only while this janitor is the active one."""

    def __init__(self, fs: FileSystem, base: str, *, may_act: Callable[[], bool]) -> None:
        """Store the settings; `may_act` is called before each removal, from any thread."""
        self._fs = fs.rooted(base)
        self._may_act = may_act
        for name in set(vars(FileSystem)) - set(vars(ActiveFileSystem)):
            if not name.startswith("_"):
                setattr(self, name, getattr(self._fs, name))

    def rooted(self, directory: str) -> Self:  # noqa: ARG002 - links are refused below the whole tier already
        """Return this file system."""
        return self

    def unlink(self, path: str) -> None:
        """Remove a name; raise PermissionError if another janitor may be the active one."""
        self._refuse_unless_active(path)
        self._fs.unlink(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory; raise PermissionError likewise."""
        self._refuse_unless_active(path)
        self._fs.rmdir(path)

    def _refuse_unless_active(self, path: str) -> None:
        if not self._may_act():
            raise PermissionError(errno.EPERM, "not removed: this janitor does not hold the Lease of the tier", path)


class Fate(NamedTuple):
    """Result for a chosen block."""

    row: int
    freed_bytes: int
    """0 if its file was gone already, or stays."""
    rewritten_ns: int = 0
    """When it was written anew meanwhile, so that it stays; 0 if it was not."""


class Eviction:
    """One decision in progress. Owned by the catalog's thread, which does not compact the catalog meanwhile."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        choice: Choice,
        *,
        catalog: Catalog,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        clock: Callable[[], int],
    ) -> None:
        """Store the decision; `clock` is the volume's time."""
        self._catalog, self._clock = catalog, clock
        self._fs, self._tier_dir, self._pool = fs, tier_dir, pool
        parts = [(why, rows[catalog.is_refused(rows) == is_last]) for is_last in (False, True) for why, rows in choice]
        self._batches = deque(
            (reason, rows[start : start + BATCH].tolist())
            for reason, rows in parts
            for start in range(0, rows.size, BATCH)
        )
        self._count = len(self._batches)
        self._spared: set[int] = set()
        catalog.touched.clear()
        self.removed: Counter[str] = Counter()
        """Blocks by reason."""
        self.freed_bytes: Counter[str] = Counter()
        self.spared = 0

    @property
    def is_done(self) -> bool:
        """Whether every chosen block was dealt with."""
        return not self._batches

    @property
    def share(self) -> float:
        """Share of the chosen blocks that were dealt with, from 0 to 1."""
        return 1 - len(self._batches) / max(1, self._count)

    def step(self) -> None:
        """Remove the next batch; read the journals first.

        Raises:
            OSError: the volume refuses to remove anything.
        """
        self._spare(self._catalog.touched)
        self._catalog.touched.clear()
        reason, batch = self._batches.popleft()
        rows = [row for row in batch if self._may_go(row, reason)]
        fates, refusal = self._remove(rows)
        # Files that were refused, and those before one that was written anew.
        self._spare(left := set(rows) - {fate.row for fate in fates})
        for fate in fates:
            if fate.rewritten_ns:
                self._spare([fate.row])
                self._catalog.rows["created"][fate.row] = fate.rewritten_ns
                self.spared += 1
                continue
            self._catalog.forget([fate.row])
            if fate.freed_bytes:
                self.removed[reason.value] += 1
                self.freed_bytes[reason.value] += fate.freed_bytes
        if refusal is not None:
            self._catalog.refused.update(self._catalog.rows["name"][[*left]].tolist())
            if not fates:
                raise refusal

    def _may_go(self, row: int, reason: EvictionReason) -> bool:
        if not self._catalog.rows["is_alive"][row]:
            return False
        # Time to live is a promise: it holds for used blocks, too.
        is_spared = reason is not EvictionReason.TTL and row in self._spared
        self.spared += is_spared
        return not is_spared

    def _chains(self, rows: list[int]) -> list[list[int]]:
        """Put blocks of one prefix together, in the order of the decision: the end of a prefix first."""
        chains: list[list[int]] = []
        chain_of: dict[int, list[int]] = {}
        for row in reversed(rows):
            chain = chain_of.get(self._catalog.parent_of(row))
            if chain is None:
                chain = []
                chains.append(chain)
            chain_of[row] = chain
            chain.append(row)
        # The least recently used prefix first, too.
        return [chain[::-1] for chain in reversed(chains)]

    def _spare(self, rows: Iterable[int]) -> None:
        """Keep these blocks, and all blocks before them."""
        for row in rows:
            while row >= 0 and row not in self._spared:
                self._spared.add(row)
                row = self._catalog.parent_of(row)  # noqa: PLW2901 - up the prefix

    def _remove(self, rows: list[int]) -> tuple[list[Fate], OSError | None]:
        """Remove files, several chains at once; return those that were tried and not refused, and a refusal.

        The files of a chain go one after the other, and none after one that stays. So a process that dies leaves no
        block without those before it, and neither does a file that was written anew.
        """
        paths = {
            row: f"{self._tier_dir}/{self._catalog.digest(row)}/{block_path(self._catalog.key(row))}" for row in rows
        }
        written_ns = {row: int(self._catalog.rows["created"][row]) for row in rows}
        now_ns = self._clock()

        def remove(row: int) -> Fate:
            try:
                status = self._fs.stat(paths[row])
                # By the volume's clock: a younger file is another one, and one of a later time tells nothing.
                if written_ns[row] < status.st_mtime_ns <= now_ns:
                    return Fate(row, 0, status.st_mtime_ns)
                self._fs.unlink(paths[row])
            except (FileNotFoundError, NotADirectoryError):
                return Fate(row, 0)
            return Fate(row, status.st_size)

        def remove_bundle(chains: list[list[int]]) -> tuple[list[Fate], list[OSError]]:
            fates, refusals = list[Fate](), list[OSError]()
            for chain in chains:
                try:
                    for row in chain:
                        fates.append(remove(row))
                        if fates[-1].rewritten_ns:
                            break
                except OSError as error:
                    refusals.append(error)
                if len(refusals) == _MOST_REFUSALS:
                    # The next ones would most likely wait for the same answer.
                    break
            return fates, refusals

        chains = self._chains(rows)
        done = list(self._pool.map(remove_bundle, [chains[start::_BUNDLES] for start in range(_BUNDLES)]))
        refusals = [error for _, some in done for error in some]
        return [fate for fates, _ in done for fate in fates], next(iter(refusals), None)
