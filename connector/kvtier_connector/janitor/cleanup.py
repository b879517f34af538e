# SPDX-License-Identifier: Apache-2.0
"""Removes everything on a tier's volume that is no block of a generation in use.

That is: generations beyond those to keep, once no engine uses them; old quarantined files and journals; empty trees of
tenants; leftovers of janitors that died. A directory with files of other programs is reported and stays.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.catalog import Catalog, Sum
from kvtier_connector.janitor.walk import find_tenants, list_directory
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import (
    BLOCKS,
    JOURNAL,
    PURGES_FILE,
    QUARANTINE,
    RELEASES,
    TENANTS,
    TIER_FILE,
    find_home,
    is_partial,
    parse_journal_path,
    tenant_directory,
)

logger = logging.getLogger(__name__)

_LEFTOVERS_SECONDS = 3600.0
_RETRY_SECONDS = 600.0
"""Pause after a round that could not be completed."""
_ACTIVITY_SECONDS = 60.0
"""Pause between two looks at the journals of generations that are not current."""
_QUIET_SECONDS = 3600.0
"""A tenant's tree that changed more recently may be about to be filled."""
_PARTS = frozenset({BLOCKS, TENANTS, QUARANTINE, JOURNAL, RELEASES, PURGES_FILE, TIER_FILE})
_BUSY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY})


class GenerationDirectory(NamedTuple):
    """One generation on the volume."""

    digest: str
    created_ns: int = 0
    """When its ``tier.json`` was written, 0 if it has none."""
    problem: str = ""
    """Why it cannot be read; empty if it can. Nothing else is known of it then."""


class Cleanup:
    """The generations and leftovers of one tier. Owned by the janitor's thread."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        tier_dir: str,
        *,
        fs: FileSystem,
        catalog: Catalog,
        removed: Counter[str],
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; `removed` counts removals by kind, and `clock` is the volume's time."""
        self._dir, self._fs, self._catalog, self._removed = tier_dir, fs, catalog, removed
        self._clock, self._now = clock, now
        self._leftovers_at = self._activity_at = now()
        self._active_ns: dict[str, int] = {}
        """When an engine last did something in a generation that is not current."""
        self.generations: list[GenerationDirectory] = []
        self.quarantined: dict[str, Sum] = {}
        """The remaining quarantined files, by generation."""

    @property
    def digests(self) -> list[str]:
        """All generations on the volume."""
        return [each.digest for each in self.generations]

    def look(self) -> str:
        """List the generations; return a message about one that cannot be read, empty without one.

        Raises:
            OSError: the directory of the tier cannot be read, or its mount is gone.
        """
        known = {each.digest: each for each in self.generations if not each.problem}
        try:
            entries = sorted(self._fs.scandir(self._dir), key=lambda each: each.name)
        except FileNotFoundError:
            entries = []
        self._fs.require_mount(self._dir)
        self.generations = []
        for entry in entries:
            if entry.name in known:
                self.generations.append(known[entry.name])
            # A preflight's directory may hold all that a generation holds.
            elif find_home(entry.name) is not None and entry.is_dir(follow_symlinks=False):
                try:
                    if not _PARTS.isdisjoint(self._names_in(entry.name)):
                        self.generations.append(GenerationDirectory(entry.name, self._created_ns(entry.name)))
                except OSError as error:
                    self.generations.append(GenerationDirectory(entry.name, problem=str(error)))
        return next((f"generation: {each.problem}" for each in self.generations if each.problem), "")

    def order(self, current: str) -> list[str]:
        """Return the digests in the order in which their blocks are evicted last: current ones, then by activity."""
        active = {each.digest: self._active_ns.get(each.digest, each.created_ns) for each in self.generations}
        return sorted(active, key=lambda digest: (digest.partition(".r")[0] != current, -active[digest], digest))

    def retire(self, config: JanitorConfig, may_go_on: Callable[[], bool]) -> bool:
        """Remove generations that are neither current, nor to keep, nor in use; return whether all of it is done.

        Raises:
            OSError: at the end, if the volume refused or a generation holds files of other programs; the others went.
        """
        if self._now() < self._activity_at:
            return True
        failed: OSError | None = None
        others = [each for each in self.generations if each.digest != config.current]
        self._active_ns = {}
        for each in others:
            try:
                written_ns = (status.st_mtime_ns for _, status in self._journals(each.digest))
                self._active_ns[each.digest] = max(each.created_ns, *written_ns, 0)
            except OSError as error:
                # It is not known to be idle.
                self._active_ns[each.digest] = self._clock()
                failed = failed or error
        before_ns = self._clock() - int(config.generation_idle_seconds * 1e9)
        latest = sorted(self._active_ns, key=lambda digest: (-self._active_ns[digest], digest))
        # Directories of weights that replaced the model's own are no previous generations: no edit leads back to them.
        kept = [digest for digest in latest if (home := find_home(digest)) and not home.epoch][: config.keep_previous]
        kept += [digest for digest in latest if digest.partition(".r")[0] == config.current][:1]
        is_all_gone = True
        for digest in latest:
            if digest in kept or self._active_ns[digest] >= before_ns:
                continue
            try:
                is_gone = self._remove(digest, may_go_on)
            except OSError as error:
                failed = failed or error
                continue
            is_all_gone &= is_gone
            if is_gone:
                self._catalog.drop_generation(digest)
                self.generations = [each for each in self.generations if each.digest != digest]
                self.quarantined.pop(digest, None)
                self._removed["generation"] += 1
        if failed is not None:
            raise failed
        if is_all_gone:
            self._activity_at = self._now() + _ACTIVITY_SECONDS
        return is_all_gone

    @property
    def is_leftover_due(self) -> bool:
        """Whether it is time for `remove_leftovers`."""
        return self._now() >= self._leftovers_at

    def remove_leftovers(self, config: JanitorConfig) -> None:
        """Remove files and directories that are no blocks.

        Raises:
            OSError: at the end, if the volume refused some of it; the rest was done.
        """
        self._leftovers_at = self._now() + _RETRY_SECONDS
        now_ns, longest = self._clock(), config.ttl_seconds or math.inf
        quarantine_seconds = min(config.quarantine_age_seconds, longest)
        failed: OSError | None = None
        self.quarantined = {digest: self.quarantined.get(digest, Sum()) for digest in self.digests}
        for digest in self.digests:
            for remove, seconds in (
                (self._remove_quarantined, quarantine_seconds),
                (self._remove_journals, config.journal_age_seconds),
                (self._remove_empty_tenants, _QUIET_SECONDS),
            ):
                try:
                    remove(digest, now_ns - int(seconds * 1e9))
                except OSError as error:
                    failed = failed or error
        self._remove_beside(now_ns - int(min(config.partial_age_seconds, longest) * 1e9))
        if failed is not None:
            raise failed
        self._leftovers_at = self._now() + min(_LEFTOVERS_SECONDS, quarantine_seconds, config.journal_age_seconds)

    def _remove(self, digest: str, may_go_on: Callable[[], bool]) -> bool:
        if strangers := sorted(name for name in self._names_in(digest) - _PARTS if not is_partial(name)):
            what = f"not removed, since another program put {', '.join(strangers)} there: remove it by hand"
            raise OSError(errno.ENOTEMPTY, what, f"{self._dir}/{digest}")
        is_gone = remove_generation(self._fs, f"{self._dir}/{digest}", may_go_on)
        if is_gone:
            logger.info("removed the generation %s", digest)
        return is_gone

    def _names_in(self, digest: str) -> set[str]:
        return {entry.name for entry in list_directory(self._fs, f"{self._dir}/{digest}")}

    def _created_ns(self, digest: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._fs.stat(f"{self._dir}/{digest}/{TIER_FILE}").st_mtime_ns
        return 0

    def _remove_quarantined(self, digest: str, before_ns: int) -> None:
        root, kept = f"{self._dir}/{digest}", Sum()
        for tenant in ["", *find_tenants(self._fs, root)]:
            for path, status in self._files(f"{root}/{tenant_directory(tenant)}{QUARANTINE}"):
                if status.st_mtime_ns < before_ns:
                    self._unlink(path, "quarantined")
                else:
                    kept = kept.plus(Sum(1, status.st_size))
        self.quarantined[digest] = kept

    def _remove_journals(self, digest: str, before_ns: int) -> None:
        for path, status in self._journals(digest):
            if status.st_mtime_ns < before_ns:
                self._unlink(path, "journal")

    def _remove_empty_tenants(self, digest: str, before_ns: int) -> None:
        busy = self._catalog.tenants_of(digest)
        for tenant in find_tenants(self._fs, f"{self._dir}/{digest}"):
            path = f"{self._dir}/{digest}/{TENANTS}/{tenant}"
            with contextlib.suppress(FileNotFoundError):
                if tenant not in busy and self._fs.stat(path).st_mtime_ns < before_ns:
                    self._removed["tenant"] += _remove_empty_tree(self._fs, path)

    def _remove_beside(self, before_ns: int) -> None:
        """Remove files half written by a janitor that died, and empty directories of removed generations."""
        for entry in self._fs.scandir(self._dir):
            path = f"{self._dir}/{entry.name}"
            is_directory = entry.is_dir(follow_symlinks=False) and entry.name not in self.digests
            if not is_partial(entry.name) and not is_directory:
                continue
            with contextlib.suppress(FileNotFoundError):
                if self._fs.stat(path).st_mtime_ns >= before_ns:
                    continue
                if is_directory:
                    self._removed["partial"] += remove_directory(self._fs, path)
                else:
                    self._unlink(path, "partial")

    def _journals(self, digest: str) -> Iterator[tuple[str, os.stat_result]]:
        for path, status in self._files(f"{self._dir}/{digest}/{JOURNAL}"):
            if parse_journal_path(f"{JOURNAL}/{path.rpartition('/')[2]}") is not None:
                yield path, status

    def _files(self, directory: str) -> Iterator[tuple[str, os.stat_result]]:
        for entry in list_directory(self._fs, directory):
            with contextlib.suppress(FileNotFoundError):
                yield f"{directory}/{entry.name}", self._fs.stat(f"{directory}/{entry.name}")

    def _unlink(self, path: str, kind: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(path)
            self._removed[kind] += 1


def remove_generation(fs: FileSystem, root: str, may_go_on: Callable[[], bool]) -> bool:
    """Remove a generation until told to stop, ``tier.json`` last; return whether all of it is gone.

    Raises:
        OSError: the volume refuses.
    """
    for entry in list_directory(fs, root):
        is_ours = entry.name in _PARTS - {TIER_FILE} or is_partial(entry.name)
        if is_ours and not _clear(fs, f"{root}/{entry.name}", may_go_on):
            return False
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{root}/{TIER_FILE}")
    return remove_directory(fs, root)


def _clear(fs: FileSystem, path: str, may_go_on: Callable[[], bool]) -> bool:
    """Remove a file, a link or a directory with its contents; return whether it is gone."""
    try:
        if not stat.S_ISDIR(fs.stat(path).st_mode):
            fs.unlink(path)
            return True
    except (FileNotFoundError, NotADirectoryError):
        return True
    for entry in list_directory(fs, path):
        if not may_go_on():
            return False
        if not entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{path}/{entry.name}")
        elif not _clear(fs, f"{path}/{entry.name}", may_go_on):
            return False
    return remove_directory(fs, path)


def remove_directory(fs: FileSystem, path: str) -> bool:
    """Remove an empty directory; return whether it is gone: a process may have written into it again."""
    try:
        fs.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


def _remove_empty_tree(fs: FileSystem, path: str) -> bool:
    """Remove a directory that holds only empty directories; return whether it is gone. No file is touched."""
    is_empty = all(
        entry.is_dir(follow_symlinks=False) and _remove_empty_tree(fs, f"{path}/{entry.name}")
        for entry in list_directory(fs, path)
    )
    return is_empty and remove_directory(fs, path)
