# SPDX-License-Identifier: Apache-2.0
"""Fills a directory as engines would have: small block files with journals, for the janitor's measurements."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from kvtier_connector.store.format import HEADER_BYTES, Header, encode_header
from kvtier_connector.store.fs import LOCAL, make_directories
from kvtier_connector.store.identity import claim
from kvtier_connector.store.journal import JournalWriter
from kvtier_connector.store.layout import BlockKey, Home, Lineage, block_path
from kvtier_connector.store.records import JournalLimits, Op

CHAIN = 16
"""Blocks of one prefix."""


def fill(tier_dir: Path, digest: str, *, blocks: int, payload_bytes: int, writers: int = 10) -> Path:
    """Write that many blocks in prefixes of `CHAIN`, told of in the journals of several engines; return the root.

    The payload is a hole in the file: names, headers and journals are what the janitor looks at.
    """
    root = tier_dir / digest
    claim(root, {"bench": "janitor"}, digest)
    source = random.Random(1)
    limits = JournalLimits(segments=1000)
    journals = [JournalWriter(root, limits=limits) for _ in range(writers)]
    made: set[str] = set()
    parent = b""
    for number in range(blocks):
        position = number % CHAIN
        lineage = Lineage(parent if position else b"", position)
        key = BlockKey(source.randbytes(32), 0)
        parent = key.hash
        path = f"{root}/{block_path(key)}"
        directory = path.rpartition("/")[0]
        if directory not in made:
            make_directories(LOCAL, directory)
            made.add(directory)
        page = encode_header(Header(key, payload_bytes, bytes(32), time.time_ns(), Home(digest), lineage))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)
        try:
            os.write(fd, page)
            os.ftruncate(fd, HEADER_BYTES + payload_bytes)
        finally:
            os.close(fd)
        journal = journals[number // CHAIN % writers]
        journal.append(Op.STORED, key, payload_bytes, lineage)
        if number % 20_000 == 0:
            for each in journals:
                each.flush()
    for each in journals:
        each.flush()
    return root
