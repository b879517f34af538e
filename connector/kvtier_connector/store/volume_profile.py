# SPDX-License-Identifier: Apache-2.0
"""What trying a volume has shown to be best on it: a small file beside the generations, for every process that comes.

It is advice: a process that finds none, or one that it cannot understand, asks the volume itself.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass

from kvtier_connector.store.fs import READ_FLAGS, FileSystem, replacing, write_all

CHOICES_FILE = "volume.json"
"""Its name, in the directory of the tier."""
_MOST_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What to do on this volume; None where it makes no difference that could be measured."""

    direct_io: bool | None = None
    """Whether to bypass the page cache."""
    read_bytes_per_second: int = 0
    """What the volume gave one node, some files at a time; 0 where nobody measured it."""
    write_bytes_per_second: int = 0
    """The same of writing."""


def write_choices(fs: FileSystem, tier_dir: str, choices: Choices) -> None:
    """Replace the file; raise OSError where the volume does not take it."""
    with replacing(fs, f"{tier_dir}/{CHOICES_FILE}") as fd:
        write_all(fs, fd, memoryview(json.dumps(asdict(choices), sort_keys=True).encode()))


def read_choices(fs: FileSystem, tier_dir: str) -> Choices:
    """Return what the file says; nothing where there is none, or something else has its name."""
    buffer = memoryview(bytearray(_MOST_BYTES))
    try:
        fd = fs.open(f"{tier_dir}/{CHOICES_FILE}", READ_FLAGS)
        try:
            document = json.loads(bytes(buffer[: fs.preadv(fd, [buffer], 0)]))
        finally:
            with contextlib.suppress(OSError):
                fs.close(fd)
    except (OSError, ValueError, RecursionError):
        return Choices()
    if not isinstance(document, dict):
        return Choices()
    found = document.get("direct_io")
    return Choices(
        direct_io=found if isinstance(found, bool) else None,
        read_bytes_per_second=_rate(document.get("read_bytes_per_second")),
        write_bytes_per_second=_rate(document.get("write_bytes_per_second")),
    )


def _rate(found: object) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0
