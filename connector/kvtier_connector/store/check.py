# SPDX-License-Identifier: Apache-2.0
"""Verify everything under a root and list what is wrong: ``python -m kvtier_connector.store.check DIR``.

Reads every byte and changes nothing; engines and the janitor may be at work meanwhile. Exit code 1 means problems.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvtier_connector.errors import ConnectorError
from kvtier_connector.store import identity
from kvtier_connector.store.format import CHECKSUM_BYTES, FORMAT_VERSION, HEADER_BYTES, Fault, decode_header
from kvtier_connector.store.fs import LOCAL, READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.layout import TIER_FILE, BlockKey
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS, BlockEntry, LeftoverKind, scan

_PIECE_BYTES = 4 << 20

_LEFTOVERS = {
    LeftoverKind.PARTIAL: "its writer died before the block was whole; it can be removed",
    LeftoverKind.QUARANTINED: "a reader found it damaged and moved it away; it can be removed",
    LeftoverKind.FOREIGN: "no part of a tier; move it elsewhere",
}


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


def check(root: Path, *, fs: FileSystem = LOCAL, partial_age_seconds: float = PARTIAL_AGE_SECONDS) -> list[Problem]:
    """Return every problem under the root, in the order of their paths."""
    return list(inspect(root, fs=fs, partial_age_seconds=partial_age_seconds).problems)


def inspect(root: Path, *, fs: FileSystem = LOCAL, partial_age_seconds: float = PARTIAL_AGE_SECONDS) -> Report:
    """Verify every file under the root."""
    problems = _identity_problems(fs, root)
    blocks = size = 0
    try:
        for entry in scan(root, fs=fs, partial_age_seconds=partial_age_seconds):
            if not isinstance(entry, BlockEntry):
                problems.append(Problem(entry.path, entry.kind.value, _LEFTOVERS[entry.kind]))
                continue
            blocks += 1
            size += entry.size
            fault = verify(fs, f"{root}/{entry.path}", entry.key)
            if fault is not None:
                problems.append(Problem(entry.path, fault.value, f"a reader would answer {fault.name}"))
    except ConnectorError as error:
        problems.append(Problem("", "unreadable", str(error)))
    return Report(blocks, size, tuple(sorted(problems)))


def verify(fs: FileSystem, path: str, key: BlockKey) -> Fault | None:
    """Read one block file piece by piece; return what is wrong with it, None if it is sound or gone."""
    try:
        fd = fs.open(path, READ_FLAGS)
    except FileNotFoundError:
        return None
    except OSError:
        return Fault.IO
    try:
        return _verify_open(fs, fd, key)
    except OSError:
        return Fault.IO
    finally:
        with contextlib.suppress(OSError):
            fs.close(fd)


def _verify_open(fs: FileSystem, fd: int, key: BlockKey) -> Fault | None:
    page = memoryview(bytearray(HEADER_BYTES))
    header = decode_header(page[: read_page(fs, fd, page)])
    if isinstance(header, Fault):
        return header
    if header.key != key:
        return Fault.KEY
    size = fs.fstat(fd).st_size
    if size != HEADER_BYTES + header.payload_bytes:
        return Fault.TRUNCATED if size < HEADER_BYTES + header.payload_bytes else Fault.LENGTH
    piece = memoryview(bytearray(_PIECE_BYTES))
    hasher = blake3()
    offset = HEADER_BYTES
    while count := fs.preadv(fd, [piece], offset):
        hasher.update(piece[:count])
        offset += count
    return None if hasher.digest(length=CHECKSUM_BYTES) == header.checksum else Fault.CHECKSUM


def _identity_problems(fs: FileSystem, root: Path) -> list[Problem]:
    try:
        document = identity.read(root, fs=fs)
    except ConnectorError as error:
        return [Problem(TIER_FILE, "identity", str(error))]
    if document is None:
        return [Problem(TIER_FILE, "identity", f"{root} has no {TIER_FILE}: is it the root of a tier?")]
    if document.get("format") != FORMAT_VERSION or not isinstance(document.get("digest"), str):
        return [
            Problem(TIER_FILE, "identity", f"format {document.get('format')!r} is not {FORMAT_VERSION}, or no digest")
        ]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtier_connector.store.check", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("directory", type=Path, help="root of one generation of a tier: the directory of tier.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--partial-age",
        type=float,
        default=PARTIAL_AGE_SECONDS,
        metavar="SECONDS",
        help="partial files younger than this belong to a writer at work (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    report = inspect(options.directory, partial_age_seconds=options.partial_age)
    sys.stdout.write(_as_json(report) if options.json else _as_text(report))
    return 1 if report.problems else 0


def _as_json(report: Report) -> str:
    problems = [problem._asdict() for problem in report.problems]
    return json.dumps({"blocks": report.blocks, "bytes": report.bytes, "problems": problems}, indent=2) + "\n"


def _as_text(report: Report) -> str:
    lines = [f"{problem.path or '.'}: {problem.kind}: {problem.message}" for problem in report.problems]
    lines.append(f"{report.blocks} blocks, {report.bytes} bytes, {len(report.problems)} problems")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
