# SPDX-License-Identifier: Apache-2.0
"""Several engines on one root: what one does the others know, without asking the volume."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_engine import Counting, engine
from store_contract import BLOCK_BYTES, PAYLOAD_BYTES, key, pages, payload, whole_file, writes
from store_faults import FailingFs, WatchedFs

from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.fsck import check
from kvtier_connector.store.header import Fault
from kvtier_connector.store.identity import claim
from kvtier_connector.store.index import Presence
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.journal_reader import JournalReader
from kvtier_connector.store.layout import NO_LINEAGE, QUARANTINE, Lineage, block_path
from kvtier_connector.store.shared import SharedStore

PRESENT, ABSENT, UNKNOWN = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "d1gest"
    claim(root, {}, "d1gest")
    yield root
    shutil.rmtree(root / QUARANTINE, ignore_errors=True)
    assert check(root, partial_age_seconds=0) == []


def test_what_an_engine_stores_it_knows_at_once(root: Path) -> None:
    store = engine(root)
    assert store.state(key(1)) is ABSENT
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.state(key(1)) is PRESENT
    assert store.known_blocks == 1


def test_what_an_engine_stores_the_others_know_after_their_next_refresh(root: Path) -> None:
    one, other = engine(root), engine(root)
    one.put(key(1), payload(1))
    assert one.synchronize().written == 1
    assert other.state(key(1)) is ABSENT
    assert other.synchronize().read == 1
    assert other.state(key(1)) is PRESENT
    into = pages()
    assert other.get(key(1), into) == Hit(BLOCK_BYTES)
    assert into == payload(1)


def test_an_engine_that_starts_learns_what_is_there_by_a_walk(root: Path) -> None:
    engine(root).put(key(1), payload(1))
    store = SharedStore(root)
    assert store.state(key(1)) is UNKNOWN
    assert not store.is_complete
    store.rescan()
    assert store.is_complete
    assert [store.state(key(number)) for number in (1, 2)] == [PRESENT, ABSENT]


def test_what_is_stored_during_the_first_walk_is_not_lost(root: Path) -> None:
    writer = engine(root)

    class WritesBehindTheWalk(WatchedFs):
        def before(self, call: str, path: str | None) -> None:
            if call == "scandir" and str(path).endswith("blocks"):
                writer.put(key(7), payload(7))

        def scandir(self, path: str) -> list[os.DirEntry[str]]:
            entries = super().scandir(path)
            return [] if path.endswith("blocks") else entries

    starting = SharedStore(root, fs=WritesBehindTheWalk())
    writer.put(key(6), payload(6))
    writer.synchronize()
    starting.rescan()
    assert starting.state(key(7)) is ABSENT
    writer.synchronize()
    starting.synchronize()
    assert starting.state(key(7)) is PRESENT


def test_a_known_block_is_not_asked_for_again(root: Path) -> None:
    fs = Counting()
    store = engine(root, fs)
    store.put(key(1), payload(1))
    fs.calls.clear()
    assert store.state(key(1)) is PRESENT
    assert store.put(key(1), payload(1)) == Present()
    assert store.probe([key(1), key(2)]) is None
    assert fs.calls == []


def test_a_hit_costs_four_system_calls_and_a_store_eight(root: Path) -> None:
    fs = Counting()
    store = engine(root, fs)
    for _ in range(2):
        # Directories had to be made for the first one, so they are made ahead of the next.
        store.put(key(1), payload(1))
        store.delete(key(1), payload_bytes=PAYLOAD_BYTES)
    fs.calls.clear()
    store.put(key(1), payload(1))
    assert fs.calls == ["open", "open", *writes(root), "close", "open", "fstat", "close", "rename"]
    fs.calls.clear()
    store.get(key(1), pages())
    assert fs.calls == ["open", "preadv", "fstat", "close"]


def test_what_one_engine_removes_the_others_know(root: Path) -> None:
    one, other = engine(root), engine(root)
    one.put(key(1), payload(1))
    one.synchronize()
    other.synchronize()
    assert other.usage_bytes() == BLOCK_BYTES
    assert one.delete(key(1), payload_bytes=PAYLOAD_BYTES)
    assert not one.delete(key(1), payload_bytes=PAYLOAD_BYTES)
    one.synchronize()
    other.synchronize()
    assert other.state(key(1)) is ABSENT
    assert other.usage_bytes() == one.usage_bytes() == 0


@pytest.mark.parametrize("is_used_first", [True, False])
def test_what_a_block_takes_is_learnt_from_who_stored_it_in_any_order_of_the_journals(
    root: Path, *, is_used_first: bool
) -> None:
    writer, user, other = engine(root), engine(root), engine(root)
    writer.put(key(1), payload(1))
    # As of a block that is compressed in its file.
    user.note_used(key(1), 3 * PAYLOAD_BYTES)
    for each in (user, writer) if is_used_first else (writer, user):
        each.synchronize()
        other.synchronize()
        assert other.state(key(1)) is PRESENT
    assert other.usage_bytes() == BLOCK_BYTES
    writer.delete(key(1), payload_bytes=PAYLOAD_BYTES)
    writer.synchronize()
    other.synchronize()
    assert other.usage_bytes() == 0


def test_a_block_that_was_used_only_is_counted_by_a_walk_and_not_before(root: Path) -> None:
    writer, user, other = engine(root), engine(root), engine(root)
    for number in (1, 2):
        writer.put(key(number), payload(number))
        user.note_used(key(number), 3 * PAYLOAD_BYTES)
    user.synchronize()
    other.synchronize()
    assert other.usage_bytes() == 0
    writer.delete(key(2), payload_bytes=PAYLOAD_BYTES)
    other.rescan()
    assert other.usage_bytes() == BLOCK_BYTES


def test_a_block_that_is_gone_unknown_to_us_is_a_miss_once_and_then_absent(root: Path) -> None:
    store = engine(root)
    store.put(key(1), payload(1))
    (root / block_path(key(1))).unlink()
    assert store.state(key(1)) is PRESENT
    assert store.get(key(1), pages()) == Miss()
    assert store.state(key(1)) is ABSENT
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize(
    "content", [b"damaged", b"", whole_file(key(1), payload(1, 4096)), whole_file(key(2), payload(1))]
)
def test_a_block_that_cannot_be_served_is_absent_and_the_next_store_replaces_it(root: Path, content: bytes) -> None:
    store = engine(root)
    store.put(key(1), payload(1))
    (root / block_path(key(1))).write_bytes(content)
    assert isinstance(store.get(key(1), pages()), Fault)
    assert store.state(key(1)) is ABSENT
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


def test_a_block_that_was_moved_to_quarantine_is_absent_for_the_others_and_still_takes_room(root: Path) -> None:
    one, other = engine(root), engine(root)
    one.put(key(1), payload(1))
    one.synchronize()
    other.synchronize()
    (root / block_path(key(1))).write_bytes(bytes(BLOCK_BYTES))
    assert one.get(key(1), pages()) is Fault.MAGIC
    one.synchronize()
    other.synchronize()
    assert other.state(key(1)) is ABSENT
    assert other.usage_bytes() == BLOCK_BYTES


def test_a_load_that_came_too_late_makes_its_block_absent(root: Path) -> None:
    store = engine(root)
    store.put(key(1), payload(1))
    store.forget(key(1))
    assert store.state(key(1)) is ABSENT


def test_usage_counts_what_the_others_write_after_a_refresh(root: Path) -> None:
    one, other = engine(root), engine(root)
    for number in range(3):
        one.put(key(number), payload(number))
    one.put(key(0), payload(0))
    one.synchronize()
    assert other.usage_bytes() == 0
    other.synchronize()
    assert other.usage_bytes() == one.usage_bytes() == 3 * BLOCK_BYTES
    other.synchronize()
    other.rescan()
    assert other.usage_bytes() == 3 * BLOCK_BYTES


@pytest.mark.parametrize("engines", [1, 2, 5])
def test_engines_together_never_exceed_the_limit_and_use_nearly_all_of_it(root: Path, engines: int) -> None:
    stores = [engine(root, max_bytes=60 * BLOCK_BYTES) for _ in range(engines)]
    for store in stores:
        store.synchronize()
    number = 0
    for turn in range(40):
        for store in stores:
            for _ in range(20):
                number += 1
                store.put(key(number), payload(number))
            if turn % 3 or store is not stores[0]:
                # Not all in step: one hears of the others less often.
                store.synchronize()
    on_volume = SharedStore(root).blocks.refresh_usage()
    assert on_volume <= 60 * BLOCK_BYTES
    assert on_volume >= (60 - 2 * engines * (engines > 1)) * BLOCK_BYTES
    assert all(store.put(key(9999), payload(9999)) is StoreFault.NO_BUDGET for store in stores)


def test_a_process_that_does_not_hear_of_the_others_stops_at_its_share(root: Path) -> None:
    deaf, other = (engine(root, max_bytes=60 * BLOCK_BYTES) for _ in range(2))
    other.put(key(0), payload(0))
    other.synchronize()
    deaf.synchronize()
    stored = [deaf.put(key(number), payload(number)) for number in range(1, 60)]
    assert stored.count(Stored(BLOCK_BYTES)) == 59 // 4


def test_who_only_removes_has_no_share_of_the_room(root: Path) -> None:
    store = engine(root, max_bytes=60 * BLOCK_BYTES)
    janitor = JournalWriter(root)
    for number in range(100, 103):
        janitor.append(Op.GONE, key(number), 0)
        janitor.flush()
        store.synchronize()
    stored = [store.put(key(number), payload(number)) for number in range(60)]
    assert stored.count(Stored(BLOCK_BYTES)) == 60


def test_a_probe_asks_for_unknown_keys_in_order_and_ends_at_the_first_absent_one(root: Path) -> None:
    writer = engine(root)
    for number in range(5):
        writer.put(key(number), payload(number))
    fs = Counting()
    store = SharedStore(root, fs=fs)
    keys = [key(number) for number in range(8)]
    assert store.probe(keys, most_calls=3) is None
    assert fs.calls == ["stat"] * 3
    assert [store.state(each) for each in keys] == [PRESENT] * 3 + [UNKNOWN] * 5
    assert store.probe(keys) is None
    assert [store.state(each) for each in keys] == [PRESENT] * 5 + [ABSENT] + [UNKNOWN] * 2
    fs.calls.clear()
    store.probe(keys)
    assert fs.calls == []


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_a_walk_finds_everything_with_any_number_of_threads(root: Path, threads: int) -> None:
    writer = engine(root)
    for number in range(300):
        writer.put(key(number), payload(number, 4096))
    store = SharedStore(root, scan_threads=threads)
    store.rescan()
    assert store.known_blocks == 300
    assert store.usage_bytes() == writer.usage_bytes()


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_engines_that_work_at_once_agree_in_the_end(root: Path) -> None:
    engines = [engine(root) for _ in range(3)]
    stop = threading.Event()

    def work(store: SharedStore, turn: int) -> None:
        into = pages()
        for number in range(120):
            of = key((number * 7 + turn) % 40)
            store.put(of, payload(1))
            outcome = store.get(of, into)
            assert isinstance(outcome, Hit | Miss)
            if number % 11 == turn:
                store.delete(of, payload_bytes=PAYLOAD_BYTES)

    def follow(store: SharedStore) -> None:
        while not stop.is_set():
            assert store.synchronize().problem == ""
            store.rescan()

    workers = [threading.Thread(target=work, args=(store, turn)) for turn, store in enumerate(engines)]
    follower = threading.Thread(target=run_all, args=([threading.Thread(target=follow, args=(s,)) for s in engines],))
    follower.start()
    run_all(workers)
    stop.set()
    follower.join()
    for store in engines:
        store.rescan()
    there = {number for number in range(40) if (root / block_path(key(number))).exists()}
    for store in engines:
        assert {number for number in range(40) if store.state(key(number)) is PRESENT} == there
        assert store.usage_bytes() == len(there) * BLOCK_BYTES


def test_a_block_is_told_of_with_its_tenant_and_lineage(root: Path) -> None:
    writer, reader = engine(root), JournalReader(root)
    reader.start()
    of = key(2)._replace(tenant="acme")
    writer.put(of, payload(2), Lineage(key(1).hash, 1))
    writer.note_used(key(1), PAYLOAD_BYTES, Lineage(b"", 0))
    writer.note_used(key(1), PAYLOAD_BYTES, Lineage(b"", 0))
    writer.get(of, pages())
    writer.synchronize()
    told = [(record.op, record.key, record.lineage) for batch in reader.read() for record in batch]
    assert told == [(Op.STORED, of, Lineage(key(1).hash, 1)), (Op.USED, key(1), NO_LINEAGE)]


def test_a_tenants_blocks_are_found_by_a_walk_and_by_others(root: Path) -> None:
    writer, other, later = engine(root), engine(root), engine(root)
    other.synchronize()
    of = key(1)._replace(tenant="acme")
    writer.put(of, payload(1))
    writer.synchronize()
    other.synchronize()
    later.rescan()
    for store in (other, later):
        assert store.state(of) is PRESENT
        assert store.state(key(1)) is not PRESENT
        assert store.usage_bytes() == BLOCK_BYTES


def test_the_round_trip_is_the_shortest_of_a_few_and_unknown_on_a_volume_that_fails(root: Path) -> None:
    seconds, delays = [0.0], iter([0.5, 0.25, 1.0, 1.0, 2.0])

    class Slow(FileSystem):
        def stat(self, path: str) -> os.stat_result:
            seconds[0] += next(delays)
            return super().stat(path)

    store = SharedStore(root, fs=Slow(), now=lambda: seconds[0])
    assert store.round_trip_seconds == 0.0
    store.measure_round_trip()
    assert store.round_trip_seconds == 0.25
    failing = SharedStore(root, fs=FailingFs(OSError(errno.EIO, "broken"), when=lambda call, path: call == "stat"))
    failing.measure_round_trip()
    assert failing.round_trip_seconds == 0.0


def test_a_round_trip_is_measured_with_names_that_no_cache_can_answer_for(root: Path) -> None:
    class Watching(FileSystem):
        def __init__(self) -> None:
            self.asked: list[str] = []

        def stat(self, path: str) -> os.stat_result:
            self.asked.append(path)
            return super().stat(path)

    store = engine(root, fs := Watching())
    fs.asked.clear()
    store.measure_round_trip()
    assert store.round_trip_seconds > 0
    # Each is another one, right below a directory that is there.
    assert len(set(fs.asked)) == len(fs.asked) > 1
    assert {Path(path).parent for path in fs.asked} == {root}
