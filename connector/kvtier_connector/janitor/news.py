# SPDX-License-Identifier: Apache-2.0
"""Follows the journals of all generations, and tells engines in a journal of its own what the janitor removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.janitor.ledger import Ledger
from kvtier_connector.store.bell import Bell
from kvtier_connector.store.filesystems import mount_of
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import JournalWriter
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.records import Op, Record

_MOST_DOUBTFUL = 1 << 16
_CLOCKS_DIFFER_SECONDS = 300.0
_LONGEST_RETENTION_SECONDS = 30 * 86_400.0
_MOST_SILENT_ROUNDS = 20
"""There is one janitor, so it can doubt a silent bell more often than engines do."""


class News:
    """The journals of one tier. Owned by one thread."""

    def __init__(
        self,
        tier_dir: str,
        ledger: Ledger,
        *,
        fs: FileSystem,
        clock: Callable[[], int] = time.time_ns,
        places: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Store the settings; with `places`, journals are read from there, and else from their beginnings."""
        self._tier_dir = tier_dir
        self._ledger = ledger
        self._fs = fs
        self._clock = clock
        self._places = places or {}
        self._readers: dict[str, JournalReader] = {}
        self._writers: dict[str, JournalWriter] = {}
        self._bells: dict[str, Bell] = {}
        self._damaged = 0
        """Of generations that were removed."""
        self.doubtful: dict[tuple[str, BlockKey], int] = {}
        """Blocks that an engine used and that were not in the ledger then, and when that was."""

    @property
    def damaged(self) -> int:
        """Records that could not be read or applied."""
        return self._ledger.damaged + self._damaged + sum(reader.damaged for reader in self._readers.values())

    @property
    def tokens(self) -> set[str]:
        """Names of the janitor's own journals."""
        return {writer.writer for writer in self._writers.values()}

    def follow(self, digests: Iterable[str], has_time: Callable[[], bool] = lambda: True) -> bool:
        """Learn what engines did in these generations; say whether that was all: the next call goes on from there.

        Raises:
            StoreUnavailable: at the end, if some journals could not be read; the others were.
        """
        failed: StoreUnavailable | None = None
        for digest in digests:
            generation = self._ledger.generation(digest)
            bell = self._bell(digest)
            try:
                reader = self._reader(digest)
                if not bell.is_ringing() and reader.has_read_all:
                    continue
                for records in reader.read():
                    for record in self._ledger.apply(generation, self._believed(records)):
                        if len(self.doubtful) < _MOST_DOUBTFUL:
                            known = self.doubtful.get((digest, record.key), 0)
                            self.doubtful[digest, record.key] = max(known, record.time_ns)
                    if not has_time():
                        return False
            except StoreUnavailable as error:
                failed = error
        if failed is not None:
            raise failed
        return True

    def ring(self) -> None:
        """Have the engines look at what is not in a journal, as the brake."""
        for bell in self._bells.values():
            bell.ring()

    def tell_gone(self, digest: str, key: BlockKey, payload_bytes: int) -> None:
        """Note that a block was removed; `flush` writes it."""
        self._writer(digest).append(Op.GONE, key, payload_bytes)

    def flush(self) -> None:
        """Write what was noted; raise StoreUnavailable if the volume does not take it: it is tried again next time."""
        failed: StoreUnavailable | None = None
        for writer in self._writers.values():
            try:
                # A journal without a record would make engines believe in one more writer.
                if writer.is_due:
                    writer.flush()
            except StoreUnavailable as error:
                failed = error
        if failed is not None:
            raise failed

    def forget(self, digest: str) -> None:
        """Stop following a generation that was removed."""
        if (reader := self._readers.pop(digest, None)) is not None:
            self._damaged += reader.damaged
        self._bells.pop(digest, None)
        self._writers.pop(digest, None)

    def places(self) -> dict[str, dict[str, int]]:
        """Return up to where each journal was read, by generation."""
        return {digest: reader.places() for digest, reader in self._readers.items()}

    def _believed(self, records: list[Record]) -> list[Record]:
        """Return the records, none from the future: a clock far ahead must not keep a block for ever."""
        now_ns = self._clock()
        differ_ns = int(_CLOCKS_DIFFER_SECONDS * 1e9)
        if all(record.time_ns <= now_ns + differ_ns for record in records):
            return records
        longest_ns = int(_LONGEST_RETENTION_SECONDS * 1e9)
        return [
            record._replace(time_ns=min(record.time_ns, now_ns + (longest_ns if record.op == Op.RETAINED else 0)))
            for record in records
        ]

    def _bell(self, digest: str) -> Bell:
        bell = self._bells.get(digest)
        if bell is None:
            bell = self._bells[digest] = Bell(
                Path(self._tier_dir, digest),
                fs=self._fs,
                is_cached=mount_of(self._tier_dir).is_nfs,
                most_silent_rounds=_MOST_SILENT_ROUNDS,
            )
        return bell

    def _reader(self, digest: str) -> JournalReader:
        reader = self._readers.get(digest)
        if reader is None:
            # What the janitor itself wrote is left out, but not what an earlier one did: its removals are news.
            reader = JournalReader(Path(self._tier_dir, digest), fs=self._fs, but=self._writer(digest).writer)
            reader.start(self._places.get(digest, {}))
            self._readers[digest] = reader
        return reader

    def _writer(self, digest: str) -> JournalWriter:
        writer = self._writers.get(digest)
        if writer is None:
            writer = JournalWriter(Path(self._tier_dir, digest), fs=self._fs, clock=self._clock)
            self._writers[digest] = writer
        return writer
