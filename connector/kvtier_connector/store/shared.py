# SPDX-License-Identifier: Apache-2.0
"""The blocks of one root as an engine uses them: a `BlockStore` that remembers what is there and tells other processes.

No thread lives here. The caller's background threads call `synchronize` and `rescan`; its I/O threads call `get`, `put`
and `probe`; the thread that must never wait calls `state`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.bell import Bell
from kvtier_connector.store.blockstore import BlockStore, Hit, Outcome, Present, Stored, StoreOutcome
from kvtier_connector.store.fs import LOCAL, FileSystem, new_token
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.index import NAME_BYTES, BlockIndex, Presence
from kvtier_connector.store.journal import JournalWriter, Op, Record
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage
from kvtier_connector.store.reading import Take
from kvtier_connector.store.usage import NO_QUOTAS, Quotas
from kvtier_connector.store.walks import Batch, Walk, WalkLostError, walk_here

ACTIVE_SECONDS = 600.0
"""Processes that wrote to their journal within so long count as writers."""
ASIDE_SECONDS = 10.0
"""A block that could not be read although it is there is tried again after so long."""
_ROUND_TRIPS = 5
_SLICE_BYTES = 256 * NAME_BYTES
_PAUSE_SECONDS = 0.0005
"""Much that is done at once would hold up the thread that schedules, which waits for the interpreter's lock."""


@dataclass(frozen=True, slots=True)
class Synchronized:
    """What one `synchronize` did."""

    written: int
    """Records of ours."""
    read: int
    """Records of others."""
    problem: str
    """Why not all of it could be done; empty if it could."""


class _StoppedError(Exception):
    """The caller of `rescan` wants no more."""


class SharedStore:
    """Every method may be called from any thread, but only `state` and the properties never wait for the volume.

    `_following` lets one thread at a time read the journals, `_walking` one walk; everything else guards itself. The
    index can be wrong, see its docstring: a `get` of what is PRESENT may miss, and what is not found is ABSENT from
    then on.
    """

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        root: Path,
        *,
        fs: FileSystem = LOCAL,
        direct: bool | None = None,
        max_bytes: int = 0,
        keys_dir: str = "",
        quotas: Quotas = NO_QUOTAS,
        scan_threads: int = 4,
        walk: Walk | None = None,
        is_bell_cached: bool = False,
        pause: Callable[[], None] = lambda: time.sleep(_PAUSE_SECONDS),
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; nothing is read or written yet.

        Args:
            root: Where `claim` put the tier.
            fs: The system calls.
            direct: As for `BlockStore`.
            max_bytes: As for `BlockStore`.
            keys_dir: As for `BlockStore`.
            quotas: As for `BlockStore`.
            scan_threads: How many directories `rescan` reads at once.
            walk: Walks the root in the place of this process.
            is_bell_cached: As `is_cached` of `Bell`.
            pause: Called every tenth of a millisecond of a long work, so that other threads run.
            clock: Nanoseconds since 1970, for what is written.
            now: Seconds that never go back, for everything that is measured.
        """
        self.blocks = BlockStore(
            root, fs=fs, direct=direct, clock=clock, max_bytes=max_bytes, keys_dir=keys_dir, quotas=quotas
        )
        self._root = root
        self._fs = fs = fs.rooted(str(root))
        self._scan_threads = scan_threads
        self._walk_apart: Walk = walk or self._walk_here
        self._pause = pause
        self._clock = clock
        self._now = now
        self._index = BlockIndex(aside_seconds=ASIDE_SECONDS, now=now)
        self._journal = JournalWriter(root, fs=fs, clock=clock, now=now)
        self._reader = JournalReader(root, fs=fs, but=self._journal.writer, now=now)
        self._bell = Bell(root, fs=fs, is_cached=is_bell_cached)
        self.round_trip_seconds = 0.0
        """What the volume takes to say that it does not have a file; 0 while that was not measured."""
        self.has_news = threading.Event()
        """Set while this process has something to tell with the next `synchronize`."""
        self._uncounted: set[BlockKey] = set()
        """Blocks that were met or used, and whose size nobody told since the last walk began."""
        self._following = threading.Lock()
        self._walking = threading.Lock()

    def state(self, key: BlockKey) -> Presence:
        """Say from memory whether the volume has the block."""
        return self._index.state(key)

    def get(self, key: BlockKey, into: memoryview) -> Outcome:
        """Do as `BlockStore.get` does, and remember the answer."""
        outcome = self.blocks.get(key, into)
        self.record_get(key, outcome)
        return outcome

    def stream(self, key: BlockKey, buffer: memoryview, take: Take) -> Outcome | None:
        """Do as `BlockStore.stream` does, and remember the answer."""
        outcome = self.blocks.stream(key, buffer, take)
        if outcome is not None:
            self.record_get(key, outcome)
        return outcome

    def record_get(self, key: BlockKey, outcome: Outcome) -> None:
        """Remember the answer to a `get` or `stream` of another process's `BlockStore` on the same root."""
        if isinstance(outcome, Hit):
            self._meet(key)
            return
        if outcome is Fault.IO:
            # The volume failed, not the file: it is tried again after a while.
            self._index.set_aside(key)
        else:
            # A file that stays although it cannot be served is forgotten as well: then the next writer replaces it.
            self._index.discard(key)
        if isinstance(outcome, Fault) and outcome.is_damage:
            self._note(Op.GONE, key, 0)

    def record_look_up(self, key: BlockKey, *, is_there: bool) -> None:
        """Remember the answer to a `look_up` of another process's `BlockStore` on the same root."""
        if is_there:
            self._meet(key)
        else:
            self._index.discard(key)

    def note_used(self, key: BlockKey, payload_bytes: int, lineage: Lineage = NO_LINEAGE) -> None:
        """Tell whoever makes room that a prefix was used: `key` is the last block of it, the others need no call.

        Only memory is touched, and the same prefix is noted once in a while.
        """
        self._note(Op.USED, key, payload_bytes, lineage)

    def note_retained(self, key: BlockKey, payload_bytes: int, seconds: float) -> None:
        """Tell whoever makes room that a client wants the prefix that ends with the block for so long."""
        self._note(Op.RETAINED, key, payload_bytes, ahead_seconds=seconds)

    def put(
        self, key: BlockKey, payload: memoryview, lineage: Lineage = NO_LINEAGE, *, is_scratch: bool = False
    ) -> StoreOutcome:
        """Do as `BlockStore.put` does, and tell the other processes; a block known to be there costs no system call."""
        is_known = self._index.state(key) is Presence.PRESENT
        outcome = Present() if is_known else self.blocks.put(key, payload, lineage, is_scratch=is_scratch)
        self._record_put(key, outcome, lineage)
        return outcome

    def begin_put(self, key: BlockKey, payload_bytes: int) -> StoreOutcome | None:
        """Say how a `put` ends that needs no system call, or None: hold room, for another process to carry it out.

        None obliges to call `end_put` or `cancel_put`. Only memory is touched.
        """
        is_known = self._index.state(key) is Presence.PRESENT
        outcome = Present() if is_known else self.blocks.reserve(key, payload_bytes)
        if outcome is not None:
            self._record_put(key, outcome)
        return outcome

    def end_put(self, key: BlockKey, payload_bytes: int, outcome: StoreOutcome, lineage: Lineage = NO_LINEAGE) -> None:
        """Remember the answer to a `put` of another process's `BlockStore`, which has no limit of its own."""
        self.blocks.end_reserved(key, payload_bytes, outcome)
        self._record_put(key, outcome, lineage)

    def cancel_put(self, key: BlockKey, payload_bytes: int) -> None:
        """Give back the room of a `put` whose end nobody waits for; a walk counts what it may have written."""
        self.blocks.end_reserved(key, payload_bytes, None)

    def _note(
        self, op: Op, key: BlockKey, payload_bytes: int, lineage: Lineage = NO_LINEAGE, *, ahead_seconds: float = 0.0
    ) -> None:
        self._journal.append(op, key, payload_bytes, lineage, ahead_seconds=ahead_seconds)
        if not self.has_news.is_set():
            self.has_news.set()

    def _record_put(self, key: BlockKey, outcome: StoreOutcome, lineage: Lineage = NO_LINEAGE) -> None:
        if isinstance(outcome, Stored):
            self._uncounted.discard(key)
            self._index.add(key)
            self._index.renew_block(key)
            # What it takes of the volume, which is less if it was compressed.
            self._note(Op.STORED, key, outcome.bytes_written - HEADER_BYTES, lineage)
        elif isinstance(outcome, Present):
            self._meet(key)

    def _meet(self, key: BlockKey) -> None:
        """Note that the volume has a block, whose size is counted when its writer tells of it."""
        if self._index.add(key):
            self._uncounted.add(key)

    def delete(self, key: BlockKey, *, payload_bytes: int) -> bool:
        """Remove a block and tell the other processes; say whether it was there.

        Raises:
            StoreUnavailable: the volume refused.
        """
        was_there = self.blocks.delete(key)
        self._index.discard(key)
        if was_there:
            self._note(Op.GONE, key, payload_bytes)
        return was_there

    def forget(self, key: BlockKey) -> None:
        """Treat the block as ABSENT for a while: its load did not end in time."""
        self._index.set_aside(key)

    def probe(self, keys: Sequence[BlockKey], *, most_calls: int = 32) -> Fault | None:
        """Ask the volume about those keys whose state is UNKNOWN, one system call each; `state` answers afterwards.

        The keys are those of one prompt in order: it ends at the first that is absent, since a prefix ends there, and
        after `most_calls`. A volume that does not answer is a fault, and the rest stays UNKNOWN.
        """
        calls = 0
        for key in keys:
            state = self._index.state(key)
            if state is Presence.ABSENT:
                return None
            if state is Presence.PRESENT:
                continue
            if calls == most_calls:
                return None
            calls += 1
            found = self.blocks.look_up(key)
            if isinstance(found, Fault):
                return found
            if not found:
                self._index.discard(key)
                return None
            self._meet(key)
        return None

    def measure_round_trip(self) -> None:
        """Ask the volume for a few files that nobody has, whose absence no cache knows, and keep the shortest time.

        They would lie in the root, which is there: below a directory that is not, a cache would answer.
        """
        seconds = []
        for _ in range(_ROUND_TRIPS):
            nobodys = f"{self._root}/.{new_token()}"
            began = self._now()
            try:
                self._fs.stat(nobodys)
            except FileNotFoundError:
                seconds.append(self._now() - began)
            except OSError:
                return
        self.round_trip_seconds = min(seconds, default=0.0)

    def may_have_news(self) -> bool:
        """Say with one system call whether other processes may have something to tell, or the root is another one."""
        return self._bell.is_ringing() or not self._reader.has_read_all

    def synchronize(self, *, may_write: bool = True, may_have_news: bool = True) -> Synchronized:
        """Write what this process did, and learn what the others did, if `may_have_news` said that it may be worth it.

        What another process stores is known here after its next call and our next call. Until ours, this process
        writes at most its share of the room that is left, see `Usage`. With `may_write` False nothing
        is written, and what was noted waits, up to a limit. The first call only finds out where the journals end.
        """
        problems = []
        written = read = 0
        if may_write:
            self.has_news.clear()
            try:
                written = self._journal.flush()
            except StoreUnavailable as error:
                problems.append(str(error))
        with self._following:
            try:
                for records in self._reader.read() if may_have_news else ():
                    read += len(records)
                    for record in records:
                        self._learn(record)
                    self._pause()
                self._index.renew()
                self._share_room()
            except StoreUnavailable as error:
                self._index.lapse()
                problems.append(str(error))
        return Synchronized(written, read, "; ".join(problems))

    def show_life(self) -> None:
        """Have the volume note that this process uses it, although it may store nothing: see `JournalWriter`."""
        self._journal.show_life()

    def rescan(self, *, is_stopped: Callable[[], bool] = lambda: False, may_write: bool = True) -> bool:
        """Walk the root: then the index is complete and the usage exact. Call it at the start and now and then.

        What crashed processes left behind is removed on the way: partial files after an hour, journals after a day.

        Args:
            is_stopped: Asked all the time; True ends the walk, and nothing is forgotten.
            may_write: False removes nothing.

        Returns:
            Whether the walk went to the end.

        Raises:
            StoreUnavailable: the root cannot be walked.
        """
        with self._walking:
            with self._following:
                # First, so that what is stored while we walk is found by the walk or is in a journal.
                self._reader.start()
                self._uncounted.clear()
            try:
                is_whole = self._walk(self._walk_apart, is_stopped, may_write=may_write)
            except WalkLostError:
                is_whole = self._walk(self._walk_here, is_stopped, may_write=may_write)
            with self._following:
                self._share_room()
            return is_whole

    def _walk(self, walk: Walk, is_stopped: Callable[[], bool], *, may_write: bool) -> bool:
        def take_in() -> Iterator[Mapping[str, int]]:
            for batch in walk(self._root, may_write=may_write, is_stopped=is_stopped):
                for start in range(0, len(batch.names), _SLICE_BYTES):
                    self._index.find(batch.names[start : start + _SLICE_BYTES])
                    self._pause()
                yield batch.sizes
            if is_stopped():
                raise _StoppedError

        self._index.begin_walk()
        try:
            self.blocks.refresh_usage(take_in())
        except _StoppedError:
            return False
        self._index.end_walk(pause=self._pause)
        return True

    def _walk_here(self, root: Path, *, may_write: bool, is_stopped: Callable[[], bool]) -> Iterator[Batch]:
        return walk_here(
            root, may_write=may_write, is_stopped=is_stopped, fs=self._fs, clock=self._clock, threads=self._scan_threads
        )

    def usage_bytes(self) -> int:
        """Return the bytes of blocks and quarantined files, as far as this process knows."""
        return self.blocks.usage_bytes()

    @property
    def known_blocks(self) -> int:
        """How many blocks are known to be there."""
        return len(self._index)

    @property
    def is_complete(self) -> bool:
        """Whether every block that is not known to be there is known not to be."""
        return self._index.is_complete

    def _share_room(self) -> None:
        """Begin a new share; the caller holds `_following`."""
        self.blocks.share_room(1 + self._reader.count_active(self._now() - ACTIVE_SECONDS))

    def _learn(self, record: Record) -> None:
        if record.op == Op.STORED:
            self._index.renew_block(record.key)
            if self._index.add(record.key) or record.key in self._uncounted:
                self._uncounted.discard(record.key)
                self.blocks.learn_stored(record.payload_bytes, record.key.tenant)
        elif record.op == Op.USED:
            # Says what the block takes in memory, which is more than its file does if that is compressed.
            self._meet(record.key)
        elif record.op == Op.GONE:
            was_present = self._index.discard(record.key)
            if was_present and record.payload_bytes and record.key not in self._uncounted:
                self.blocks.learn_gone(record.payload_bytes, record.key.tenant)
            self._uncounted.discard(record.key)
