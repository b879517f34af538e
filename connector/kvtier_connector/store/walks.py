# SPDX-License-Identifier: Apache-2.0
"""What a walk of a root finds, in few bytes: which blocks are there, for the index, and how much each tenant has.

Batches are made so that another process can make them: what reads a million names waits for nobody's interpreter lock
then, and whoever takes them in does so a little at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.index import compact
from kvtier_connector.store.layout import tenant_of
from kvtier_connector.store.scan import BlockEntry, LeftoverKind, remove_old_journals, scan

JOURNAL_AGE_SECONDS = 24 * 3600.0
"""Journals that nobody has written to for so long are removed; every reader of theirs is done with them."""
LONGEST_PAUSE_SECONDS = 24 * 3600.0
"""Between two walks: each looks at every file, and what a fleet at rest asks of a volume is to stay small."""
_BATCH_FILES = 2048


class Batch(NamedTuple):
    """Some of the files."""

    names: bytes
    """Of blocks, as `compact` makes them, one after the other."""
    sizes: dict[str, int]
    """Bytes of blocks and quarantined files, by tenant."""


class WalkLostError(Exception):
    """Whoever walked for us is gone; nothing is said of the volume."""


class Walk(Protocol):
    """Walks a root."""

    def __call__(self, root: Path, *, may_write: bool, is_stopped: Callable[[], bool]) -> Iterator[Batch]:
        """Yield what is there; end early where `is_stopped`.

        What crashed processes left behind is removed on the way, if it may be written to.

        Raises:
            StoreUnavailable: the root cannot be walked.
            WalkLostError: another one has to do it.
        """


def next_pause(pause: float, first: float) -> float:
    """Return the seconds until the walk behind the next one, after so many before it; a day at most, or `first`."""
    return min(2 * pause, max(first, LONGEST_PAUSE_SECONDS))


def walk_here(  # noqa: PLR0913 - keywords but for the first
    root: Path,
    *,
    may_write: bool,
    is_stopped: Callable[[], bool] = lambda: False,
    fs: FileSystem = LOCAL,
    clock: Callable[[], int] = time.time_ns,
    threads: int = 1,
) -> Iterator[Batch]:
    """Walk in this process; `threads` directories are read at once, since a network volume answers after a while."""
    names: list[bytes] = []
    sizes: dict[str, int] = {}
    for files, entry in enumerate(scan(root, fs=fs, clock=clock, threads=threads), start=1):
        if is_stopped():
            return
        if isinstance(entry, BlockEntry):
            names.append(compact(entry.key))
        if isinstance(entry, BlockEntry) or entry.kind is LeftoverKind.QUARANTINED:
            tenant = tenant_of(entry.path)
            sizes[tenant] = sizes.get(tenant, 0) + entry.size
        elif entry.kind is LeftoverKind.PARTIAL and may_write:
            with contextlib.suppress(OSError):
                fs.unlink(f"{root}/{entry.path}")
        if files % _BATCH_FILES == 0:
            yield Batch(b"".join(names), sizes)
            names, sizes = [], {}
    yield Batch(b"".join(names), sizes)
    if may_write:
        with contextlib.suppress(StoreUnavailable):
            remove_old_journals(root, JOURNAL_AGE_SECONDS, fs=fs, clock=clock)
