# SPDX-License-Identifier: Apache-2.0
"""Prefixes that people want to keep: ``pins.json`` beside the generations, which people write.

A pin holds a block and every block before it, in every generation and for every tenant, against the budget and against
quotas. It does not hold them beyond their time to live.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.store.fs import LOCAL, READ_FLAGS, FileSystem, replacing, write_all
from kvtier_connector.store.layout import MAX_HASH_BYTES, MIN_HASH_BYTES

PINS_FILE = "pins.json"
"""Name of the file, beside the generations of the tier."""
MOST_PINS = 10_000
_NONE: Final[Mapping[str, bytes]] = MappingProxyType({})

_MOST_BYTES = 4 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_HASH = re.compile(rf"(?:[0-9a-f]{{2}}){{{MIN_HASH_BYTES},{MAX_HASH_BYTES}}}", re.ASCII)


def parse_hash(text: str) -> bytes:
    """Return the hash that a person typed; raise ConfigInvalid for what is none."""
    if _HASH.fullmatch(text.lower()) is None:
        raise ConfigInvalid(
            f"hash {text!r}: must be {2 * MIN_HASH_BYTES} to {2 * MAX_HASH_BYTES} hex digits, as before _g "
            "in the name of a block's file"
        )
    return bytes.fromhex(text)


def check_name(name: str) -> str:
    """Return the name of a pin; raise ConfigInvalid if it cannot be one."""
    if _NAME.fullmatch(name) is None:
        raise ConfigInvalid(f"name {name!r}: must match {_NAME.pattern}")
    return name


def read_pins(tier_dir: Path, *, fs: FileSystem = LOCAL, known: Mapping[str, bytes] = _NONE) -> dict[str, bytes]:
    """Return the hashes by name.

    Args:
        tier_dir: Where the file is.
        fs: The system calls.
        known: What it said before. A file that had pins and is gone is no empty list: file systems that spread files
            over servers say so of all files of a server that is away.

    Raises:
        ConfigInvalid: the file is no list of pins, or gone.
        OSError: it cannot be read.
    """
    path = f"{tier_dir}/{PINS_FILE}"
    try:
        fd = fs.open(path, READ_FLAGS)
    except FileNotFoundError as error:
        if known:
            raise ConfigInvalid(
                f'{path}: is gone, and {len(known)} pins of it hold on; to let them go, write {{"pins": {{}}}}'
            ) from error
        return {}
    try:
        buffer = memoryview(bytearray(_MOST_BYTES))
        text = bytes(buffer[: fs.preadv(fd, [buffer], 0)])
    finally:
        with contextlib.suppress(OSError):
            fs.close(fd)
    try:
        document = json.loads(text)
        pins = {check_name(name): parse_hash(value) for name, value in document["pins"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigInvalid) as error:
        raise ConfigInvalid(
            f'{path}: not a list of pins: {error}; write {{"pins": {{"NAME": "HASH"}}}}, or remove the file'
        ) from error
    return pins


def write_pins(tier_dir: Path, pins: Mapping[str, bytes], *, fs: FileSystem = LOCAL) -> None:
    """Replace the file.

    Raises:
        ConfigInvalid: they are too many.
        OSError: the volume does not take it; the old file stays.
    """
    if len(pins) > MOST_PINS:
        raise ConfigInvalid(f"{len(pins)} pins: must be at most {MOST_PINS}; take some out")
    text = json.dumps({"pins": {name: pins[name].hex() for name in sorted(pins)}}, indent=2) + "\n"
    with replacing(fs, f"{tier_dir}/{PINS_FILE}") as fd:
        write_all(fs, fd, memoryview(text.encode()))
