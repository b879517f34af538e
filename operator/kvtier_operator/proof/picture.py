# SPDX-License-Identifier: Apache-2.0
"""A new picture for a canary: squares of random colours as PNG, so that nobody has sent it before."""

from __future__ import annotations

import secrets
import struct
import zlib
from typing import Final

SIDE: Final = 224
"""Pixels; what most vision models take without making it larger."""
_SQUARE: Final = 28
_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_BITS, _COLOURS = 8, 2
"""Of one channel, and red, green and blue."""


def new_picture() -> bytes:
    """Return a PNG of about a kilobyte."""
    rows = []
    for _ in range(SIDE // _SQUARE):
        line = b"".join(secrets.token_bytes(3) * _SQUARE for _ in range(SIDE // _SQUARE))
        rows += [b"\0" + line] * _SQUARE
    header = struct.pack(">IIBBBBB", SIDE, SIDE, _BITS, _COLOURS, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
