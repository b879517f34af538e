# SPDX-License-Identifier: Apache-2.0
"""Keeps the ledger over a restart: one file beside the generations, so that a new janitor need not open every block.

The file is a hint like every index: it is believed only if it is whole, and the journals since then and the next walk
correct it. It is written aside and renamed, so a crash leaves the old one.
"""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.janitor.ledger import ROW, Ledger, Rows
from kvtier_connector.janitor.pins import check_name, parse_hash
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.fs import READ_FLAGS, FileSystem
from kvtier_connector.store.layout import MAX_HASH_BYTES, MAX_POSITION, MIN_HASH_BYTES
from kvtier_connector.store.publishing import replacing, write_all
from kvtier_connector.store.records import MAX_PAYLOAD_BYTES

LEDGER_FILE = "janitor.ledger"
"""Name of the file, beside the generations of the tier."""

_MAGIC = b"KVTL"
_VERSION = 4
_HEAD = struct.Struct("<4sIQQII")
_PIECE_BYTES = 1 << 22
_MOST_DOCUMENT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a ledger needs besides its rows to go on."""

    taken_ns: int
    """When the journals had been read up to the places."""
    places: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By generation, up to where each journal is in the ledger."""
    walked_ns: int = 0
    """When the last complete walk began; 0 if there was none."""
    unread: Sequence[tuple[str, str, str]] = ()
    """Directories that could not be read: generation, path and why."""
    pins: dict[str, bytes] = field(default_factory=dict)
    """What was pinned when the list was last read."""


def save(ledger: Ledger, snapshot: Snapshot, tier_dir: Path, *, fs: FileSystem) -> int:
    """Write the ledger, with its gaps closed; return the bytes.

    Raises:
        OSError: the volume does not take it; the old file stays.
    """
    ledger.renumber()
    document = json.dumps(
        {
            "generations": ledger.generations,
            "tenants": ledger.tenants,
            "epoch": ledger.epoch,
            "taken_ns": snapshot.taken_ns,
            "walked_ns": snapshot.walked_ns,
            "unread": list(snapshot.unread),
            "pins": {name: pinned.hex() for name, pinned in snapshot.pins.items()},
            "places": {digest: dict(places) for digest, places in snapshot.places.items()},
        }
    ).encode()
    rows = memoryview(ledger.rows.view(np.uint8).data)
    checksum = zlib.crc32(rows, zlib.crc32(document))
    head = _HEAD.pack(_MAGIC, _VERSION, len(document), ledger.rows.size, ROW.itemsize, checksum)
    with replacing(fs, f"{tier_dir}/{LEDGER_FILE}") as fd:
        end_of_document = write_all(fs, fd, memoryview(head + document))
        write_all(fs, fd, rows, end_of_document)
    return end_of_document + rows.nbytes


def load(ledger: Ledger, tier_dir: Path, *, fs: FileSystem) -> Snapshot | None:
    """Fill an empty ledger from the file; None if there is none that is whole.

    Raises:
        OSError: the volume does not give it.
    """
    try:
        fd = fs.open(f"{tier_dir}/{LEDGER_FILE}", READ_FLAGS)
    except FileNotFoundError:
        return None
    try:
        return _load(ledger, fs, fd)
    finally:
        with contextlib.suppress(OSError):
            fs.close(fd)


def _load(ledger: Ledger, fs: FileSystem, fd: int) -> Snapshot | None:
    head = _read(fs, fd, memoryview(bytearray(_HEAD.size)), 0)
    if len(head) != _HEAD.size:
        return None
    magic, version, document_bytes, count, row_bytes, checksum = _HEAD.unpack(head)
    size = _HEAD.size + document_bytes + count * row_bytes
    is_ours = (magic, version, row_bytes) == (_MAGIC, _VERSION, ROW.itemsize)
    if not is_ours or document_bytes > _MOST_DOCUMENT_BYTES or size != fs.fstat(fd).st_size:
        return None
    text = bytes(_read(fs, fd, memoryview(bytearray(document_bytes)), _HEAD.size))
    rows = np.zeros(count, ROW)
    body = memoryview(rows.view(np.uint8).data)
    if len(_read(fs, fd, body, _HEAD.size + document_bytes)) != len(body) or zlib.crc32(body, zlib.crc32(text)) != (
        checksum
    ):
        return None
    try:
        document: dict[str, Any] = json.loads(text)
        snapshot = Snapshot(
            unread=[(generation, path, error) for generation, path, error in document["unread"]],
            # The janitors before this one kept none.
            pins={check_name(name): parse_hash(pinned) for name, pinned in document.get("pins", {}).items()},
            **{name: document[name] for name in ("taken_ns", "walked_ns", "places")},
        )
        known = {name: document[name] for name in ("generations", "tenants", "epoch")}
        if not _are_numbered(rows, known) or not _is_understood(snapshot):
            return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigInvalid):
        # Whole, and yet nothing that a janitor wrote: others can write here too.
        return None
    ledger.restore(rows, **known)
    return snapshot


def _are_numbered(rows: Rows, known: Mapping[str, Any]) -> bool:
    """Say whether every row is of a generation and a tenant that are named, and its numbers are in range."""
    are_names = all(isinstance(name, str) for key in ("generations", "tenants") for name in known[key])
    most = {
        "generation": len(known["generations"]) - 1,
        "tenant": len(known["tenants"]) - 1,
        "size": HEADER_BYTES + MAX_PAYLOAD_BYTES,
        "position": MAX_POSITION,
        "hash_bytes": MAX_HASH_BYTES,
    }
    is_in_range = not rows.size or (
        all(int(rows[name].max()) <= limit for name, limit in most.items())
        and all(int(rows[name].min()) >= 0 for name in ("size", "created", "used"))
        and int(rows["hash_bytes"].min()) >= MIN_HASH_BYTES
    )
    # The first tenant stands for nobody in particular.
    return are_names and known["tenants"][0] == "" and is_in_range and isinstance(known["epoch"], int)


def _is_understood(snapshot: Snapshot) -> bool:
    """Say whether everything is of the type that it is declared with."""
    offsets = [offset for places in snapshot.places.values() for offset in places.values()]
    names = [name for each in snapshot.unread for name in each]
    numbers = [snapshot.taken_ns, snapshot.walked_ns, *offsets]
    return all(isinstance(each, int) for each in numbers) and all(isinstance(each, str) for each in names)


def _read(fs: FileSystem, fd: int, into: memoryview, offset: int) -> memoryview:
    done = 0
    while done < into.nbytes and (count := fs.preadv(fd, [into[done : done + _PIECE_BYTES]], offset + done)):
        done += count
    return into[:done]
