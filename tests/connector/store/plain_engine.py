# SPDX-License-Identifier: Apache-2.0
"""One process that reads and writes blocks of a root and appends its journal, as an engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.blockstore import BlockStore, Outcome, Stored, StoreOutcome
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage, block_path


class PlainEngine:
    """A store and a journal; `tell` writes the journal."""

    def __init__(self, root: Path, *, fs: FileSystem = LOCAL, **settings: Any) -> None:
        self._root, self._fs = root, fs.rooted(str(root))
        self.blocks = BlockStore(root, fs=fs, **settings)
        self.journal = JournalWriter(root, fs=fs)

    def put(self, key: BlockKey, payload: memoryview, lineage: Lineage = NO_LINEAGE) -> StoreOutcome:
        outcome = self.blocks.put(key, payload, lineage)
        if isinstance(outcome, Stored):
            self.journal.append(Op.STORED, key, outcome.bytes_written - HEADER_BYTES, lineage)
        return outcome

    def get(self, key: BlockKey, into: memoryview) -> Outcome:
        outcome = self.blocks.get(key, into)
        if isinstance(outcome, Fault) and outcome.is_damage:
            self.journal.append(Op.GONE, key, 0)
        return outcome

    def delete(self, key: BlockKey, *, payload_bytes: int) -> bool:
        try:
            self._fs.unlink(f"{self._root}/{block_path(key)}")
        except FileNotFoundError:
            return False
        self.journal.append(Op.GONE, key, payload_bytes)
        return True

    def tell(self) -> str:
        """Write the journal; return why the volume did not take it, empty if it did."""
        try:
            self.journal.flush()
        except StoreUnavailable as error:
            return str(error)
        return ""
