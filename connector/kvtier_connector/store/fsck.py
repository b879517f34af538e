# SPDX-License-Identifier: Apache-2.0
"""Checks and counts everything under a directory, and changes nothing.

`check` and `check_all` read every byte and list all problems, on threads that end with the check. `count_generation`
reads names, sizes and times only. Engines and the janitor may be at work meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.engine import BLOCK_FORMAT_VERSION
from kvtier_connector.contract.errors import ConnectorError
from kvtier_connector.store import identity
from kvtier_connector.store.crypto import Keyring, begin_reading
from kvtier_connector.store.fs import LOCAL, FileSystem, opened, read_into
from kvtier_connector.store.header import HEADER_BYTES, NOT_PACKED, Fault, Header, decode_header, misplaced
from kvtier_connector.store.identity import find_generations
from kvtier_connector.store.layout import TIER_FILE, Home, find_home
from kvtier_connector.store.reading import PIECE_BYTES
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS, BlockEntry, Leftover, LeftoverKind, WalkProgress, scan

_LEFTOVERS = {
    LeftoverKind.PARTIAL: "its writer died before the block was whole; it can be removed",
    LeftoverKind.QUARANTINED: "a reader found it damaged and moved it away; it can be removed",
    LeftoverKind.FOREIGN: "no part of a tier; move it elsewhere",
}


class FsckProblem(NamedTuple):
    """One thing that should not be so."""

    path: str
    """Relative to the root; empty for the root itself."""
    kind: str
    """A fault, a kind of leftover, or ``identity`` or ``unreadable``: for programs."""
    message: str
    """For people."""


@dataclass(slots=True)
class FsckReport:
    """Result of a check."""

    blocks: int = 0
    bytes: int = 0
    problems: list[FsckProblem] = field(default_factory=list)
    unverified: int = 0
    """Blocks whose key was not given: their headers and lengths are right, of their payloads nothing is known."""
    compressed: int = 0
    """Blocks that were written compressed."""
    saved_bytes: int = 0
    """How many bytes fewer they take for that."""


def check_all(
    directory: Path,
    *,
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    threads: int = 1,
    keyring: Keyring | None = None,
    progress: WalkProgress | None = None,
) -> FsckReport:
    """Verify every generation at or below the directory; paths in the report are relative to the directory."""
    report = FsckReport()
    try:
        roots = find_generations(directory)
    except ConnectorError as error:
        report.problems.append(FsckProblem("", "unreadable", str(error)))
        return report
    progress = progress or WalkProgress()
    progress.begin(len(roots))
    for root in roots:
        first = len(report.problems)
        check_generation(
            root, report, partial_age_seconds=partial_age_seconds, threads=threads, keyring=keyring, progress=progress
        )
        if root != directory:
            prefix = root.relative_to(directory)
            report.problems[first:] = [
                problem._replace(path=str(prefix / problem.path)) for problem in report.problems[first:]
            ]
    return report


def check_generation(  # noqa: PLR0913 - keywords with defaults
    root: Path,
    report: FsckReport,
    *,
    fs: FileSystem = LOCAL,
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    threads: int = 1,
    keyring: Keyring | None = None,
    progress: WalkProgress | None = None,
) -> None:
    """Verify every file under the root of one generation, so many at once, and add the result to the report."""
    progress = progress or WalkProgress()
    problem = _identity_problem(fs, root)
    problems = [FsckProblem(TIER_FILE, "identity", problem)] if problem else []
    entries = scan(root, fs=fs, partial_age_seconds=partial_age_seconds, threads=threads, on_share=progress.reach)
    try:
        for entry, found in _verify_all(fs, root, entries, threads, keyring):
            if not isinstance(entry, BlockEntry):
                problems.append(FsckProblem(entry.path, entry.kind.value, _LEFTOVERS[entry.kind]))
                continue
            report.blocks += 1
            report.bytes += entry.size
            progress.add(entry.size)
            if isinstance(found, Header):
                report.compressed += found.packing != NOT_PACKED
                report.saved_bytes += found.block_bytes - found.payload_bytes
            elif found in {Fault.KEY_MISSING, Fault.KEY_WRONG}:
                report.unverified += 1
            elif found is not None:
                problems.append(FsckProblem(entry.path, found.value, found.explanation))
    except ConnectorError as error:
        problems.append(FsckProblem("", "unreadable", str(error)))
    progress.finish()
    report.problems += sorted(problems)


_Verified = Header | Fault | None
"""The header of a sound block, the fault of another, or None for a file that is gone."""


def _verify_all(
    fs: FileSystem, root: Path, entries: Iterator[BlockEntry | Leftover], threads: int, keyring: Keyring | None
) -> Iterator[tuple[BlockEntry | Leftover, _Verified]]:
    """Verify the blocks among the entries; few are read ahead of the caller."""
    waiting: deque[tuple[BlockEntry, Future[_Verified]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-check") as pool:
        for entry in entries:
            if not isinstance(entry, BlockEntry):
                yield entry, None
                continue
            waiting.append((entry, pool.submit(_verify, fs, root, entry, keyring)))
            if len(waiting) >= 4 * threads:
                oldest, future = waiting.popleft()
                yield oldest, future.result()
        for oldest, future in waiting:
            yield oldest, future.result()


def _verify(fs: FileSystem, root: Path, entry: BlockEntry, keyring: Keyring | None) -> _Verified:
    """Read a block file piece by piece.

    A compressed payload is not decompressed: its checksum says that it is the one that was written.
    """
    try:
        with opened(fs, f"{root}/{entry.path}") as fd:
            page = memoryview(bytearray(HEADER_BYTES))
            header = decode_header(page[: read_into(fs, fd, page)])
            if isinstance(header, Fault):
                return header
            # A directory that no generation can have is the home of no block.
            home = find_home(root.absolute().name) or Home("")
            if (fault := misplaced(header, entry.key, home)) is not None:
                return fault
            size = fs.fstat(fd).st_size
            if size != HEADER_BYTES + header.payload_bytes:
                return Fault.TRUNCATED if size < HEADER_BYTES + header.payload_bytes else Fault.TRAILING
            reader = begin_reading(header, page, keyring if header.encryption else None)
            if isinstance(reader, Fault):
                return reader
            piece = memoryview(bytearray(PIECE_BYTES))
            offset = HEADER_BYTES
            while count := fs.preadv(fd, [piece], offset):
                reader.take(piece[:count])
                offset += count
            return reader.end() or header
    except FileNotFoundError:
        return None
    except OSError:
        return Fault.IO


def _identity_problem(fs: FileSystem, root: Path) -> str:
    """Return why no engine can use the directory; empty if one can."""
    try:
        document = identity.read(root, fs=fs)
    except ConnectorError as error:
        return str(error)
    if document is None:
        return f"none in {root}, nor below: give a directory that holds a tier"
    version = document.get("format")
    if version != BLOCK_FORMAT_VERSION or not isinstance(document.get("digest"), str):
        return f"format {version!r} is not {BLOCK_FORMAT_VERSION}, or no digest"
    if document["digest"] == root.absolute().name:
        return ""
    return f"it describes generation {document['digest']}: the directory was copied or renamed, and no engine uses it"


AGES = (("1 h", 3600), ("1 d", 86_400), ("7 d", 604_800), ("30 d", 2_592_000))
"""Upper bounds in seconds, with the names that people see."""
OLDER = "older"


@dataclass(slots=True)
class FileCount:
    """Some files together."""

    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Put one more on it."""
        self.files += 1
        self.bytes += size


@dataclass(slots=True)
class GenerationCount:
    """Contents of one generation, counted without reading its blocks."""

    path: str
    """Relative to the directory that was asked about; ``.`` for that itself."""
    identity: dict[str, object]
    """From ``tier.json``; empty if there is none that can be read."""
    problem: str = ""
    """Why not all of it could be looked at."""
    blocks: FileCount = field(default_factory=FileCount)
    tenants: dict[str, FileCount] = field(default_factory=dict)
    """The blocks of each tenant; common ones are in none."""
    ages: dict[str, FileCount] = field(default_factory=lambda: {name: FileCount() for name in [*dict(AGES), OLDER]})
    """The blocks, by the time since they were written."""
    oldest_seconds: float | None = None
    newest_seconds: float | None = None
    leftovers: dict[str, FileCount] = field(default_factory=lambda: {kind.value: FileCount() for kind in LeftoverKind})
    """Young partial files too: here they are writers at work, or what is left of them."""


def count_generation(
    directory: Path, root: Path, *, now_ns: int, threads: int, progress: WalkProgress
) -> GenerationCount:
    """Count what one generation holds."""
    try:
        document = identity.read(root)
        generation = GenerationCount(str(root.relative_to(directory)), document["identity"] if document else {})
    except ConnectorError as error:
        generation = GenerationCount(str(root.relative_to(directory)), {}, str(error))
    try:
        entries = scan(root, partial_age_seconds=0, clock=lambda: now_ns, threads=threads, on_share=progress.reach)
        for entry in entries:
            if isinstance(entry, BlockEntry):
                _add_block(generation, entry, now_ns)
                progress.add(entry.size)
            else:
                generation.leftovers[entry.kind.value].add(entry.size)
    except ConnectorError as error:
        generation.problem = str(error)
    progress.finish()
    return generation


def _add_block(generation: GenerationCount, entry: BlockEntry, now_ns: int) -> None:
    age = (now_ns - entry.mtime_ns) / 1e9
    generation.blocks.add(entry.size)
    if entry.key.tenant:
        generation.tenants.setdefault(entry.key.tenant, FileCount()).add(entry.size)
    generation.ages[next((name for name, bound in AGES if age <= bound), OLDER)].add(entry.size)
    generation.oldest_seconds = age if generation.oldest_seconds is None else max(generation.oldest_seconds, age)
    generation.newest_seconds = age if generation.newest_seconds is None else min(generation.newest_seconds, age)
