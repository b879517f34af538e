# SPDX-License-Identifier: Apache-2.0
"""The bytes of a block file: one 4096-byte header, then the payload.

Pure: bytes in, values out. FORMAT.md beside the package documents every offset; the two change together.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import NamedTuple

from blake3 import blake3

from kvtier_connector.store.layout import MAX_HASH_BYTES, BlockKey, is_valid

ALIGNMENT = 4096
"""Size of the header, and what O_DIRECT needs of a buffer's address and of a payload's length."""
HEADER_BYTES = ALIGNMENT
MAGIC = b"KVTB"
FORMAT_VERSION = 1
CHECKSUM_BYTES = 32

_FIELDS = struct.Struct(f"<4sIIIIIQQII{MAX_HASH_BYTES}s{CHECKSUM_BYTES}s")
_CRC = struct.Struct("<I")
_CRC_OFFSET = HEADER_BYTES - _CRC.size
_PADDING = bytes(_CRC_OFFSET - _FIELDS.size)


class Fault(enum.Enum):
    """Why a block file cannot be served. A fault is data: the caller counts it and recomputes."""

    EMPTY = "empty"
    """The file has no bytes, as some file systems leave it after a power failure."""
    TRUNCATED = "truncated"
    """The file ends before its header or its payload does."""
    MAGIC = "magic"
    """The first four bytes are not ours: the file is zero-filled, overwritten or foreign."""
    VERSION = "version"
    """An intact header of a format version that this release does not know; a newer release wrote it."""
    HEADER = "header"
    """The header's own checksum is wrong, or a field in it makes no sense."""
    KEY = "key"
    """The file holds another block than its name says."""
    LENGTH = "length"
    """The file is whole, but its payload is not as long as the reader's blocks are."""
    CHECKSUM = "checksum"
    """The payload is not what the writer wrote."""
    ALGORITHM = "algorithm"
    """An intact header that asks for a checksum, an encryption or a feature that this release does not know."""
    IO = "io"
    """The system could not open or read the file; nothing is known about its bytes."""

    @property
    def is_damage(self) -> bool:
        """Say whether the file is bad for every reader, so that moving it out of the way loses nothing."""
        return self not in {Fault.VERSION, Fault.LENGTH, Fault.ALGORITHM, Fault.IO}


class Algorithm(enum.IntEnum):
    """How the payload's checksum is computed."""

    BLAKE3_256 = 1


class Header(NamedTuple):
    """What the first page of a block file says about the rest."""

    key: BlockKey
    payload_bytes: int
    checksum: bytes
    created_ns: int
    """When the writer wrote it: nanoseconds since 1970, by the writer's clock."""
    algorithm: int = Algorithm.BLAKE3_256
    encryption: int = 0
    flags: int = 0


def checksum(payload: memoryview) -> bytes:
    """Return the BLAKE3-256 of the payload; the GIL is free meanwhile."""
    return blake3(payload).digest()


def encode_header(header: Header) -> bytes:
    """Return the page that `decode_header` reads; raise ValueError for a header that no reader would accept."""
    key = header.key
    if not is_valid(key) or header.payload_bytes < 1 or len(header.checksum) != CHECKSUM_BYTES:
        raise ValueError(f"{header!r}: the key, the payload length or the checksum does not fit the format")
    if not _is_known(header):
        raise ValueError(f"{header!r}: this release knows no such checksum algorithm, encryption or flags")
    try:
        fields = _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            HEADER_BYTES,
            header.flags,
            header.algorithm,
            header.encryption,
            header.payload_bytes,
            header.created_ns,
            key.group,
            len(key.hash),
            key.hash,
            header.checksum,
        )
    except struct.error as error:
        raise ValueError(f"{header!r}: {error}") from error
    page = fields + _PADDING
    return page + _CRC.pack(zlib.crc32(page))


def decode_header(data: bytes | bytearray | memoryview) -> Header | Fault:
    """Read the first page of a block file; bytes after it are ignored.

    The page's own checksum comes before the version, so that a flipped bit in the version is damage and not a message
    from the future. Every later version keeps the magic, the version and the checksum of the first page in place.
    """
    if len(data) < HEADER_BYTES:
        return Fault.TRUNCATED if len(data) else Fault.EMPTY
    if data[: len(MAGIC)] != MAGIC:
        return Fault.MAGIC
    if _CRC.unpack_from(data, _CRC_OFFSET)[0] != zlib.crc32(data[:_CRC_OFFSET]):
        return Fault.HEADER
    (
        _,
        version,
        header_bytes,
        flags,
        algorithm,
        encryption,
        payload_bytes,
        created_ns,
        group,
        hash_bytes,
        padded,
        digest,
    ) = _FIELDS.unpack_from(data)
    if version != FORMAT_VERSION:
        return Fault.VERSION
    key = BlockKey(padded[:hash_bytes], group)
    is_sound = header_bytes == HEADER_BYTES and payload_bytes >= 1 and hash_bytes <= MAX_HASH_BYTES and is_valid(key)
    if not is_sound or any(padded[hash_bytes:]):
        return Fault.HEADER
    header = Header(key, payload_bytes, digest, created_ns, algorithm, encryption, flags)
    return header if _is_known(header) else Fault.ALGORITHM


def _is_known(header: Header) -> bool:
    return header.algorithm == Algorithm.BLAKE3_256 and header.encryption == 0 and header.flags == 0
