# SPDX-License-Identifier: Apache-2.0
"""Finds and removes the blocks that a person wants gone: by age, generation, tenant, adapter or prefix, or all of them.

Engines may be at work: what goes is a miss for them, and they are told.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.errors import ConfigInvalid, StoreUnavailable
from kvtier_connector.janitor.walk import find_tenants, meet_all
from kvtier_connector.store.beneath import Beneath
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.journal import JournalWriter
from kvtier_connector.store.layout import TENANTS, BlockKey, adapter_name_label, parse_earlier_block_path
from kvtier_connector.store.progress import Progress
from kvtier_connector.store.records import Op
from kvtier_connector.store.scan import BlockEntry, Leftover, LeftoverKind, scan

_TENANT = re.compile(rf"{TENANTS}/([^/]+)/")
_FLUSH_EVERY = 4096
_MEET_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """What is to go; what is None does not matter."""

    older_than_seconds: float | None = None
    """Since the file was written."""
    generation: str | None = None
    tenant: str | None = None
    prefix: bytes | None = None
    """Hash of a block: it goes, and with it all blocks that continue it."""
    lora: str | None = None
    """Name of a LoRA adapter: its blocks go, whatever it held when they were computed."""

    @property
    def needs_headers(self) -> bool:
        """Whether only the header of a block tells if it is to go."""
        return self.prefix is not None or self.lora is not None


@dataclass(slots=True)
class Purged:
    """What was found, or removed, in one generation."""

    path: str
    blocks: int = 0
    bytes: int = 0
    leftovers: int = 0
    """Quarantined and partial files, which hold what a block holds."""
    failed: int = 0
    problem: str = ""


def purge(  # noqa: PLR0913 - keywords
    directory: Path,
    criteria: Criteria,
    *,
    is_dry: bool,
    fs: FileSystem = LOCAL,
    threads: int = 8,
    clock: Callable[[], int] = time.time_ns,
    progress: Progress | None = None,
) -> list[Purged]:
    """Remove what the criteria choose at or below the directory; with `is_dry` only count it.

    Raises:
        StoreUnavailable: the directory cannot be walked.
        ConfigInvalid: there is no generation of that name, or no tenant.
    """
    roots = [root for root in find_generations(directory, fs=fs) if criteria.generation in {None, root.name}]
    if not roots:
        name = "" if criteria.generation is None else f" {criteria.generation}"
        raise ConfigInvalid(f"{directory}: holds no generation{name}; kvtier inspect shows which there are")
    if criteria.tenant:
        _check_tenant(directory, roots, criteria.tenant, fs=fs)
    results = []
    progress = progress or Progress()
    # Where headers decide, all blocks are opened once before.
    progress.begin(len(roots) * (2 if criteria.needs_headers else 1))
    for root in roots:
        purged = Purged(str(root.relative_to(directory)))
        results.append(purged)
        try:
            _purge_one(root, criteria, purged, progress, is_dry=is_dry, fs=fs, threads=threads, clock=clock)
        except (StoreUnavailable, OSError) as error:
            purged.problem = str(error)
        progress.finish()
    return results


def _check_tenant(directory: Path, roots: Iterable[Path], tenant: str, *, fs: FileSystem) -> None:
    for root in roots:
        try:
            if tenant in find_tenants(fs, str(root)):
                return
        except OSError as error:
            raise StoreUnavailable(f"{root}: cannot be walked: {error}") from error
    raise ConfigInvalid(f"{directory}: holds no tenant {tenant}; kvtier inspect shows the largest there are")


def _purge_one(  # noqa: PLR0913 - keywords
    root: Path,
    criteria: Criteria,
    purged: Purged,
    progress: Progress,
    *,
    is_dry: bool,
    fs: FileSystem,
    threads: int,
    clock: Callable[[], int],
) -> None:
    fs = Beneath(fs, str(root))
    journal = JournalWriter(root, fs=fs, clock=clock)
    unread: list[OSError] = []
    for entry in _choose(root, criteria, progress, fs=fs, threads=threads, now_ns=clock(), unread=unread):
        if not is_dry:
            try:
                fs.unlink(f"{root}/{entry.path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                purged.failed, purged.problem = purged.failed + 1, str(error)
                continue
        if isinstance(entry, Leftover):
            purged.leftovers += 1
            continue
        purged.blocks, purged.bytes = purged.blocks + 1, purged.bytes + entry.size
        progress.add(entry.size)
        if not is_dry:
            journal.append(Op.GONE, entry.key, max(0, entry.size - HEADER_BYTES))
            if purged.blocks % _FLUSH_EVERY == 0:
                _flush(journal)
    _flush(journal)
    if unread:
        purged.failed, purged.problem = purged.failed + len(unread), purged.problem or str(unread[0])


def _flush(journal: JournalWriter) -> None:
    # News only: an engine that does not hear of it finds out by itself.
    with contextlib.suppress(StoreUnavailable):
        if journal.pending:
            journal.flush()


def _choose(  # noqa: PLR0913 - keywords
    root: Path,
    criteria: Criteria,
    progress: Progress,
    *,
    fs: FileSystem,
    threads: int,
    now_ns: int,
    unread: list[OSError],
) -> Iterator[BlockEntry | Leftover]:
    """Yield what is to go; of what cannot be looked at, why it cannot is added to `unread`."""
    members = None
    if criteria.needs_headers:
        members = _members(root, criteria, progress, fs=fs, threads=threads, unread=unread)
        progress.finish()
    for found in scan(root, fs=fs, threads=threads, unread=unread, on_share=progress.reach):
        entry = _with_earlier(found)
        if isinstance(entry, Leftover) and entry.kind is LeftoverKind.FOREIGN:
            continue
        if members is not None and not (isinstance(entry, BlockEntry) and entry.key in members):
            continue
        if criteria.tenant is not None and _tenant(entry) != criteria.tenant:
            continue
        age_seconds = (now_ns - entry.mtime_ns) / 1e9
        if criteria.older_than_seconds is not None and age_seconds <= criteria.older_than_seconds:
            continue
        yield entry


def _with_earlier(entry: BlockEntry | Leftover) -> BlockEntry | Leftover:
    """Take what an earlier format has for the block that it is: it holds what a block holds."""
    is_earlier = isinstance(entry, Leftover) and entry.kind is LeftoverKind.EARLIER
    key = parse_earlier_block_path(entry.path) if is_earlier else None
    return entry if key is None else BlockEntry(key, entry.path, entry.size, entry.mtime_ns)


def _members(  # noqa: PLR0913 - keywords
    root: Path, criteria: Criteria, progress: Progress, *, fs: FileSystem, threads: int, unread: list[OSError]
) -> set[BlockKey]:
    """Return the keys of the blocks whose headers say that they are meant; opens every block of the tenant."""
    keys: list[BlockKey] = []
    # A block of an earlier format may continue the prefix, or be the adapter's.
    earlier: list[BlockKey] = []
    for found in scan(root, fs=fs, threads=threads, unread=[]):
        entry = _with_earlier(found)
        if isinstance(entry, BlockEntry) and criteria.tenant in {None, entry.key.tenant}:
            (keys if entry is found else earlier).append(entry.key)
    parents: dict[BlockKey, BlockKey] = {}
    of_adapter: set[BlockKey] = set()
    label = None if criteria.lora is None else adapter_name_label(criteria.lora)

    def may_be_meant(key: BlockKey) -> bool:
        return label is not None or key.hash != criteria.prefix

    without_header = sum(map(may_be_meant, earlier))
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-purge") as pool:
        for number, some in enumerate(_parts(keys)):
            progress.reach(min(1.0, number * _MEET_AT_ONCE / max(1, len(keys))))
            met_here, refused = meet_all(pool, fs, str(root), some)
            unread += [each.error for each in refused]
            for met in met_here:
                without_header += met.header is None and may_be_meant(met.key)
                if met.header is None:
                    continue
                if met.header.lineage.parent:
                    parents[met.key] = met.key._replace(hash=met.header.lineage.parent)
                if label is not None and met.header.lineage.adapter.startswith(label):
                    of_adapter.add(met.key)
    if without_header:
        what = "chain" if label is None else "adapter"
        message = (
            f"{without_header} blocks whose {what} cannot be read; purge this generation with --generation {root.name}"
        )
        unread += [OSError(message)] * without_header
    keys += earlier
    continuing = set(keys) if criteria.prefix is None else _continuing(keys, parents, criteria.prefix)
    return continuing if label is None else continuing & of_adapter


def _continuing(keys: list[BlockKey], parents: dict[BlockKey, BlockKey], prefix: bytes) -> set[BlockKey]:
    """Return those with the hash, and all that continue them."""
    is_member: dict[BlockKey, bool] = {}
    for key in keys:
        path: list[BlockKey] = []
        at: BlockKey | None = key
        while at is not None and at not in is_member and at not in path[-1:]:
            path.append(at)
            is_member[at] = at.hash == prefix
            at = None if is_member[at] else parents.get(at)
        answer = is_member[path[-1]] if at is None else is_member[at]
        for each in path:
            is_member[each] = answer
    return {key for key in keys if is_member[key]}


def _parts(keys: list[BlockKey]) -> Iterator[list[BlockKey]]:
    for start in range(0, len(keys), _MEET_AT_ONCE):
        yield keys[start : start + _MEET_AT_ONCE]


def _tenant(entry: BlockEntry | Leftover) -> str:
    if isinstance(entry, BlockEntry):
        return entry.key.tenant
    match = _TENANT.match(entry.path)
    return "" if match is None else match[1]
