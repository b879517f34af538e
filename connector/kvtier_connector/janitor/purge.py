# SPDX-License-Identifier: Apache-2.0
"""Removes the blocks of a generation, a tenant or a LoRA adapter, or all of them, with partial and quarantined files.

Engines may be storing meanwhile: a mark (see `store.purges`) keeps what they queued before from landing afterwards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvtier_connector.errors import ConfigInvalid, StoreUnavailable
from kvtier_connector.janitor.walk import find_tenants
from kvtier_connector.store.format import HEADER_BYTES, Fault, Header, decode_header
from kvtier_connector.store.fs import LOCAL, READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.journal import JournalWriter
from kvtier_connector.store.layout import (
    BLOCKS,
    adapter_name_label,
    parse_block_path,
    parse_earlier_block_path,
    tenant_of,
)
from kvtier_connector.store.progress import Progress
from kvtier_connector.store.purges import Purge, mark
from kvtier_connector.store.records import Op
from kvtier_connector.store.scan import BlockEntry, Leftover, LeftoverKind, scan

_FLUSH_EVERY = 4096
_READ_AT_ONCE = 4096
_MOST_PASSES = 10
_NO_AGE_SECONDS = -1e9
"""A partial file matches also where its time is ahead of this clock."""

_UNTOLD = {Fault.OUTDATED, Fault.VERSION, Fault.ALGORITHM}
"""Intact headers that this release cannot read."""


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """Which blocks to remove: those that match every field that is not None."""

    generation: str | None = None
    tenant: str | None = None
    """Empty for the common blocks."""
    lora: str | None = None
    """Name of a LoRA adapter, whatever weights it had when the blocks were computed."""


@dataclass(slots=True)
class Purged:
    """Files found, or removed, in one generation."""

    path: str
    blocks: int = 0
    bytes: int = 0
    """Of all files counted here."""
    partials: int = 0
    """Files that a writer had not finished; each may hold a whole block."""
    quarantined: int = 0
    failed: int = 0
    problem: str = ""


_Entry = BlockEntry | Leftover


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
    """Remove the files that match, at or below the directory; with `is_dry` only count them.

    Raises:
        StoreUnavailable: the directory cannot be walked.
        ConfigInvalid: there is no generation of that name, or no such tenant.
    """
    roots = [root for root in find_generations(directory, fs=fs) if criteria.generation in {None, root.name}]
    if not roots:
        name = "" if criteria.generation is None else f" {criteria.generation}"
        raise ConfigInvalid(f"{directory}: holds no generation{name}; kvtier inspect shows which there are")
    if criteria.tenant:
        _check_tenant(directory, roots, criteria.tenant, fs=fs)
    progress = progress or Progress()
    progress.begin(len(roots) * (1 if is_dry else 2))
    results = []
    for root in roots:
        one = _Purging(root, criteria, progress, fs=fs.beneath(str(root)), threads=threads, clock=clock)
        one.result.path = str(root.relative_to(directory))
        try:
            one.run(is_dry=is_dry)
        except (StoreUnavailable, OSError) as error:
            one.result.problem = str(error)
        results.append(one.result)
    return results


def _check_tenant(directory: Path, roots: Iterable[Path], tenant: str, *, fs: FileSystem) -> None:
    for root in roots:
        try:
            if tenant in find_tenants(fs, str(root)):
                return
        except OSError as error:
            raise StoreUnavailable(f"{root}: cannot be walked: {error}") from error
    raise ConfigInvalid(f"{directory}: holds no tenant {tenant}; kvtier inspect shows the largest there are")


class _Purging:
    """The purge of one generation. One thread, but for reading headers."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        root: Path,
        criteria: Criteria,
        progress: Progress,
        *,
        fs: FileSystem,
        threads: int,
        clock: Callable[[], int],
    ) -> None:
        self.result = Purged("")
        self._root = root
        self._tenant = criteria.tenant
        self._adapter = None if criteria.lora is None else adapter_name_label(criteria.lora)
        self._progress = progress
        self._fs = fs
        self._threads = threads
        self._clock = clock
        self._journal = JournalWriter(root, fs=fs, clock=clock)

    def run(self, *, is_dry: bool) -> None:
        if is_dry:
            for entry in self._choose([]):
                self._count(entry)
            self._progress.finish()
            return
        mark(self._fs, str(self._root), Purge(self._tenant, self._adapter))
        # A pass may miss a file that is renamed while its directory is listed, so another follows until none is found.
        # Partial files do not count: their writers look at the mark before the rename, and remove them.
        for _ in range(_MOST_PASSES):
            is_clean = self._pass()
            self._progress.finish()
            if is_clean or self.result.failed:
                break
        else:
            self.result.problem = self.result.problem or (
                "engines go on storing what is to go: they may run an earlier release; set the mode to Bypass, and "
                "purge again"
            )

    def _pass(self) -> bool:
        """Remove all that is there; return whether there were no more than partial files."""
        unread: list[OSError] = []
        is_clean = True
        for entry in self._choose(unread):
            is_clean &= isinstance(entry, Leftover) and entry.kind is LeftoverKind.PARTIAL
            try:
                self._fs.unlink(f"{self._root}/{entry.path}")
            except FileNotFoundError:
                continue
            except OSError as error:
                self.result.failed, self.result.problem = self.result.failed + 1, str(error)
                continue
            self._count(entry)
            if isinstance(entry, BlockEntry):
                self._journal.append(Op.GONE, entry.key, max(0, entry.size - HEADER_BYTES))
                if self.result.blocks % _FLUSH_EVERY == 0:
                    self._flush()
        self._flush()
        if unread:
            self.result.failed += len(unread)
            self.result.problem = self.result.problem or str(unread[0])
        return is_clean

    def _count(self, entry: _Entry) -> None:
        self.result.bytes += entry.size
        if isinstance(entry, BlockEntry):
            self.result.blocks += 1
            self._progress.add(entry.size)
        elif entry.kind is LeftoverKind.PARTIAL:
            self.result.partials += 1
        else:
            self.result.quarantined += 1

    def _flush(self) -> None:
        # The janitor counts again by walking, so a record that cannot be written costs nothing.
        with contextlib.suppress(StoreUnavailable):
            if self._journal.pending:
                self._journal.flush()

    def _choose(self, unread: list[OSError]) -> Iterator[_Entry]:
        """Yield the files that match; errors of those that cannot be read are added to `unread`."""
        found = scan(
            self._root,
            fs=self._fs,
            partial_age_seconds=_NO_AGE_SECONDS,
            threads=self._threads,
            unread=unread,
            on_share=self._progress.reach,
        )
        entries = (each for each in map(_with_earlier, found) if self._may_match(each))
        if self._adapter is None:
            yield from entries
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="kvtier-purge") as pool:
            while some := list(islice(entries, _READ_AT_ONCE)):
                for entry, answer in zip(some, pool.map(self._is_of_adapter, some), strict=True):
                    if isinstance(answer, OSError):
                        unread.append(answer)
                    elif answer:
                        yield entry

    def _may_match(self, entry: _Entry) -> bool:
        """Return whether a file holds a block, whole or in part, of the tenant."""
        if isinstance(entry, Leftover):
            is_block = entry.kind is LeftoverKind.QUARANTINED or (
                entry.kind is LeftoverKind.PARTIAL and BLOCKS in entry.path.split("/")
            )
            if not is_block:
                return False
        return self._tenant is None or tenant_of(entry.path) == self._tenant

    def _is_of_adapter(self, entry: _Entry) -> bool | OSError:
        """Return whether the header names the adapter; True for a partial or damaged file that does not tell."""
        path = f"{self._root}/{entry.path}"
        if isinstance(entry, BlockEntry) and parse_block_path(entry.path) is None:
            return self._untold(path)
        try:
            fd = self._fs.open(path, READ_FLAGS)
            try:
                page = memoryview(bytearray(HEADER_BYTES))
                header = decode_header(page[: read_page(self._fs, fd, page)])
            finally:
                with contextlib.suppress(OSError):
                    self._fs.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            return error
        if isinstance(header, Header):
            return header.lineage.adapter.startswith(self._adapter or "")
        if isinstance(entry, Leftover) or header not in _UNTOLD:
            # Nothing is lost: no engine reads such a file.
            return True
        return self._untold(path)

    def _untold(self, path: str) -> OSError:
        return OSError(
            f"{path}: blocks of another release do not tell their adapter; purge this generation with --generation "
            f"{self._root.name}"
        )


def _with_earlier(entry: _Entry) -> _Entry:
    """Return a block of an earlier format as a block: it holds the same."""
    is_earlier = isinstance(entry, Leftover) and entry.kind is LeftoverKind.EARLIER
    key = parse_earlier_block_path(entry.path) if is_earlier else None
    return entry if key is None else BlockEntry(key, entry.path, entry.size, entry.mtime_ns)
