# SPDX-License-Identifier: Apache-2.0
"""Removes what is no block: old quarantined files, old journals, trees of tenants without a file, own leftovers."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract_janitor import JanitorConfig
from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.janitor.ledger import Ledger, Sum
from kvtier_connector.janitor.removal import remove_directory, remove_empty_tree
from kvtier_connector.janitor.walk import find_tenants, list_own
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import QUARANTINE, TENANTS, is_partial, tenant_directory
from kvtier_connector.store.scan import remove_old_journals

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
