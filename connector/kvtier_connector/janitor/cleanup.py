# SPDX-License-Identifier: Apache-2.0
"""Removes everything on a tier's volume that is no block of a generation in use.

That is: generations beyond those to keep, once no engine uses them; old quarantined files and journals; empty trees of
tenants; leftovers of janitors that died. Only a directory whose ``tier.json`` names it is removed, and of its contents
only what has a name that kvtier gives. A directory with files of other programs is reported and stays.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.errors import IdentityMismatch, StoreUnavailable
from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.catalog import Catalog, Sum
from kvtier_connector.janitor.walk import find_tenants
from kvtier_connector.store import identity, layout
from kvtier_connector.store.fs import FileSystem, list_directory

logger = logging.getLogger(__name__)

_LEFTOVERS_SECONDS = 3600.0
_SOON_SECONDS = 30.0
"""The same, once an engine has found damage: what it moved to quarantine counts, and must not take much room."""
_QUARANTINE_SHARE = 0.05
"""Share of the budget that quarantined files may take."""
_RETRY_SECONDS = 600.0
"""Pause after a round that could not be completed."""
_ACTIVITY_SECONDS = 60.0
"""Pause between two looks at the journals of generations that are not current."""
_QUIET_SECONDS = 3600.0
"""A tenant's tree that changed more recently may be about to be filled."""
_COUNTED = frozenset({layout.BLOCKS, layout.TENANTS, layout.TIER_FILE})
"""A directory that has one of these may hold blocks."""
_MOST_NAMED = 3
_File = tuple[str, os.stat_result]
_BUSY = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY})


class GenerationDirectory(NamedTuple):
    """One generation on the volume."""

    digest: str
    created_ns: int = 0
    """When its ``tier.json`` was written, 0 if it has none."""
    problem: str = ""
    """Why it cannot be read; empty if it can. Nothing else is known of it then."""
    is_ours: bool = False
    """Whether its ``tier.json`` names it. Any other directory may be of another program, and is not removed."""


class Cleanup:
    """The generations and leftovers of one tier. Owned by the janitor's thread."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        tier_dir: str,
        *,
        fs: FileSystem,
        catalog: Catalog,
        removed: Counter[str],
        clock: Callable[[], int],
        now: Callable[[], float],
    ) -> None:
        """Store the settings; `removed` counts removals by kind, and `clock` is the volume's time."""
        self._dir, self._fs, self._catalog, self._removed = tier_dir, fs, catalog, removed
        self._clock, self._now = clock, now
        self.retire_at = self.leftovers_at = self._leftovers_began = now()
        """When `retire` and `remove_leftovers` are due, by `now`."""
        self._active_ns: dict[str, int] = {}
        """When an engine last did something in a generation that is not current."""
        self._failures: list[OSError] = []
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
        known = {each.digest: each for each in self.generations if each.is_ours}
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
            elif layout.find_home(entry.name) is not None and entry.is_dir(follow_symlinks=False):
                try:
                    inside = list_directory(self._fs, f"{self._dir}/{entry.name}")
                    if not _COUNTED.isdisjoint(each.name for each in inside):
                        self.generations.append(self._describe(entry.name))
                except (OSError, StoreUnavailable) as error:
                    self.generations.append(GenerationDirectory(entry.name, problem=str(error)))
        return next((f"generation: {each.problem}" for each in self.generations if each.problem), "")

    def order(self, current: str) -> list[str]:
        """Return the digests in the order in which their blocks are evicted last: current ones, then by activity."""
        active = {each.digest: self._active_ns.get(each.digest, each.created_ns) for each in self.generations}
        return sorted(active, key=lambda digest: (digest.partition(".r")[0] != current, -active[digest], digest))

    def retire(self, config: JanitorConfig, may_go_on: Callable[[], bool], *, is_held: bool = False) -> bool:
        """Remove generations that are neither current, nor to keep, nor in use; return False if told to stop before.

        For calls at `retire_at` or later. With `is_held` it is only noted which are in use.

        Raises:
            OSError: at the end, if the volume refused or a generation holds files of other programs; the others went.
        """
        self._failures, self._active_ns = [], {}
        for each in [each for each in self.generations if each.digest != config.current]:
            # One that cannot be read is not known to be idle.
            self._active_ns[each.digest] = self._clock()
            with self._noting():
                journals = self._files(each.digest, layout.JOURNAL, layout.parse_journal_path)
                self._active_ns[each.digest] = max(each.created_ns, *(found.st_mtime_ns for _, found in journals), 0)
        before_ns = self._clock() - int(config.generation_idle_seconds * 1e9)
        latest = sorted(self._active_ns, key=lambda digest: (-self._active_ns[digest], digest))
        # Directories of weights that replaced the model's own are no previous generations: no edit leads back to them.
        own = [digest for digest in latest if digest in self._own]
        kept = [digest for digest in own if "." not in digest][: config.keep_previous]
        kept += [digest for digest in latest if digest.partition(".r")[0] == config.current][:1]
        is_all_gone = True
        for digest in own:
            if is_held or digest in kept or self._active_ns[digest] >= before_ns:
                continue
            with self._noting():
                if not remove_generation(self._fs, f"{self._dir}/{digest}", may_go_on):
                    is_all_gone = False
                    continue
                logger.info("removed the generation %s", digest)
                self._catalog.drop_generation(digest)
                self.generations = [each for each in self.generations if each.digest != digest]
                self.quarantined.pop(digest, None)
                self._removed["generation"] += 1
        if is_all_gone:
            self.retire_at = self._now() + _ACTIVITY_SECONDS
        if self._failures:
            raise self._failures[0]
        return is_all_gone

    def note_damage(self) -> None:
        """Look for quarantined files soon."""
        self.leftovers_at = min(self.leftovers_at, self._leftovers_began + _SOON_SECONDS)

    def remove_leftovers(self, config: JanitorConfig) -> None:
        """Remove files and directories that are no blocks.

        Raises:
            OSError: at the end, if the volume refused some of it; the rest was done.
        """
        self._failures, self._leftovers_began = [], self._now()
        self.leftovers_at = self._leftovers_began + _RETRY_SECONDS
        now_ns, longest = self._clock(), config.ttl_seconds or math.inf
        quarantine_seconds = min(config.quarantine_age_seconds, longest)
        self._remove_quarantined(config, now_ns - int(quarantine_seconds * 1e9))
        for digest in self._own:
            with self._noting():
                for path, status in self._files(digest, layout.JOURNAL, layout.parse_journal_path):
                    if status.st_mtime_ns < now_ns - int(config.journal_age_seconds * 1e9):
                        self._unlink(path, "journal")
                self._remove_empty_tenants(digest, now_ns - int(_QUIET_SECONDS * 1e9))
        self._remove_beside(now_ns - int(min(config.partial_age_seconds, longest) * 1e9))
        if self._failures:
            raise self._failures[0]
        self.leftovers_at = self._now() + min(_LEFTOVERS_SECONDS, quarantine_seconds, config.journal_age_seconds)

    @property
    def _own(self) -> list[str]:
        return [each.digest for each in self.generations if each.is_ours]

    def _describe(self, digest: str) -> GenerationDirectory:
        document = None
        with contextlib.suppress(IdentityMismatch):
            document = identity.read(Path(self._dir, digest), fs=self._fs)
        if document is None or document.get("digest") != digest:
            return GenerationDirectory(digest)
        created_ns = self._fs.stat(f"{self._dir}/{digest}/{layout.TIER_FILE}").st_mtime_ns
        return GenerationDirectory(digest, created_ns, is_ours=True)

    def _remove_quarantined(self, config: JanitorConfig, before_ns: int) -> None:
        """Remove damaged files that are old, and the oldest of those that take more than their share of the budget."""
        kept, found = {digest: self.quarantined.get(digest, Sum()) for digest in self.digests}, []
        for digest in self._own:
            mine = []
            with self._noting():
                for tenant in ["", *find_tenants(self._fs, f"{self._dir}/{digest}")]:
                    directory = f"{layout.tenant_directory(tenant)}{layout.QUARANTINE}"
                    files = self._files(digest, directory, layout.is_quarantined)
                    mine += [(status.st_mtime_ns, status.st_size, path, digest) for path, status in files]
                # Where one cannot be listed, all count as they did.
                found += mine
                kept[digest] = Sum()
        room = config.max_bytes * _QUARANTINE_SHARE or math.inf
        for written_ns, size, path, digest in sorted(found, reverse=True):
            room -= size
            if (written_ns >= before_ns and room >= 0) or not self._unlink(path, "quarantined"):
                kept[digest] = kept[digest].plus(Sum(1, size))
        self.quarantined = kept

    def _remove_empty_tenants(self, digest: str, before_ns: int) -> None:
        busy = self._catalog.tenants_of(digest)
        for tenant in find_tenants(self._fs, f"{self._dir}/{digest}"):
            path = f"{self._dir}/{digest}/{layout.TENANTS}/{tenant}"
            with self._noting():
                if tenant not in busy and self._fs.stat(path).st_mtime_ns < before_ns:
                    self._removed["tenant"] += _remove_empty_tree(self._fs, path)

    def _remove_beside(self, before_ns: int) -> None:
        """Remove files half written by a janitor that died, and empty directories of generations that were removed."""
        # The catalog knows them, also that of an earlier janitor; any other directory may be of another program.
        emptied = {*self._catalog.generations}.difference(self.digests)
        for entry in self._fs.scandir(self._dir):
            path, is_directory = f"{self._dir}/{entry.name}", entry.is_dir(follow_symlinks=False)
            if not (entry.name in emptied if is_directory else layout.is_partial(entry.name)):
                continue
            with self._noting():
                if self._fs.stat(path).st_mtime_ns >= before_ns:
                    continue
                if is_directory:
                    self._removed["partial"] += remove_directory(self._fs, path)
                else:
                    self._unlink(path, "partial")

    def _files(self, digest: str, directory: str, is_one: Callable[[str], object]) -> Iterator[_File]:
        """Yield the files in a directory of a generation, by the claim about their paths relative to its root."""
        for entry in list_directory(self._fs, f"{self._dir}/{digest}/{directory}"):
            path = f"{self._dir}/{digest}/{directory}/{entry.name}"
            with contextlib.suppress(FileNotFoundError):
                if is_one(f"{directory}/{entry.name}"):
                    yield path, self._fs.stat(path)

    def _unlink(self, path: str, kind: str) -> bool:
        with self._noting():
            self._fs.unlink(path)
            self._removed[kind] += 1
            return True
        return False

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Go on after a failure, which is raised at the end. That a file is gone is none."""
        try:
            yield
        except OSError as error:
            self._failures += [] if isinstance(error, FileNotFoundError) else [error]


def remove_generation(fs: FileSystem, root: str, may_go_on: Callable[[], bool]) -> bool:
    """Remove a generation until told to stop, ``tier.json`` last; return whether all of it is gone.

    Raises:
        OSError: the volume refuses, or something is left that is not kvtier's or in use.
    """
    left: list[str] = []
    if not _clear(fs, root, "", may_go_on, left):
        return False
    if not left:
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(f"{root}/{layout.TIER_FILE}")
        left += [] if remove_directory(fs, root) else ["."]
    if left:
        named = ", ".join(sorted(left)[:_MOST_NAMED])
        what = f"not removed: {len(left)} files of other programs or in use; remove by hand what stays: {named}"
        raise OSError(errno.ENOTEMPTY, what, root)
    return True


def _clear(fs: FileSystem, root: str, above: str, may_go_on: Callable[[], bool], left: list[str]) -> bool:
    """Remove what kvtier made in a directory, and add all that stays to `left`; return False if told to stop before."""
    for entry in list_directory(fs, f"{root}/{above}"):
        if not may_go_on():
            return False
        path, known = f"{above}{entry.name}", len(left)
        # A removed file that a client of NFS has open, or had when it died, has another name and is in the way.
        if not layout.is_own(path):
            left.append(path)
        elif entry.is_dir(follow_symlinks=False):
            if not _clear(fs, root, f"{path}/", may_go_on, left):
                return False
            if len(left) == known and not remove_directory(fs, f"{root}/{path}"):
                left.append(path)
        elif path != layout.TIER_FILE:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{root}/{path}")
    return True


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
