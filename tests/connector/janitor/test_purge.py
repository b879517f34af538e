# SPDX-License-Identifier: Apache-2.0
"""A purge while engines store: nothing that was queued before it is there after it, and nothing else is lost."""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from store_faults import HookedFs
from tier_dir import BLOCK_BYTES, Engine, Rig, key, payload

from kvtier_connector.janitor.commands import purge_blocks
from kvtier_connector.store.blockstore import BlockStore, Stored, StoreFault, StoreOutcome
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import Purge, PurgeLog, record_purge
from kvtier_connector.store.layout import NO_LINEAGE, PURGES_FILE, BlockKey, Lineage, adapter_name_label, block_path

QUEUED = 2000
WRITERS = 4
SQL = Lineage(adapter=adapter_name_label("sql") + 16 * "a")
ALL = Purge()
ADAPTER = adapter_name_label("sql")


class Writers:
    """Several writers with a queue that is full when the purge comes; each is an engine's worker, with a store."""

    def __init__(self, root: Path) -> None:
        self.outcomes: Counter[StoreOutcome] = Counter()
        self._tasks: queue.SimpleQueue[tuple[BlockKey, Lineage, float]] = queue.SimpleQueue()
        self._stored = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._work, args=(root,)) for _ in range(WRITERS)]

    def order(self, of: BlockKey, lineage: Lineage = NO_LINEAGE) -> None:
        self._tasks.put((of, lineage, time.monotonic()))

    def start_and_wait_for(self, count: int) -> None:
        for thread in self._threads:
            thread.start()
        for _ in range(count):
            assert self._stored.acquire(timeout=60)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)

    def _work(self, root: Path) -> None:
        store = BlockStore(root, direct=False)
        store.learn_purges()
        while True:
            try:
                of, lineage, queued = self._tasks.get_nowait()
            except queue.Empty:
                return
            outcome = store.put(of, payload(1), lineage, queued=queued)
            self.outcomes[outcome] += 1
            self._stored.release()


CASES = {
    "all": (ALL, "", NO_LINEAGE),
    "a tenant": (Purge("alice"), "alice", NO_LINEAGE),
    "an adapter": (Purge(None, ADAPTER), "", SQL),
    "an adapter of a tenant": (Purge("alice", ADAPTER), "alice", SQL),
}


@pytest.mark.parametrize("case", CASES)
def test_of_2000_queued_stores_none_is_left_after_a_purge(rig: Rig, case: str) -> None:
    criteria, tenant, lineage = CASES[case]
    engine = rig.engine()
    engine.put(QUEUED, tenant=tenant, lineage=lineage)
    writers = Writers(engine.root)
    for number in range(QUEUED):
        writers.order(key(number, tenant), lineage)
    writers.start_and_wait_for(100)
    (purged,) = purge_blocks(rig.dir, criteria, is_dry=False)
    writers.join()
    assert (purged.problem, purged.failed) == ("", 0)
    assert list(engine.root.rglob("*.kvb*")) == []
    assert set(writers.outcomes) <= {Stored(BLOCK_BYTES), StoreFault.PURGED}
    assert writers.outcomes[StoreFault.PURGED] > 0
    assert BlockStore(engine.root, direct=False).put(key(1, tenant), payload(1), lineage) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("case", ["a tenant", "an adapter"])
def test_what_does_not_match_is_stored_all_the_same(rig: Rig, engine: Engine, case: str) -> None:
    engine.put(QUEUED, tenant="alice", lineage=SQL)
    writers = Writers(engine.root)
    for number in range(400):
        writers.order(key(number, "bob"), Lineage(adapter=adapter_name_label("chat") + 16 * "a"))
    writers.start_and_wait_for(10)
    purge_blocks(rig.dir, CASES[case][0], is_dry=False)
    writers.join()
    assert writers.outcomes == {Stored(BLOCK_BYTES): 400}
    assert len(engine.there(range(400), tenant="bob")) == 400


def test_a_purge_between_the_look_and_the_rename_takes_the_partial_file(rig: Rig, engine: Engine) -> None:
    purged: list[int] = []

    def purge(call: str, path: str) -> None:
        """Purge all when a writer has looked at the marks, and is about to rename."""
        if call == "rename" and path.endswith("-partial") and not purged:
            purged.append(purge_blocks(rig.dir, ALL, is_dry=False)[0].partials)

    store = BlockStore(engine.root, fs=HookedFs(purge), direct=False)
    assert store.put(key(1), payload(1), queued=time.monotonic()) is StoreFault.PURGED
    assert purged == [1]
    assert list(engine.root.rglob("*.kvb*")) == []


def test_partial_files_go_with_what_they_belong_to_however_young_and_are_counted(rig: Rig, engine: Engine) -> None:
    engine.put(1, tenant="alice", lineage=SQL)
    engine.put(1, tenant="bob")
    for tenant in ("alice", "bob"):
        path = engine.root / block_path(key(1, tenant))
        whole = path.read_bytes()
        for number in range(2):
            path.with_name(f".{path.name}.{number:032x}-partial").write_bytes(whole)
    outcomes = []
    for criteria, is_dry in itertools.product((Purge("alice"), Purge(None, ADAPTER), ALL), (True, False)):
        if criteria != Purge(None, ADAPTER) or is_dry:
            (purged,) = purge_blocks(rig.dir, criteria, is_dry=is_dry)
            outcomes.append((purged.blocks, purged.partials, purged.bytes // BLOCK_BYTES))
    assert outcomes == [(1, 2, 3), (1, 2, 3), (0, 0, 0), (1, 2, 3), (1, 2, 3)]


def test_a_writer_that_was_started_after_a_purge_stores_what_is_queued_from_then_on(rig: Rig, engine: Engine) -> None:
    purge_blocks(rig.dir, ALL, is_dry=False)
    store = BlockStore(engine.root, direct=False)
    before = time.monotonic()
    store.learn_purges()
    assert store.put(key(1), payload(1), queued=before) is StoreFault.PURGED
    assert store.put(key(1), payload(1), queued=time.monotonic()) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("content", [b"no line of ours\n", b"[]\n", b'{"tenant": 7, "adapter": null}\n', b"x" * 70_000])
def test_a_mark_that_cannot_be_read_counts_as_a_purge_of_everything(tmp_path: Path, content: bytes) -> None:
    marks = PurgeLog(FileSystem(), str(tmp_path))
    marks.look()
    queued = time.monotonic()
    (tmp_path / PURGES_FILE).write_bytes(content)
    marks.look()
    assert marks.is_purged(key(1, "alice"), NO_LINEAGE, queued)


def test_a_directory_that_was_removed_counts_as_purged(rig: Rig, engine: Engine) -> None:
    record_purge(FileSystem(), str(engine.root), Purge("nobody"))
    store = BlockStore(engine.root, direct=False)
    store.learn_purges()
    queued = time.monotonic()
    (engine.root / PURGES_FILE).unlink()
    assert store.put(key(1), payload(1), queued=queued) is StoreFault.PURGED
    assert store.put(key(1), payload(1), queued=time.monotonic()) == Stored(BLOCK_BYTES)
    # As long as the earlier one: empty.
    queued = time.monotonic()
    shutil.rmtree(engine.root)
    assert store.put(key(1), payload(1), queued=queued) is StoreFault.PURGED
    assert store.put(key(1), payload(1), queued=time.monotonic()) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_two_purges_at_once_leave_both_marks(rig: Rig, call: str) -> None:
    root = rig.engine().root
    other = (json.dumps(Purge("other")._asdict()) + "\n").encode()
    pending = [other]

    def interrupt(name: str, _: str) -> None:
        if name == call and pending:
            # Before the write it is another process of this node; after it, another node that saw the same length.
            with (root / PURGES_FILE).open("ab" if name == "pwritev" else "wb") as file:
                file.write(pending.pop())

    record_purge(HookedFs(interrupt), str(root), Purge("mine1"))
    marks = [json.loads(line)["tenant"] for line in (root / PURGES_FILE).read_text().splitlines()]
    assert marks == ["other", "mine1"]
