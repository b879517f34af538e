# SPDX-License-Identifier: Apache-2.0
"""Show what lies on a volume, by generation, size and age: ``python -m kvtier_connector.store.inspect DIR``.

Looks at names, sizes and times, reads no block and changes nothing; engines and the janitor may be at work meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvtier_connector.errors import ConnectorError
from kvtier_connector.store import identity
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.generations import find_generations
from kvtier_connector.store.progress import counted, existing_directory, readable_size
from kvtier_connector.store.scan import BlockEntry, LeftoverKind, list_journals, scan_parallel

AGES = (("1 h", 3600), ("1 d", 86_400), ("7 d", 604_800), ("30 d", 2_592_000))
"""Upper bounds in seconds, with the names that people see."""
OLDER = "older"
MOST_TENANTS = 20
"""The largest, for people; JSON has all."""


@dataclass(slots=True)
class Heap:
    """Some files together."""

    files: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Put one more on it."""
        self.files += 1
        self.bytes += size


@dataclass(slots=True)
class Generation:
    """What is known of one generation without reading its blocks."""

    path: str
    """Relative to the directory that was asked about; ``.`` for that itself."""
    identity: dict[str, object]
    """From ``tier.json``; empty if there is none that can be read."""
    problem: str = ""
    """Why not all of it could be looked at."""
    blocks: Heap = field(default_factory=Heap)
    tenants: dict[str, Heap] = field(default_factory=dict)
    """The blocks of each tenant; common ones are in none."""
    ages: dict[str, Heap] = field(default_factory=lambda: {name: Heap() for name in [*dict(AGES), OLDER]})
    """The blocks, by the time since they were written."""
    oldest_seconds: float | None = None
    newest_seconds: float | None = None
    leftovers: dict[str, Heap] = field(default_factory=lambda: {kind.value: Heap() for kind in LeftoverKind})
    """Young partial files too: here they are writers at work, or what is left of them."""
    journals: Heap = field(default_factory=Heap)


def look_at(directory: Path, root: Path, *, fs: FileSystem = LOCAL, now_ns: int, threads: int = 4) -> Generation:
    """Count what one generation holds."""
    try:
        document = identity.read(root, fs=fs)
        generation = Generation(str(root.relative_to(directory)), document["identity"] if document else {})
    except ConnectorError as error:
        generation = Generation(str(root.relative_to(directory)), {}, str(error))
    try:
        for entry in scan_parallel(root, fs=fs, partial_age_seconds=0, clock=lambda: now_ns, threads=threads):
            if isinstance(entry, BlockEntry):
                _add_block(generation, entry, now_ns)
            else:
                generation.leftovers[entry.kind.value].add(entry.size)
        for _, size, _ in list_journals(root, fs=fs):
            generation.journals.add(size)
    except ConnectorError as error:
        generation.problem = str(error)
    return generation


def _add_block(generation: Generation, entry: BlockEntry, now_ns: int) -> None:
    age = (now_ns - entry.mtime_ns) / 1e9
    generation.blocks.add(entry.size)
    if entry.key.tenant:
        generation.tenants.setdefault(entry.key.tenant, Heap()).add(entry.size)
    generation.ages[next((name for name, bound in AGES if age <= bound), OLDER)].add(entry.size)
    generation.oldest_seconds = age if generation.oldest_seconds is None else max(generation.oldest_seconds, age)
    generation.newest_seconds = age if generation.newest_seconds is None else min(generation.newest_seconds, age)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = _parser().parse_args(arguments)
    directory: Path = options.directory
    try:
        roots = find_generations(directory)
        volume = os.statvfs(directory)
    except (ConnectorError, OSError) as error:
        sys.stderr.write(f"{directory}: {error}\n")
        return 1
    now_ns = time.time_ns()
    generations = [look_at(directory, root, now_ns=now_ns, threads=options.threads) for root in roots]
    total, free = volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize
    if options.json:
        document = {"volume": {"bytes": total, "free": free}, "generations": [asdict(each) for each in generations]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        blocks = Heap(sum(each.blocks.files for each in generations), sum(each.blocks.bytes for each in generations))
        sys.stdout.write(
            f"volume: {readable_size(total)}, {readable_size(free)} free\n"
            f"blocks: {_heap(blocks)} in {counted(len(generations), 'generation')}\n"
        )
        sys.stdout.writelines(_as_text(each) for each in generations)
    return 1 if any(each.problem for each in generations) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvtier inspect",
        description=(__doc__ or "").split(":")[0],
        epilog="exit code: 0 all was looked at, 1 not all could be, 2 the command line is wrong",
    )
    parser.add_argument(
        "directory", type=existing_directory, help="a generation (the directory of tier.json), or any above"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=4, metavar="N", help="directories read at once (default: 4)")
    return parser


def _as_text(generation: Generation) -> str:
    lines = ["", generation.path]
    if generation.problem:
        lines.append(f"  problem     {generation.problem}")
    lines += [f"  {name:11} {value}" for name, value in sorted(generation.identity.items())]
    lines.append(f"  {'blocks':11} {_heap(generation.blocks)}")
    if generation.oldest_seconds is not None and generation.newest_seconds is not None:
        lines.append(f"  written     {_age(generation.oldest_seconds)} to {_age(generation.newest_seconds)} ago")
        lines += [
            f"    {'over 30 d' if name == OLDER else 'up to ' + name:11} {_heap(heap)}"
            for name, heap in generation.ages.items()
            if heap.files
        ]
    if generation.tenants:
        lines.append(f"  {'tenants':11} {len(generation.tenants)}")
        largest = sorted(generation.tenants.items(), key=lambda item: (-item[1].bytes, item[0]))[:MOST_TENANTS]
        lines += [f"    {name:32} {_heap(heap)}" for name, heap in largest]
    lines += [f"  {name:11} {_heap(heap)}" for name, heap in generation.leftovers.items() if heap.files]
    lines.append(f"  {'journals':11} {_heap(generation.journals)}")
    return "\n".join(lines) + "\n"


def _heap(heap: Heap) -> str:
    return f"{counted(heap.files, 'file')}, {readable_size(heap.bytes)}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


if __name__ == "__main__":
    sys.exit(main())
