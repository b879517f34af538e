# SPDX-License-Identifier: Apache-2.0
"""Read the log of a container."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 64 << 10


def read_log(path: Path, tail: int | None) -> bytes:
    """Return a log, or its last lines without reading what is before them; nothing where there is no log yet."""
    if not path.exists():
        return b""
    if tail is None:
        return path.read_bytes()
    if tail <= 0:
        return b""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        text = b""
        while position > 0 and text.count(b"\n") <= tail:
            size = min(_BLOCK_BYTES, position)
            position = file.seek(position - size)
            text = file.read(size) + text
    return b"".join(text.splitlines(keepends=True)[-tail:])
