# SPDX-License-Identifier: Apache-2.0
"""Count what lies on a volume, by generation, size and age.

Looks at names, sizes and times, reads no block and changes nothing; engines and the janitor may be at work meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvtier_connector.errors import ConnectorError
from kvtier_connector.store import identity
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.progress import Progress
from kvtier_connector.store.scan import BlockEntry, LeftoverKind, list_journals, scan

AGES = (("1 h", 3600), ("1 d", 86_400), ("7 d", 604_800), ("30 d", 2_592_000))
"""Upper bounds in seconds, with the names that people see."""
OLDER = "older"


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


def look_at(  # noqa: PLR0913 - keywords with defaults
    directory: Path,
    root: Path,
    *,
    fs: FileSystem = LOCAL,
    now_ns: int,
    threads: int = 4,
    progress: Progress | None = None,
) -> Generation:
    """Count what one generation holds."""
    progress = progress or Progress()
    try:
        document = identity.read(root, fs=fs)
        generation = Generation(str(root.relative_to(directory)), document["identity"] if document else {})
    except ConnectorError as error:
        generation = Generation(str(root.relative_to(directory)), {}, str(error))
    try:
        entries = scan(
            root, fs=fs, partial_age_seconds=0, clock=lambda: now_ns, threads=threads, on_share=progress.reach
        )
        for entry in entries:
            if isinstance(entry, BlockEntry):
                _add_block(generation, entry, now_ns)
                progress.add(entry.size)
            else:
                generation.leftovers[entry.kind.value].add(entry.size)
        for _, size, _ in list_journals(root, fs=fs):
            generation.journals.add(size)
    except ConnectorError as error:
        generation.problem = str(error)
    progress.finish()
    return generation


def _add_block(generation: Generation, entry: BlockEntry, now_ns: int) -> None:
    age = (now_ns - entry.mtime_ns) / 1e9
    generation.blocks.add(entry.size)
    if entry.key.tenant:
        generation.tenants.setdefault(entry.key.tenant, Heap()).add(entry.size)
    generation.ages[next((name for name, bound in AGES if age <= bound), OLDER)].add(entry.size)
    generation.oldest_seconds = age if generation.oldest_seconds is None else max(generation.oldest_seconds, age)
    generation.newest_seconds = age if generation.newest_seconds is None else min(generation.newest_seconds, age)
