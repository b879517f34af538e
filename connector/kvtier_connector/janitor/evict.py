# SPDX-License-Identifier: Apache-2.0
"""Removes the blocks that the policy chose, in batches, each file looked at again just before.

Blocks used since the decision stay, with all blocks before them. A prefix goes from its end: a process that dies at any
system call leaves no hole in it.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Self

from kvtier_connector.janitor.catalog import Catalog
from kvtier_connector.janitor.policy import Choice, EvictionReason
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import block_path

BATCH = 1024
"""Files between two reads of the journals."""
_BUNDLE = 64
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


class Victim(NamedTuple):
    """A file to remove."""

    row: int
    path: str
    """Absolute."""
    written_ns: int
    """When the file was written, by the volume's clock: a younger file is another one."""
    now_ns: int
    """By the same clock: a file of a later time tells nothing."""


class Fate(NamedTuple):
    """Result for a victim."""

    row: int
    freed_bytes: int
    """0 if it was gone already, or stays."""
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
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the decision."""
        self._choice, self._catalog, self._clock = choice, catalog, clock
        self._fs, self._tier_dir, self._pool = fs, tier_dir, pool
        self._next = 0
        self._spared: set[int] = set()
        catalog.touched.clear()
        self.removed: Counter[str] = Counter()
        """Blocks by reason."""
        self.freed_bytes: Counter[str] = Counter()
        self.spared = 0

    @property
    def is_done(self) -> bool:
        """Whether every victim was dealt with."""
        return self._next >= self._choice.rows.size

    @property
    def share(self) -> float:
        """Share of the victims that were dealt with, from 0 to 1."""
        return self._next / max(1, self._choice.rows.size)

    def step(self) -> None:
        """Remove the next batch; read the journals first.

        Raises:
            OSError: the volume refuses to remove anything.
        """
        self._spare(self._catalog.touched)
        self._catalog.touched.clear()
        reason = self._choice.reason(self._next)
        end = min(self._next + BATCH, next(each for each in self._choice.ends if each > self._next))
        rows = [int(row) for row in self._choice.rows[self._next : end]]
        self._next = end
        victims = [self._victim(row) for row in rows if self._may_go(row, reason)]
        try:
            fates = remove_victims(self._pool, self._fs, self._chains(victims))
        except OSError:
            self._spare(victim.row for victim in victims)
            raise
        # Files that were refused, and those before one that was written anew.
        kept = {victim.row for victim in victims} - {fate.row for fate in fates}
        self._spare([*kept, *(fate.row for fate in fates if fate.rewritten_ns)])
        for fate in fates:
            if fate.rewritten_ns:
                self._catalog.rows["created"][fate.row] = fate.rewritten_ns
                self.spared += 1
                continue
            self._catalog.forget([fate.row])
            if fate.freed_bytes:
                self.removed[reason.value] += 1
                self.freed_bytes[reason.value] += fate.freed_bytes

    def _may_go(self, row: int, reason: EvictionReason) -> bool:
        if not self._catalog.rows["is_alive"][row]:
            return False
        # Time to live is a promise: it holds for used blocks, too.
        is_spared = reason is not EvictionReason.TTL and row in self._spared
        self.spared += is_spared
        return not is_spared

    def _victim(self, row: int) -> Victim:
        path = f"{self._tier_dir}/{self._catalog.digest(row)}/{block_path(self._catalog.key(row))}"
        return Victim(row, path, int(self._catalog.rows["created"][row]), self._clock())

    def _chains(self, victims: list[Victim]) -> list[list[Victim]]:
        """Put victims of one prefix together, in the order of the decision: the end of a prefix first."""
        chains: list[list[Victim]] = []
        chain_of: dict[int, list[Victim]] = {}
        for victim in reversed(victims):
            chain = chain_of.get(self._catalog.parent_of(victim.row))
            if chain is None:
                chain = []
                chains.append(chain)
            chain_of[victim.row] = chain
            chain.append(victim)
        # The least recently used prefix first, too.
        return [chain[::-1] for chain in reversed(chains)]

    def _spare(self, rows: Iterable[int]) -> None:
        """Keep these blocks, and all blocks before them."""
        for row in rows:
            while row >= 0 and row not in self._spared:
                self._spared.add(row)
                row = self._catalog.parent_of(row)  # noqa: PLW2901 - up the prefix


def remove_victims(pool: Executor, fs: FileSystem, chains: Iterable[Sequence[Victim]]) -> list[Fate]:
    """Remove files, several chains at once; return the results of those that were tried and not refused.

    The files of a chain go one after the other, and none after one that stays. So a process that dies leaves no block
    without those before it, and neither does a file that was written anew.

    Raises:
        OSError: at the end, if the volume refused all that were tried.
    """
    # Short chains together, since handing over work takes time, too.
    bundles: list[list[Sequence[Victim]]] = [[]]
    for chain in chains:
        if sum(map(len, bundles[-1])) >= _BUNDLE:
            bundles.append([])
        bundles[-1].append(chain)
    fates: list[Fate] = []
    refusals: list[OSError] = []
    for some, refused in pool.map(lambda bundle: _remove_bundle(fs, bundle), bundles):
        fates += some
        refusals += refused
    if refusals and not fates:
        raise refusals[0]
    return fates


def _remove_bundle(fs: FileSystem, chains: Iterable[Sequence[Victim]]) -> tuple[list[Fate], list[OSError]]:
    fates: list[Fate] = []
    refusals: list[OSError] = []
    for chain in chains:
        try:
            for victim in chain:
                fates.append(_remove(fs, victim))
                if fates[-1].rewritten_ns:
                    break
        except OSError as error:
            refusals.append(error)
        if len(refusals) == _MOST_REFUSALS:
            # The next ones would most likely wait for the same answer.
            break
    return fates, refusals


def _remove(fs: FileSystem, victim: Victim) -> Fate:
    try:
        status = fs.stat(victim.path)
        if victim.written_ns < status.st_mtime_ns <= victim.now_ns:
            return Fate(victim.row, 0, status.st_mtime_ns)
        fs.unlink(victim.path)
    except (FileNotFoundError, NotADirectoryError):
        return Fate(victim.row, 0)
    return Fate(victim.row, status.st_size)
