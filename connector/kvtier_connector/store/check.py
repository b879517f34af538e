# SPDX-License-Identifier: Apache-2.0
"""Verify everything under a directory and list what is wrong: ``python -m kvtier_connector.store.check DIR``.

Reads every byte and changes nothing; engines and the janitor may be at work meanwhile. Exit code 1 means problems.
Files are verified on threads of their own, which end with the check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.errors import ConnectorError
from kvtier_connector.store import identity
from kvtier_connector.store.checksums import HAS_AES
from kvtier_connector.store.format import FORMAT_VERSION, HEADER_BYTES, Fault, decode_header
from kvtier_connector.store.fs import LOCAL, READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import TIER_FILE, BlockKey
from kvtier_connector.store.progress import Progress, counted, existing_directory, readable_size
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS, BlockEntry, LeftoverKind, scan_parallel
from kvtier_connector.store.sealing import begin_reading
from kvtier_connector.store.verify import PIECE_BYTES

_LEFTOVERS = {
    LeftoverKind.PARTIAL: "its writer died before the block was whole; it can be removed",
    LeftoverKind.QUARANTINED: "a reader found it damaged and moved it away; it can be removed",
    LeftoverKind.FOREIGN: "no part of a tier; move it elsewhere",
}
_MOVED = "a reader moves it away, and the block is computed again"
EXPLAINED = {
    Fault.EMPTY: f"it has no bytes, as after a power failure; {_MOVED}",
    Fault.TRUNCATED: f"it ends too early; {_MOVED}",
    Fault.MAGIC: f"it does not begin as a block does; {_MOVED}",
    Fault.VERSION: "a later release wrote it; readers of that one serve it",
    Fault.HEADER: f"its header is damaged; {_MOVED}",
    Fault.KEY: f"it holds another block than its name says; {_MOVED}",
    Fault.LENGTH: "it is longer than its header says; readers compute the block again",
    Fault.CHECKSUM: f"its bytes are not those that were written; {_MOVED}",
    Fault.ALGORITHM: "it needs a checksum or an encryption that is not known here; "
    + ("a later release may serve it" if HAS_AES else "the package cryptography is missing: pip install cryptography"),
    Fault.KEY_MISSING: "it is encrypted with a key that is not here",
    Fault.KEY_WRONG: "it is encrypted with another key than the one of this name here",
    Fault.CLEAR: "it is not encrypted, and readers believe encrypted blocks only",
    Fault.TAG: f"its bytes are not those that were encrypted; {_MOVED}",
    Fault.IO: "the system could not read it; look at the volume",
}
_MOST_THREADS = 16


class Problem(NamedTuple):
    """One thing that should not be so."""

    path: str
    """Relative to the root; empty for the root itself."""
    kind: str
    """A fault, a kind of leftover, or ``identity`` or ``unreadable``: for programs."""
    message: str
    """For people."""


@dataclass(frozen=True)
class Report:
    """What a check saw."""

    blocks: int
    bytes: int
    problems: tuple[Problem, ...]
    unverified: int = 0
    """Blocks whose key was not given: their headers and lengths are right, of their payloads nothing is known."""


def check(root: Path, *, fs: FileSystem = LOCAL, partial_age_seconds: float = PARTIAL_AGE_SECONDS) -> list[Problem]:
    """Return every problem under the root, in the order of their paths."""
    return list(inspect(root, fs=fs, partial_age_seconds=partial_age_seconds).problems)


def inspect(  # noqa: PLR0913 - keywords with defaults
    root: Path,
    *,
    fs: FileSystem = LOCAL,
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    threads: int = 1,
    keyring: Keyring | None = None,
    on_block: Callable[[int], None] = lambda _: None,
) -> Report:
    """Verify every file under the root of one generation.

    Args:
        root: The directory of ``tier.json``.
        fs: The system calls.
        partial_age_seconds: Younger partial files belong to a writer at work.
        threads: How many files are verified at once.
        keyring: The keys of encrypted blocks.
        on_block: Told the size of each file that was verified, by the calling thread.
    """
    problems = _identity_problems(fs, root)
    blocks = size = unverified = 0
    try:
        for entry, fault in _verify_all(fs, root, partial_age_seconds, threads, keyring):
            if isinstance(entry, Problem):
                problems.append(entry)
                continue
            blocks += 1
            size += entry.size
            on_block(entry.size)
            if fault in {Fault.KEY_MISSING, Fault.KEY_WRONG}:
                unverified += 1
            elif fault is not None:
                problems.append(Problem(entry.path, fault.value, EXPLAINED[fault]))
    except ConnectorError as error:
        problems.append(Problem("", "unreadable", str(error)))
    return Report(blocks, size, tuple(sorted(problems)), unverified)


def inspect_all(
    directory: Path,
    *,
    partial_age_seconds: float = PARTIAL_AGE_SECONDS,
    threads: int = 1,
    keyring: Keyring | None = None,
    on_block: Callable[[int], None] = lambda _: None,
) -> Report:
    """Verify every generation at or below the directory; paths in the report are relative to the directory."""
    try:
        roots = find_generations(directory)
    except ConnectorError as error:
        return Report(0, 0, (Problem("", "unreadable", str(error)),))
    blocks = size = unverified = 0
    problems: list[Problem] = []
    # A directory without any is checked as one, and the report says what it lacks.
    for root in roots or [directory]:
        report = inspect(
            root, partial_age_seconds=partial_age_seconds, threads=threads, keyring=keyring, on_block=on_block
        )
        prefix = root.relative_to(directory)
        blocks += report.blocks
        size += report.bytes
        unverified += report.unverified
        problems += [
            problem if root == directory else problem._replace(path=str(prefix / problem.path))
            for problem in report.problems
        ]
    return Report(blocks, size, tuple(problems), unverified)


def verify(fs: FileSystem, path: str, key: BlockKey, keyring: Keyring | None = None) -> Fault | None:
    """Read one block file piece by piece; return what is wrong with it, None if it is sound or gone."""
    try:
        fd = fs.open(path, READ_FLAGS)
    except FileNotFoundError:
        return None
    except OSError:
        return Fault.IO
    try:
        return _verify_open(fs, fd, key, keyring)
    except OSError:
        return Fault.IO
    finally:
        with contextlib.suppress(OSError):
            fs.close(fd)


def _verify_all(
    fs: FileSystem, root: Path, partial_age_seconds: float, threads: int, keyring: Keyring | None
) -> Iterator[tuple[BlockEntry | Problem, Fault | None]]:
    """Yield the leftovers as problems, and the blocks with what is wrong with them; few are looked at ahead."""
    waiting: deque[tuple[BlockEntry, Future[Fault | None]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvtier-check") as pool:
        for entry in scan_parallel(root, fs=fs, partial_age_seconds=partial_age_seconds, threads=threads):
            if not isinstance(entry, BlockEntry):
                yield Problem(entry.path, entry.kind.value, _LEFTOVERS[entry.kind]), None
                continue
            waiting.append((entry, pool.submit(verify, fs, f"{root}/{entry.path}", entry.key, keyring)))
            if len(waiting) >= 4 * threads:
                oldest, future = waiting.popleft()
                yield oldest, future.result()
        while waiting:
            oldest, future = waiting.popleft()
            yield oldest, future.result()


def _verify_open(fs: FileSystem, fd: int, key: BlockKey, keyring: Keyring | None) -> Fault | None:
    page = memoryview(bytearray(HEADER_BYTES))
    header = decode_header(page[: read_page(fs, fd, page)])
    if isinstance(header, Fault):
        return header
    if header.key != key:
        return Fault.KEY
    size = fs.fstat(fd).st_size
    if size != HEADER_BYTES + header.payload_bytes:
        return Fault.TRUNCATED if size < HEADER_BYTES + header.payload_bytes else Fault.LENGTH
    reading = begin_reading(header, page, keyring if header.encryption else None)
    if isinstance(reading, Fault):
        return reading
    piece = memoryview(bytearray(PIECE_BYTES))
    offset = HEADER_BYTES
    while count := fs.preadv(fd, [piece], offset):
        reading.take(piece[:count])
        offset += count
    return reading.end()


def _identity_problems(fs: FileSystem, root: Path) -> list[Problem]:
    try:
        document = identity.read(root, fs=fs)
    except ConnectorError as error:
        return [Problem(TIER_FILE, "identity", str(error))]
    if document is None:
        return [
            Problem(TIER_FILE, "identity", f"there is none in {root}, nor below: give a directory that holds a tier")
        ]
    if document.get("format") != FORMAT_VERSION or not isinstance(document.get("digest"), str):
        return [
            Problem(TIER_FILE, "identity", f"format {document.get('format')!r} is not {FORMAT_VERSION}, or no digest")
        ]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    is_shown = sys.stderr.isatty() if options.progress is None else options.progress
    progress = Progress(sys.stderr if is_shown else None, now=time.monotonic)
    keyring = Keyring(str(options.keys_dir)) if options.keys_dir else None
    report = inspect_all(
        options.directory,
        keyring=keyring,
        partial_age_seconds=options.partial_age,
        threads=options.threads,
        on_block=progress.add,
    )
    progress.end()
    sys.stdout.write(_as_json(report) if options.json else _as_text(report))
    return 1 if report.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier check",
        description=(__doc__ or "").split(":")[0],
        epilog="exit code: 0 all is well, 1 there are problems, 2 the command line is wrong",
    )
    parser.add_argument(
        "directory", type=existing_directory, help="a generation (the directory of tier.json), or any above"
    )
    parser.add_argument(
        "--keys-dir",
        type=Path,
        metavar="KEYS",
        help="directory with the keys of encrypted blocks, one file each; without a block's key only its header and "
        "length are verified",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--threads",
        type=_threads,
        default=min(_MOST_THREADS, 2 * (os.cpu_count() or 1)),
        metavar="N",
        help="files read at once (default: %(default)s)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show on stderr how far it is (default: if that is a terminal)",
    )
    parser.add_argument(
        "--partial-age",
        type=float,
        default=PARTIAL_AGE_SECONDS,
        metavar="SECONDS",
        help="partial files younger than this belong to a writer at work (default: %(default)s)",
    )
    return parser


def _threads(text: str) -> int:
    """Read a number of threads; argparse turns the error into a message."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _as_json(report: Report) -> str:
    problems = [problem._asdict() for problem in report.problems]
    document = {
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unverified": report.unverified,
        "problems_by_kind": Counter(problem.kind for problem in report.problems),
        "problems": problems,
    }
    return json.dumps(document, indent=2) + "\n"


def _as_text(report: Report) -> str:
    lines = [f"{problem.path or '.'}: {problem.kind}: {problem.message}" for problem in report.problems]
    if report.unverified:
        lines.append(f"{report.unverified} blocks are encrypted with a key that was not given, see --keys-dir")
    kinds = Counter(problem.kind for problem in report.problems)
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    lines.append(
        f"{counted(report.blocks, 'block')}, {readable_size(report.bytes)}, {counted(len(report.problems), 'problem')}"
        + (f": {summary}" if summary else "")
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
