# SPDX-License-Identifier: Apache-2.0
"""Follows the journals of all generations, and tells engines in a journal of its own what the janitor removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.janitor.catalog import Ledger
from kvtier_connector.store.bell import Bell
from kvtier_connector.store.filesystems import mount_of
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import JournalWriter, Op, Record
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import BlockKey

_MOST_DOUBTFUL = 1 << 16
_FLUSH_SECONDS = 60.0
"""A record is written at most so long after what it tells of, unless the volume refused it."""
_LONGEST_RETENTION_SECONDS = 30 * 86_400.0
_MOST_SILENT_ROUNDS = 20
"""There is one janitor, so it can doubt a silent bell more often than engines do."""


class News:
    """The journals of one tier. Owned by one thread."""

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        tier_dir: str,
        ledger: Ledger,
        *,
        fs: FileSystem,
        clock: Callable[[], int] = time.time_ns,
        places: Mapping[str, Mapping[str, int]] | None = None,
        taken_ns: int = 0,
    ) -> None:
        """Store the settings.

        Args:
            tier_dir: Directory of the generations.
            ledger: Learns what the journals tell.
            fs: The system calls.
            clock: The volume's time, in nanoseconds since 1970.
            places: Up to where each journal was read; from its beginning without.
            taken_ns: When that was, by the same clock.
        """
        self._tier_dir = tier_dir
        self._ledger = ledger
        self._fs = fs
        self._clock = clock
        self._places = places or {}
        self._taken_ns = taken_ns
        self._read_ns: dict[str, int] = {}
        """When everything in the journals of a generation had been read, by the volume's clock."""
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
            now_ns = self._clock()
            try:
                reader = self._reader(digest)
                if not bell.is_ringing() and reader.has_read_all:
                    continue
                for records in reader.read():
                    for record in self._ledger.apply(generation, self._timed(digest, records)):
                        if len(self.doubtful) < _MOST_DOUBTFUL:
                            known = self.doubtful.get((digest, record.key), 0)
                            self.doubtful[digest, record.key] = max(known, record.time_ns)
                    if not has_time():
                        return False
                if reader.has_read_all:
                    self._read_ns[digest] = now_ns
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
        self._read_ns.pop(digest, None)
        self._writers.pop(digest, None)

    def places(self) -> dict[str, dict[str, int]]:
        """Return up to where each journal was read, by generation."""
        return {digest: reader.places() for digest, reader in self._readers.items()}

    def _timed(self, digest: str, records: list[Record]) -> list[Record]:
        """Return the records with times between the last reading and now, whatever the clocks of their writers say."""
        now_ns = self._clock()
        since_ns = self._read_ns.get(digest, self._taken_ns) - int(_FLUSH_SECONDS * 1e9)
        return [record._replace(time_ns=_bounded(record, since_ns, now_ns)) for record in records]

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


def _bounded(record: Record, since_ns: int, now_ns: int) -> int:
    if record.op == Op.RETAINED:
        return min(record.time_ns, now_ns + int(_LONGEST_RETENTION_SECONDS * 1e9))
    if record.op == Op.STORED:
        # Its file says when it was written; until it is looked at, the earlier time is the safe one.
        return min(record.time_ns, now_ns)
    return min(max(record.time_ns, since_ns), now_ns)
