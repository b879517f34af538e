# SPDX-License-Identifier: Apache-2.0
"""Which generations a tier has on the volume, who uses them still, and which of them go.

Gives up generations that nobody needs any more: whole, a step at a time, and never one that somebody uses.

Removes what is no block: old quarantined files, old journals, trees of tenants without a file, own leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.catalog import Ledger, Sum
from kvtier_connector.janitor.evict import GenerationRemoval, remove_directory, remove_empty_tree
from kvtier_connector.janitor.walk import find_tenants, list_own
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import (
    BLOCKS,
    JOURNAL,
    PURGES_FILE,
    QUARANTINE,
    TENANTS,
    TIER_FILE,
    find_home,
    is_partial,
    parse_journal_path,
    tenant_directory,
)
from kvtier_connector.store.scan import remove_old_journals

_PARTS = {BLOCKS, TENANTS, QUARANTINE, JOURNAL, PURGES_FILE, TIER_FILE}


class Generation(NamedTuple):
    """One generation on the volume."""

    digest: str
    created_ns: int
    """When its ``tier.json`` was written, 0 if it has none."""
    strangers: tuple[str, ...]
    """Names under its root that nothing here makes; it is never removed with them."""
    problem: str = ""
    """Why it cannot be looked at; empty if it can. Then nothing else is known of it."""


class Standing(NamedTuple):
    """How much a generation is needed."""

    digest: str
    active_ns: int
    """When an engine last did something in it, as far as anybody can tell."""


def find_generations(fs: FileSystem, tier_dir: str, known: Iterable[Generation] = ()) -> list[Generation]:
    """Return the generations of the tier by digest; those known already are not looked at again.

    Raises:
        OSError: the directory of the tier cannot be looked at.
    """
    by_digest = {each.digest: each for each in known if not each.problem}
    try:
        entries = fs.scandir(tier_dir)
    except FileNotFoundError:
        return []
    found = []
    for entry in sorted(entries, key=lambda each: each.name):
        if entry.name in by_digest:
            found.append(by_digest[entry.name])
        # A preflight's directory may hold whatever a generation holds.
        elif find_home(entry.name) is not None and entry.is_dir(follow_symlinks=False):
            try:
                generation = look_at(fs, tier_dir, entry.name)
            except OSError as error:
                # The others can be kept all the same.
                generation = Generation(entry.name, 0, (), str(error))
            found += [] if generation is None else [generation]
    return found


def look_at(fs: FileSystem, tier_dir: str, digest: str) -> Generation | None:
    """Return the generation in a directory, None if there is none; raise OSError if it cannot be looked at."""
    root = f"{tier_dir}/{digest}"
    try:
        names = {entry.name for entry in fs.scandir(root)}
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not names & _PARTS:
        return None
    created_ns = 0
    if TIER_FILE in names:
        try:
            created_ns = fs.stat(f"{root}/{TIER_FILE}").st_mtime_ns
        except FileNotFoundError:
            created_ns = 0
    strangers = sorted(name for name in names - _PARTS if not is_partial(name))
    return Generation(digest, created_ns, tuple(strangers))


def last_written_ns(fs: FileSystem, root: str, *, but: Collection[str]) -> int:
    """Return when anybody but these writers last wrote a journal, 0 if nobody did; raise OSError if nobody can tell."""
    latest = 0
    try:
        entries = fs.scandir(f"{root}/{JOURNAL}")
    except (FileNotFoundError, NotADirectoryError):
        return 0
    for entry in entries:
        name = parse_journal_path(f"{JOURNAL}/{entry.name}")
        if name is None or name.writer in but:
            continue
        try:
            latest = max(latest, fs.stat(f"{root}/{JOURNAL}/{entry.name}").st_mtime_ns)
        except FileNotFoundError:
            continue
    return latest


def rank(standings: Iterable[Standing], current: str) -> list[str]:
    """Return the digests in the order in which they are given up last: the current one, then by last activity."""
    ordered = sorted(standings, key=lambda each: (each.digest != current, -each.active_ns, each.digest))
    return [each.digest for each in ordered]


def condemn(standings: Iterable[Standing], *, current: str, keep_previous: int, idle_ns: int, now_ns: int) -> list[str]:
    """Return the generations to remove whole: neither current, nor one of the previous ones to keep, nor in use.

    Directories of weights that replaced the model's own are none of the previous ones: no edit leads back to them.
    """
    others = [each for each in standings if each.digest != current]
    others.sort(key=lambda each: (-each.active_ns, each.digest))
    kept = [each for each in others if not _is_of_an_update(each.digest)][:keep_previous]
    return [each.digest for each in others if each not in kept and now_ns - each.active_ns > idle_ns]


def _is_of_an_update(directory: str) -> bool:
    home = find_home(directory)
    return home is not None and home.epoch != ""


logger = logging.getLogger(__name__)


class Retirement:
    """The generations of one tier. Owned by the janitor's thread."""

    def __init__(
        self,
        tier_dir: str,
        *,
        fs: FileSystem,
        own_writers: Callable[[], Collection[str]],
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Store the settings; `own_writers` names the journals that do not count as use."""
        self._dir = tier_dir
        self._fs = fs
        self._own_writers = own_writers
        self._clock = clock
        self._active: dict[str, int] = {}

    def step(
        self, generations: Sequence[Generation], config: JanitorConfig, may_go_on: Callable[[], bool]
    ) -> Iterator[tuple[str, bool]]:
        """Remove what is to be removed; yield each digest and whether all of it is gone.

        Raises:
            OSError: at the end, if the volume refused or a generation holds what is somebody else's; the others went.
        """
        failed: OSError | None = None
        self._active = {}
        for each in generations:
            if each.digest == config.current:
                continue
            try:
                self._active[each.digest] = self._active_ns(each)
            except OSError as error:
                # Nobody can tell that it is idle.
                self._active[each.digest] = self._clock()
                failed = failed or error
        standings = [Standing(digest, active_ns) for digest, active_ns in self._active.items()]
        for digest in condemn(
            standings,
            current=config.current,
            keep_previous=config.keep_previous,
            idle_ns=int(config.generation_idle_seconds * 1e9),
            now_ns=self._clock(),
        ):
            try:
                is_gone = self._remove(digest, may_go_on)
            except OSError as error:
                failed = failed or error
                continue
            yield digest, is_gone
        if failed is not None:
            raise failed

    def order(self, generations: Sequence[Generation], config: JanitorConfig) -> list[str]:
        """Return the digests, the one whose blocks go last first."""
        standings = (Standing(each.digest, self._active.get(each.digest, each.created_ns)) for each in generations)
        return rank(standings, config.current)

    def is_in_use(self, digest: str, config: JanitorConfig) -> bool:
        """Say whether engines may use the generation, so that they are to be told what goes."""
        idle_ns = int(config.generation_idle_seconds * 1e9)
        return digest == config.current or self._clock() - self._active.get(digest, 0) <= idle_ns

    def _active_ns(self, generation: Generation) -> int:
        written_ns = last_written_ns(self._fs, f"{self._dir}/{generation.digest}", but=self._own_writers())
        return max(generation.created_ns, written_ns)

    def _remove(self, digest: str, may_go_on: Callable[[], bool]) -> bool:
        found = look_at(self._fs, self._dir, digest)
        if found is None:
            return True
        if found.strangers:
            what = f"not removed, since somebody put {', '.join(found.strangers)} there: remove it by hand"
            raise OSError(errno.ENOTEMPTY, what, f"{self._dir}/{digest}")
        is_gone = GenerationRemoval(self._fs, f"{self._dir}/{digest}").step(may_go_on)
        if is_gone:
            logger.info("removed the generation %s", digest)
        return is_gone


_TIDY_SECONDS = 3600.0
_AGAIN_SECONDS = 600.0
"""After a time when not all could be done."""
_QUIET_SECONDS = 3600.0
"""A tenant's tree that was changed more recently may be about to be filled."""


class Quarantine(NamedTuple):
    """The quarantined files of one generation."""

    kept: Sum
    removed: int


def sweep_quarantine(fs: FileSystem, root: str, *, before_ns: int) -> Quarantine:
    """Remove quarantined files last written before that; raise OSError if the volume refuses."""
    kept, removed = Sum(), 0
    for tenant in ["", *find_tenants(fs, root)]:
        directory = f"{root}/{tenant_directory(tenant)}{QUARANTINE}"
        for entry in list_own(fs, directory):
            with contextlib.suppress(FileNotFoundError):
                status = fs.stat(f"{directory}/{entry.name}")
                if status.st_mtime_ns < before_ns:
                    fs.unlink(f"{directory}/{entry.name}")
                    removed += 1
                else:
                    kept = kept.plus(Sum(1, status.st_size))
    return Quarantine(kept, removed)


def sweep_journals(fs: FileSystem, root: str, *, age_seconds: float, now_ns: int) -> int:
    """Remove journals that nobody wrote to for so long; return how many.

    Raises:
        StoreUnavailable: the volume refuses.
    """
    return len(remove_old_journals(Path(root), age_seconds, fs=fs, clock=lambda: now_ns))


def sweep_tenants(fs: FileSystem, root: str, *, busy: set[str], now_ns: int) -> int:
    """Remove the trees of tenants that hold no file; return how many. Raises OSError if the volume refuses.

    Args:
        fs: The system calls.
        root: Of a generation.
        busy: Tenants that have blocks.
        now_ns: Nanoseconds since 1970.
    """
    removed = 0
    for tenant in find_tenants(fs, root):
        path = f"{root}/{TENANTS}/{tenant}"
        if tenant in busy:
            continue
        with contextlib.suppress(FileNotFoundError):
            if now_ns - fs.stat(path).st_mtime_ns > int(_QUIET_SECONDS * 1e9):
                removed += remove_empty_tree(fs, path)
    return removed


def sweep_beside(fs: FileSystem, tier_dir: str, *, generations: Collection[str], before_ns: int) -> int:
    """Remove what a janitor that died left beside the generations; return how many files and directories.

    That is a ledger half-written, and the empty directory of a generation that was all but removed.
    """
    removed = 0
    for entry in fs.scandir(tier_dir):
        path = f"{tier_dir}/{entry.name}"
        is_directory = entry.is_dir(follow_symlinks=False) and entry.name not in generations
        if not is_partial(entry.name) and not is_directory:
            continue
        with contextlib.suppress(FileNotFoundError):
            if fs.stat(path).st_mtime_ns >= before_ns:
                continue
            if is_directory:
                removed += remove_directory(fs, path)
            else:
                fs.unlink(path)
                removed += 1
    return removed


@dataclass(frozen=True, kw_only=True)
class Ages:
    """How old what is no block may become, in seconds."""

    quarantine: float
    journal: float
    partial: float


def make_ages(config: JanitorConfig) -> Ages:
    """Return them as the settings say."""
    return Ages(
        # What damaged files hold has a time to live, too.
        quarantine=min(config.quarantine_age_seconds, config.ttl_seconds or math.inf),
        journal=config.journal_age_seconds,
        partial=min(config.partial_age_seconds, config.ttl_seconds or math.inf),
    )


class Tidy:
    """Removes what is no block from all generations of a tier, now and then. Owned by the janitor's thread."""

    def __init__(
        self,
        tier_dir: str,
        *,
        fs: FileSystem,
        ledger: Ledger,
        removed: Counter[str],
        now: Callable[[], float],
    ) -> None:
        """Store the settings.

        Args:
            tier_dir: Directory of the generations.
            fs: The system calls.
            ledger: Knows the tenants that have blocks.
            removed: Counts by kind what was removed.
            now: Seconds that never go back.
        """
        self._dir = tier_dir
        self._fs = fs
        self._ledger = ledger
        self._removed = removed
        self._now = now
        self._next_at = now()
        self.quarantined: dict[str, Sum] = {}
        """The quarantined files that stay, by generation."""

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self._now() >= self._next_at

    def step(self, digests: Collection[str], ages: Ages, *, now_ns: int) -> None:
        """Look at these generations.

        Raises:
            OSError: at the end, if the volume refused some of it; the rest was done.
            StoreUnavailable: likewise.
        """
        self._next_at = self._now() + _AGAIN_SECONDS
        self.quarantined = {digest: kept for digest, kept in self.quarantined.items() if digest in digests}
        failed: Exception | None = None
        for digest in digests:
            for sweep in (self._sweep_quarantine, self._sweep_journals, self._sweep_tenants):
                try:
                    sweep(digest, ages, now_ns)
                except (OSError, StoreUnavailable) as error:
                    failed = failed or error
        before_ns = now_ns - int(ages.partial * 1e9)
        self._removed["partial"] += sweep_beside(self._fs, self._dir, generations=digests, before_ns=before_ns)
        if failed is not None:
            raise failed
        self._next_at = self._now() + min(_TIDY_SECONDS, ages.quarantine, ages.journal)

    def _sweep_quarantine(self, digest: str, ages: Ages, now_ns: int) -> None:
        before_ns = now_ns - int(ages.quarantine * 1e9)
        swept = sweep_quarantine(self._fs, f"{self._dir}/{digest}", before_ns=before_ns)
        self.quarantined[digest] = swept.kept
        self._removed["quarantined"] += swept.removed

    def _sweep_journals(self, digest: str, ages: Ages, now_ns: int) -> None:
        root = f"{self._dir}/{digest}"
        self._removed["journal"] += sweep_journals(self._fs, root, age_seconds=ages.journal, now_ns=now_ns)

    def _sweep_tenants(self, digest: str, _: Ages, now_ns: int) -> None:
        root = f"{self._dir}/{digest}"
        number = self._ledger.generation(digest)
        busy = {self._ledger.tenants[tenant] for generation, tenant in self._ledger.sums() if generation == number}
        self._removed["tenant"] += sweep_tenants(self._fs, root, busy=busy, now_ns=now_ns)
