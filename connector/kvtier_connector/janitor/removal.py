# SPDX-License-Identifier: Apache-2.0
"""Removes files: victims chain by chain, each looked at again just before, and whole generations a step at a time.

Nothing here decides. Every function may be interrupted at any system call and called again.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, Self

from kvtier_connector.janitor.walk import find_tenants, list_own
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import BLOCKS, JOURNAL, QUARANTINE, TENANTS, TIER_FILE, tenant_directory

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
