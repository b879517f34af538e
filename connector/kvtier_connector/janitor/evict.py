# SPDX-License-Identifier: Apache-2.0
"""Removes files: victims chain by chain, each looked at again just before, and whole generations a step at a time.

Nothing here decides. Every function may be interrupted at any system call and called again.

Carries out what the policy chose, batch by batch: whatever was used since then is spared, with all before it.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Self

from kvtier_connector.janitor.catalog import Ledger
from kvtier_connector.janitor.follow import News
from kvtier_connector.janitor.policy import Choice, Reason
from kvtier_connector.janitor.walk import find_tenants, list_own
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.layout import BLOCKS, JOURNAL, QUARANTINE, TENANTS, TIER_FILE, block_path, tenant_directory

_BUNDLE = 64
_MOST_REFUSALS = 8
"""Of one bundle: a few files that cannot be removed must not keep all others, and a volume that refuses all will."""
_BUSY = {errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY}


class ActiveFileSystem(FileSystem):
    """Another file system beneath the tier's directory, which removes only while this is the tier's active janitor."""

    def __init__(self, fs: FileSystem, base: str, *, may_act: Callable[[], bool]) -> None:
        """Store the settings; `may_act` is asked before each removal, from any thread."""
        self._fs = fs.beneath(base)
        self._may_act = may_act
        for name in set(vars(FileSystem)) - set(vars(ActiveFileSystem)):
            if not name.startswith("_"):
                setattr(self, name, getattr(self._fs, name))

    def beneath(self, directory: str) -> Self:  # noqa: ARG002 - all of the tier is refused links already
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
    """A file that shall go."""

    row: int
    path: str
    """Absolute."""
    written_ns: int
    """When the file was written, by the volume's clock: a younger file is another one."""
    now_ns: int
    """By the same clock: a file of a later time tells nothing."""


class Fate(NamedTuple):
    """What became of a victim."""

    row: int
    freed_bytes: int
    """0 if it was gone already, or stays."""
    rewritten_ns: int = 0
    """When somebody wrote it anew meanwhile: it stays; 0 if nobody did."""


def remove_victims(pool: Executor, fs: FileSystem, chains: Iterable[Sequence[Victim]]) -> list[Fate]:
    """Remove files, several chains at once; raise OSError at the end if the volume refused all that was tried.

    Args:
        pool: What works on several chains at once.
        fs: The system calls.
        chains: Of each one is removed after the other, and none after one that stays: so a process that dies, or a
            file that was written anew, leaves no block without those before it.

    Returns:
        What became of those that were tried and that the volume did not refuse.
    """
    fates: list[Fate] = []
    failed: list[OSError] = []
    for some, error in pool.map(lambda bundle: _remove_bundle(fs, bundle), _bundles(chains)):
        fates += some
        failed += [] if error is None else [error]
    if failed and not fates:
        raise failed[0]
    return fates


def _bundles(chains: Iterable[Sequence[Victim]]) -> Iterator[list[Sequence[Victim]]]:
    """Put short chains together, since to hand over work takes time, too."""
    bundle: list[Sequence[Victim]] = []
    count = 0
    for chain in chains:
        bundle.append(chain)
        count += len(chain)
        if count >= _BUNDLE:
            yield bundle
            bundle, count = [], 0
    if bundle:
        yield bundle


def _remove_bundle(fs: FileSystem, chains: Iterable[Sequence[Victim]]) -> tuple[list[Fate], OSError | None]:
    fates: list[Fate] = []
    refusals: list[OSError] = []
    for chain in chains:
        for victim in chain:
            try:
                fate = _remove(fs, victim)
            except OSError as error:
                refusals.append(error)
                break
            fates.append(fate)
            if fate.rewritten_ns:
                break
        if len(refusals) == _MOST_REFUSALS:
            # The next ones would most likely wait for the same answer.
            break
    return fates, refusals[0] if refusals else None


def _remove(fs: FileSystem, victim: Victim) -> Fate:
    try:
        status = fs.stat(victim.path)
        if victim.written_ns < status.st_mtime_ns <= victim.now_ns:
            return Fate(victim.row, 0, status.st_mtime_ns)
        fs.unlink(victim.path)
    except (FileNotFoundError, NotADirectoryError):
        return Fate(victim.row, 0)
    return Fate(victim.row, status.st_size)


class GenerationRemoval:
    """Takes a generation away, directory by directory; ``tier.json`` goes last, so it can be told what it was."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        """Store the settings."""
        self._fs = fs
        self._root = root

    def step(self, may_go_on: Callable[[], bool]) -> bool:
        """Remove files until told to stop; say whether all of it is gone. Raises OSError if the volume refuses."""
        tenants = find_tenants(self._fs, self._root)
        trees = [f"{tenant_directory(tenant)}{tree}" for tenant in ["", *tenants] for tree in (BLOCKS, QUARANTINE)]
        for tree in [*trees, *(f"{TENANTS}/{tenant}" for tenant in tenants), TENANTS, JOURNAL]:
            if not self._clear(f"{self._root}/{tree}", may_go_on):
                return False
        for entry in list_own(self._fs, self._root):
            if entry.name != TIER_FILE and not self._clear(f"{self._root}/{entry.name}", may_go_on):
                return False
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(f"{self._root}/{TIER_FILE}")
        return remove_directory(self._fs, self._root)

    def _clear(self, path: str, may_go_on: Callable[[], bool]) -> bool:
        """Remove a file or a directory with all in it; say whether it is gone. Of a link, what it names stays."""
        try:
            if not stat.S_ISDIR(self._fs.stat(path).st_mode):
                self._fs.unlink(path)
                return True
        except (FileNotFoundError, NotADirectoryError):
            return True
        return self._empty(path, may_go_on)

    def _empty(self, path: str, may_go_on: Callable[[], bool]) -> bool:
        for entry in list_own(self._fs, path):
            if not may_go_on():
                return False
            if entry.is_dir(follow_symlinks=False):
                if not self._empty(f"{path}/{entry.name}", may_go_on):
                    return False
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(f"{path}/{entry.name}")
        return remove_directory(self._fs, path)


def remove_directory(fs: FileSystem, path: str) -> bool:
    """Remove an empty directory; say whether it is gone: somebody may have written into it again."""
    try:
        fs.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def remove_empty_tree(fs: FileSystem, path: str) -> bool:
    """Remove a directory that holds nothing but empty directories; say whether it is gone. No file is touched."""
    try:
        entries = fs.scandir(path)
    except FileNotFoundError:
        return True
    is_empty = all(
        entry.is_dir(follow_symlinks=False) and remove_empty_tree(fs, f"{path}/{entry.name}") for entry in entries
    )
    return is_empty and remove_directory(fs, path)


BATCH = 1024
"""Files between two looks into the journals."""


class Eviction:
    """One decision that is being carried out. Owned by the ledger's thread, which compacts nothing meanwhile."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        choice: Choice,
        *,
        ledger: Ledger,
        news: News,
        fs: FileSystem,
        tier_dir: str,
        pool: Executor,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the decision."""
        self._choice = choice
        self._ledger = ledger
        self._news = news
        self._fs = fs
        self._tier_dir = tier_dir
        self._pool = pool
        self._clock = clock
        self._next = 0
        self._spared: set[int] = set()
        ledger.touched.clear()
        self.removed: Counter[Reason] = Counter()
        self.freed_bytes: Counter[Reason] = Counter()
        self.spared = 0

    @property
    def is_done(self) -> bool:
        """Whether every victim was dealt with."""
        return self._next >= self._choice.rows.size

    @property
    def share(self) -> float:
        """How many of the victims were dealt with, from 0 to 1."""
        return self._next / max(1, self._choice.rows.size)

    def step(self, is_told: Callable[[str], bool]) -> None:
        """Remove the next batch; read the journals first.

        Args:
            is_told: Whether engines of a generation are to be told; in one that nobody uses nothing is written.

        Raises:
            OSError: the volume refuses to remove anything.
        """
        self._spare(self._ledger.touched)
        self._ledger.touched.clear()
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
        # Refused, or before one that was written anew.
        kept = {victim.row for victim in victims} - {fate.row for fate in fates}
        self._spare([*kept, *(fate.row for fate in fates if fate.rewritten_ns)])
        for fate in fates:
            self._note(fate, reason, is_told)

    def _may_go(self, row: int, reason: Reason) -> bool:
        if not self._ledger.rows["is_alive"][row]:
            return False
        # Time to live is a promise: it holds for what is in use, too.
        is_spared = reason is not Reason.TTL and row in self._spared
        self.spared += is_spared
        return not is_spared

    def _victim(self, row: int) -> Victim:
        each = self._ledger.rows[row]
        digest = self._ledger.generations[int(each["generation"])]
        path = f"{self._tier_dir}/{digest}/{block_path(self._ledger.key(row))}"
        return Victim(row, path, int(each["created"]), self._clock())

    def _chains(self, victims: list[Victim]) -> list[list[Victim]]:
        """Put those together that continue one another, in the order of the decision: the end of a prefix first."""
        chains: list[list[Victim]] = []
        chain_of: dict[int, int] = {}
        for victim in reversed(victims):
            parent = int(self._ledger.rows["parent"][victim.row])
            chain = chain_of.get(self._ledger.find_name(parent)) if parent else None
            if chain is None:
                chain = len(chains)
                chains.append([])
            chain_of[victim.row] = chain
            chains[chain].append(victim)
        # The least recently used prefix first, too.
        return [chain[::-1] for chain in reversed(chains)]

    def _note(self, fate: Fate, reason: Reason, is_told: Callable[[str], bool]) -> None:
        each = self._ledger.rows[fate.row]
        if fate.rewritten_ns:
            each["created"] = fate.rewritten_ns
            self.spared += 1
            return
        digest = self._ledger.generations[int(each["generation"])]
        key = self._ledger.key(fate.row)
        self._ledger.forget([fate.row])
        if fate.freed_bytes:
            self.removed[reason] += 1
            self.freed_bytes[reason] += fate.freed_bytes
        if is_told(digest):
            self._news.tell_gone(digest, key, max(0, fate.freed_bytes - HEADER_BYTES))

    def _spare(self, rows: Iterable[int]) -> None:
        """Let these blocks stay, and all blocks before them."""
        for row in rows:
            while row >= 0 and row not in self._spared:
                self._spared.add(row)
                parent = int(self._ledger.rows["parent"][row])
                row = self._ledger.find_name(parent) if parent else -1  # noqa: PLW2901 - up the prefix
