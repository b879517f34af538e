# SPDX-License-Identifier: Apache-2.0
"""The bytes of a journal: one head, then records of the same length, each with its own checksum.

Pure: bytes in, values out. FORMAT.md beside the package documents every offset; the two change together.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from kvtier_connector.store.layout import (
    MAX_HASH_BYTES,
    MAX_TENANT_CHARACTERS,
    NO_LINEAGE,
    BlockKey,
    Lineage,
    is_valid,
    is_valid_lineage,
)

RECORD_BYTES = 128
"""Of a record, and of the head: so a record's place says its number, and a torn tail is what does not fill one."""
JOURNAL_MAGIC = b"KVTJ"
JOURNAL_VERSION = 2
MAX_PAYLOAD_BYTES = 1 << 40
"""Of one block, in a record; a larger number is damage."""
MAX_TIME_NS = (1 << 63) - 1
"""Of a record: the year 2262. Readers keep times in signed numbers of 64 bits."""

_CRC = struct.Struct("<I")
_CRC_OFFSET = RECORD_BYTES - _CRC.size
_HEAD = struct.Struct("<4sIII16sQ84x")
_RECORD = struct.Struct(f"<BBBxIQQI{MAX_HASH_BYTES}s{MAX_HASH_BYTES}s{MAX_TENANT_CHARACTERS}s")


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalLimits:
    """How much a writer keeps in memory and on the volume."""

    used_window_seconds: float = 60.0
    """A prefix that is used again within half of this is not noted again; after all of it, it is."""
    buffered_records: int = 1 << 16
    """While the volume does not take them, older records than this many are dropped and counted."""
    segment_bytes: int = 4 << 20
    """A segment that would grow beyond it is left, and the next one begun."""
    segments: int = 16
    """The writer removes its own segments before these last ones."""
    life_seconds: float = 600.0
    """A journal to which nothing was written for so long has its time renewed while its process is there."""


DEFAULT_LIMITS = JournalLimits()


class Op(enum.IntEnum):
    """What a process did with a block."""

    STORED = 1
    """It wrote the block."""
    USED = 2
    """It used the prefix that ends with the block: one record for the whole chain, at most one in a while.

    Whoever makes room treats the blocks before it, which its parents name, as used at the same time.
    """
    GONE = 3
    """It removed the block, or moved it to quarantine."""
    RETAINED = 4
    """A client wants the prefix that ends with the block kept until the record's time."""


class Record(NamedTuple):
    """One line of a journal."""

    op: int
    """An `Op`, or a number of a later release, to be ignored."""
    key: BlockKey
    payload_bytes: int
    """Of the block, at most `MAX_PAYLOAD_BYTES`. With GONE, what was freed: 0 if the file was only moved."""
    time_ns: int
    """Nanoseconds since 1970 by the writer's clock, at most `MAX_TIME_NS`; hosts may disagree, so it is for recency
    and nothing else. With RETAINED it lies ahead."""
    lineage: Lineage = NO_LINEAGE
    """Of the block; with GONE there is none."""


def encode_record(record: Record) -> bytes:
    """Return the bytes that `decode_record` reads; raise ValueError for what does not fit."""
    key, lineage = record.key, record.lineage
    if not is_valid(key) or not is_valid_lineage(lineage):
        raise ValueError(f"{record!r}: the key or its lineage does not fit the format")
    if record.payload_bytes > MAX_PAYLOAD_BYTES or record.time_ns > MAX_TIME_NS:
        raise ValueError(f"{record!r}: payload_bytes is above {MAX_PAYLOAD_BYTES}, or time_ns above {MAX_TIME_NS}")
    try:
        fields = _RECORD.pack(
            record.op,
            len(key.hash),
            len(lineage.parent),
            key.group,
            record.payload_bytes,
            record.time_ns,
            lineage.position,
            key.hash,
            lineage.parent,
            key.tenant.encode(),
        )
    except struct.error as error:
        raise ValueError(f"{record!r}: {error}") from error
    return fields + _CRC.pack(zlib.crc32(fields))


def decode_record(data: bytes | memoryview) -> Record | None:
    """Return the record; None for bytes that are half-written, damaged, zeros, or out of the range of a field."""
    if len(data) != RECORD_BYTES or _CRC.unpack_from(data, _CRC_OFFSET)[0] != zlib.crc32(data[:_CRC_OFFSET]):
        return None
    op, hash_bytes, parent_bytes, group, payload_bytes, time_ns, position, padded, parent, tenant = _RECORD.unpack_from(
        data
    )
    if max(hash_bytes, parent_bytes) > MAX_HASH_BYTES or not tenant.isascii():
        return None
    if payload_bytes > MAX_PAYLOAD_BYTES or time_ns > MAX_TIME_NS:
        return None
    key = BlockKey(padded[:hash_bytes], group, tenant.rstrip(b"\0").decode("ascii"))
    lineage = Lineage(parent[:parent_bytes], position)
    if not is_valid(key) or not is_valid_lineage(lineage):
        return None
    return Record(op, key, payload_bytes, time_ns, lineage)


def encode_head(writer: str, created_ns: int) -> bytes:
    """Return the first bytes of a journal of this writer."""
    fields = _HEAD.pack(JOURNAL_MAGIC, JOURNAL_VERSION, RECORD_BYTES, 0, bytes.fromhex(writer), created_ns)
    return fields + _CRC.pack(zlib.crc32(fields))


def is_head(data: bytes | memoryview) -> bool:
    """Say whether a journal that begins so can be read by this release."""
    if len(data) < RECORD_BYTES or _CRC.unpack_from(data, _CRC_OFFSET)[0] != zlib.crc32(data[:_CRC_OFFSET]):
        return False
    magic, version, record_bytes, flags, _, _ = _HEAD.unpack_from(data)
    return bool((magic, version, record_bytes, flags) == (JOURNAL_MAGIC, JOURNAL_VERSION, RECORD_BYTES, 0))
