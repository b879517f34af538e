# SPDX-License-Identifier: Apache-2.0
"""Removes what is no block: old quarantined files, old journals, trees of tenants without a file, own leftovers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.janitor.ledger import Sum
from kvtier_connector.janitor.removal import remove_directory, remove_empty_tree
from kvtier_connector.janitor.snapshot import LEDGER_FILE
from kvtier_connector.janitor.walk import find_tenants, list_own
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import QUARANTINE, TENANTS, is_partial, tenant_directory
from kvtier_connector.store.leftovers import remove_old_journals

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
        is_partial_ledger = entry.name.startswith(LEDGER_FILE) and is_partial(entry.name)
        is_directory = entry.is_dir(follow_symlinks=False) and entry.name not in generations
        if not is_partial_ledger and not is_directory:
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
