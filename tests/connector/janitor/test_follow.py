# SPDX-License-Identifier: Apache-2.0
"""Journals as the janitor reads them, and what it tells subscribers of KV events: what lies on the volume."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tier_dir
import zmq
from store_contract import NOW_NS, key
from store_faults import KINDS, CrashError, CrashingFs, FailingFs, NotingFs, plant
from test_records import make_writer, note, only_file
from tier_dir import BLOCK_BYTES, PAYLOAD_BYTES, Engine, Rig
from waiting import Clock, until

from kvtier_cli.app import main
from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.janitor import events as kv_events
from kvtier_connector.janitor import follow
from kvtier_connector.janitor.events import EventFeed, Publisher
from kvtier_connector.janitor.follow import ACTIVE_SECONDS, JournalFollower
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import RECORD_BYTES, JournalWriter, Op, Record
from kvtier_connector.store.layout import JournalName, block_path, find_home, journal_path, parse_block_path

WRITER = "0123456789abcdef" * 2


class Follower:
    """Follows the journals of one root; each read comes long after the last one."""

    def __init__(self, root: Path, fs: FileSystem | None = None) -> None:
        self.now = Clock(1000.0)
        self.journals = JournalFollower(str(root.parent), fs=fs or FileSystem(), clock=lambda: NOW_NS, now=self.now)
        self.journals.resume({}, taken_ns=NOW_NS)
        self.digest = root.name

    def read(self) -> list[Record]:
        self.now.seconds += 60
        return [record for _, batch in self.journals.read([self.digest]) for record in batch]

    def numbers(self) -> list[int]:
        return [int.from_bytes(record.key.hash[:4], "little") for record in self.read()]


def told(writer: JournalWriter, *numbers: int, op: Op = Op.STORED) -> None:
    note(writer, *numbers, op=op)
    writer.flush()


def test_each_record_is_read_once(tmp_path: Path) -> None:
    writer, follower = make_writer(tmp_path), Follower(tmp_path)
    note(writer, 1, 2)
    assert follower.read() == []
    writer.flush()
    assert follower.read() == [Record(Op.STORED, key(number), 4096, NOW_NS) for number in (1, 2)]
    assert follower.read() == []
    told(writer, 3, op=Op.GONE)
    assert follower.read() == [Record(Op.GONE, key(3), 4096, NOW_NS)]


def test_the_next_janitor_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    writer, first = make_writer(tmp_path), Follower(tmp_path)
    told(writer, 1)
    assert first.numbers() == [1]
    told(writer, 2)
    second = JournalFollower(str(tmp_path.parent), fs=FileSystem())
    second.resume(first.journals.places(), taken_ns=NOW_NS)
    assert [record.key for _, batch in second.read([tmp_path.name]) for record in batch] == [key(2)]


def test_a_read_costs_one_listing_and_one_read_for_each_journal(tmp_path: Path) -> None:
    fs = CrashingFs(10**9)
    follower = Follower(tmp_path, fs)
    for number in range(3):
        told(make_writer(tmp_path), number)
    follower.read()
    assert fs.calls == ["scandir", *["open", "preadv", "close"] * 3]


def test_a_crash_at_any_step_of_a_flush_loses_that_flush_and_no_earlier_one(tmp_path: Path) -> None:
    for torn_bytes, step in itertools.product((0, 100, 200), range(8)):
        root = tmp_path / f"{torn_bytes}-{step}"
        follower, fs = Follower(root), CrashingFs(10**9)
        writer = make_writer(root, fs)
        told(writer, 1, 2)
        fs.crash_after(step, torn_bytes=torn_bytes)
        note(writer, 3, 4)
        try:
            writer.flush()
        except CrashError:
            assert fs.has_crashed
        assert [number for _ in range(6) for number in follower.numbers()] in ([1, 2], [1, 2, 3], [1, 2, 3, 4])
        told(make_writer(root), 5)
        assert follower.numbers() == [5]


def test_a_torn_write_of_a_living_process_is_overwritten_by_its_next_one(tmp_path: Path) -> None:
    class FullAfterSomeBytes(FileSystem):
        is_full = True

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.is_full:
                os.pwrite(fd, bytes(buffers[0])[:150], offset)
                raise OSError(errno.ENOSPC, "full")
            return super().pwritev(fd, buffers, offset)

    fs = FullAfterSomeBytes()
    writer, follower = make_writer(tmp_path, fs), Follower(tmp_path)
    note(writer, 1, 2)
    with pytest.raises(StoreUnavailable, match="full"):
        writer.flush()
    assert follower.read() == []
    fs.is_full = False
    told(writer, 3)
    assert follower.numbers() == [1, 2, 3]


def test_a_record_on_its_way_is_read_when_it_has_arrived(tmp_path: Path) -> None:
    """As an NFS client may show it: the file is as long as it will be, and its last bytes are zeros for a while."""
    writer, follower = make_writer(tmp_path), Follower(tmp_path)
    told(writer, 1, 2)
    path = only_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: 2 * RECORD_BYTES] + bytes(RECORD_BYTES))
    assert follower.numbers() == [1]
    assert follower.read() == []
    path.write_bytes(whole)
    assert follower.numbers() == [2]
    assert follower.journals.damaged == 0


def test_damaged_records_are_skipped_after_a_while_and_counted(tmp_path: Path) -> None:
    writer, follower = make_writer(tmp_path), Follower(tmp_path)
    told(writer, 1, 2, 3, 4)
    content = bytearray(only_file(tmp_path).read_bytes())
    content[2 * RECORD_BYTES : 4 * RECORD_BYTES] = os.urandom(2 * RECORD_BYTES)
    only_file(tmp_path).write_bytes(content)
    assert [follower.numbers() for _ in range(5)] == [[1], [], [], [4], []]
    assert follower.journals.damaged == 2


def test_a_full_segment_is_followed_by_the_next_and_a_finished_one_is_not_opened_again(tmp_path: Path) -> None:
    fs = CrashingFs(10**9)
    writer, follower = make_writer(tmp_path, segment_bytes=3 * RECORD_BYTES), Follower(tmp_path, fs)
    for number in range(10):
        told(writer, number)
    assert follower.numbers() == list(range(10))
    fs.calls.clear()
    follower.read()
    assert fs.calls.count("open") == 1


@pytest.mark.parametrize("what", ["file", "directory", "root"])
def test_a_journal_that_is_removed_under_its_writer_is_begun_anew(tmp_path: Path, what: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    writer, follower = make_writer(root), Follower(root)
    told(writer, 1)
    assert follower.numbers() == [1]
    only_file(root).unlink()
    if what != "file":
        shutil.rmtree(root / "journal")
    if what == "root":
        root.rmdir()
    assert follower.read() == []
    told(writer, 2)
    assert follower.numbers() == [2]


def test_writers_are_those_that_lately_told_of_a_block_that_they_did_not_remove(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    silent, storing, using, removing = (make_writer(tmp_path) for _ in range(4))
    told(storing, 1)
    told(using, 1, op=Op.USED)
    told(removing, 1, op=Op.GONE)
    silent.flush()
    follower.read()
    assert follower.journals.writers == 2
    follower.now.seconds += ACTIVE_SECONDS + 1
    assert follower.journals.writers == 0


@pytest.mark.parametrize(
    ("call", "number"),
    # A stale one is listed, so its blocks may be there: only a walk finds them.
    [("scandir", errno.EIO), ("open", errno.EIO), ("open", errno.ESTALE), ("preadv", errno.EIO)],
)
def test_a_journal_that_cannot_be_read_is_reported_and_others_are_read(tmp_path: Path, call: str, number: int) -> None:
    for _ in range(2):
        told(make_writer(tmp_path), 7)
    broken = [True]

    def when(name: str, path: str | None) -> bool:
        return name == call and bool(broken) and broken.pop()

    follower = Follower(tmp_path, FailingFs(OSError(number, "broken"), when=when))
    found = follower.read()
    assert "broken" in follower.journals.problem
    assert len(found) == (0 if call == "scandir" else 1)
    assert len(found) + len(follower.read()) == 2
    assert follower.journals.problem == ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_journal_holds_up_no_other(tmp_path: Path, kind: str) -> None:
    follower, writer = Follower(tmp_path), JournalWriter(tmp_path)
    writer.flush()
    own = tmp_path / journal_path(JournalName(writer.writer, 0))
    own.unlink()
    plant(kind, own)
    plant(kind, tmp_path / journal_path(JournalName(WRITER, 0)))
    told(writer, 1, 2)
    assert follower.numbers() == [1, 2]


def test_of_a_journal_of_any_length_without_a_record_little_is_read(tmp_path: Path) -> None:
    fs = NotingFs()
    follower, writer = Follower(tmp_path, fs), JournalWriter(tmp_path)
    writer.flush()
    for path in (writer.writer, WRITER):
        with (tmp_path / journal_path(JournalName(path, 0))).open("ab") as file:
            # CephFS takes no file of a TiB unless told to.
            file.truncate(1 << 39)
    assert [follower.read() for _ in range(10)] == [[]] * 10
    assert fs.calls.count("preadv") * follow._READ_BYTES < 16 << 20


TOPIC = "kv@llama-volume@model"

Held = set[tuple[str, int, bytes]]


class Subscriber:
    """Keeps what a router would: what was stored, less what was removed."""

    def __init__(self, port: int) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.held: Held = set()
        self.numbers: list[int] = []
        self.events: list[dict[str, Any]] = []

    def drain(self) -> None:
        while self.socket.poll(50):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == TOPIC.encode()
            self.numbers.append(int.from_bytes(number, "big"))
            _, events, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            for event in events:
                self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
            return
        assert (event["medium"], event["locality"]) == ("STORAGE", "REMOTE")
        blocks = {(event["ownership"], event.get("group_idx", 0), each) for each in event["block_hashes"]}
        if event["type"] == "BlockStored":
            assert event["token_ids"] == []
            assert not blocks & self.held, "told twice"
            self.held |= blocks
        else:
            assert blocks <= self.held, "removed and never told of"
            self.held -= blocks


class Stage:
    """A janitor that publishes, and one who subscribed to it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.seconds = 1000.0
        self.port = 0
        self.start()
        self.subscriber = Subscriber(self.port)

    def start(self, **config: Any) -> None:
        self.publisher = Publisher(host="127.0.0.1", port=self.port, topic=TOPIC, now=lambda: self.seconds)
        self.port = self.publisher.port
        self.feed = EventFeed(self.publisher, tier="ns/llama", block_tokens=64, is_integer=False)
        self.sweeper: Sweeper = self.rig.sweeper(**config)
        self.feed.begin(self.sweeper.catalog, self.sweeper.config.current)

    def stop(self) -> None:
        self.sweeper.close()
        self.publisher.close()

    def agrees(self, current: str = "aa") -> Held:
        """Work until the subscriber knows what lies on the volume, and return that."""

        def is_so() -> bool:
            self.rig.sweep(self.sweeper)
            self.feed.publish(self.sweeper.config.current)
            self.seconds += 10
            self.subscriber.drain()
            return self.subscriber.held == self.there(current)

        until(is_so, lambda: f"{self.subscriber.held} is not {self.there(current)}")
        return self.there(current)

    def there(self, current: str) -> Held:
        """Return the blocks of the current generation, as their files' names say."""
        found: Held = set()
        for home in self.rig.dir.iterdir():
            named = find_home(home.name)
            if named is None or named.digest != current:
                continue
            for path in home.rglob("*.kvb"):
                block = parse_block_path(str(path.relative_to(home)))
                found.add(("/".join(filter(None, ("ns/llama", home.name, block.tenant))), block.group, block.hash))
        return found


@pytest.fixture
def stage(rig: Rig) -> Iterator[Stage]:
    rig.engine()
    stage = Stage(rig)
    yield stage
    stage.stop()
    stage.subscriber.socket.close(0)


@pytest.fixture
def engine(rig: Rig, stage: Stage) -> Engine:
    return rig.engine()


def test_what_engines_write_is_told_once_with_what_it_continues(rig: Rig, stage: Stage, engine: Engine) -> None:
    engine.put_chain(0, 1, 2)
    rig.engine().put_chain(0, 1, 2)  # another engine that has computed the same
    engine.put(7, tenant="alice")
    assert len(stage.agrees()) == 4
    stored = {event["block_hashes"][0]: event for event in stage.subscriber.events if event["type"] == "BlockStored"}
    chain = [stored[tier_dir.key(number).hash].get("parent_block_hash") for number in range(3)]
    assert chain == [None, tier_dir.key(0).hash, tier_dir.key(1).hash]
    assert {event["block_size"] for event in stored.values()} == {64}
    assert stored[tier_dir.key(7, "alice").hash]["ownership"] == "ns/llama/aa/alice"


def quarantine(rig: Rig, engine: Engine) -> None:
    path = engine.root / block_path(tier_dir.key(3, "alice"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    engine.store.get(tier_dir.key(3, "alice"), memoryview(bytearray(PAYLOAD_BYTES)))
    engine.note(Op.GONE, 3, "alice")


def purge(rig: Rig, engine: Engine) -> None:
    assert main(["purge", str(rig.dir), "--tenant", "alice", "--yes"]) == 0


def unlink(rig: Rig, engine: Engine) -> None:
    """No journal names this block, so the next walk finds it."""
    (engine.root / block_path(tier_dir.key(3, "alice"))).unlink()
    rig.clock.move(4 * 86_400)


@pytest.mark.parametrize("remove", [quarantine, purge, unlink, None], ids=["quarantine", "purge", "unlink", "evict"])
def test_removal_is_told(rig: Rig, stage: Stage, engine: Engine, remove: Callable[[Rig, Engine], None] | None) -> None:
    engine.put(3, tenant="alice")
    engine.put(1, 2)
    stage.agrees()
    if remove is None:
        stage.sweeper.configure(replace(rig.config, max_bytes=3 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7))
        stage.agrees()
    else:
        remove(rig, engine)
    assert not engine.has(3, "alice")
    assert {block[2] for block in stage.agrees()} == {tier_dir.key(1).hash, tier_dir.key(2).hash}


def test_a_janitor_that_starts_anew_tells_everything_anew(rig: Rig, stage: Stage, engine: Engine) -> None:
    engine.put(*range(5))
    stage.agrees()
    stage.stop()
    engine.put(5)
    (engine.root / block_path(tier_dir.key(0))).unlink()
    rig.clock.move(4 * 86_400)
    stage.start()
    assert len(stage.agrees()) == 5


def test_another_generation_replaces_what_was_told(rig: Rig, stage: Stage, engine: Engine) -> None:
    engine.put(1, 2)
    stage.agrees()
    rig.engine("bb").put(1)
    stage.sweeper.configure(replace(rig.config, current="bb"))
    assert stage.agrees("bb") == {("ns/llama/bb", 0, tier_dir.key(1).hash)}
    engine.put(9)
    assert len(stage.agrees("bb")) == 1


def test_a_subscriber_that_finds_a_gap_in_the_numbers_subscribes_again(stage: Stage, engine: Engine) -> None:
    for number in range(4):
        engine.put(number)
        stage.agrees()
    numbers = stage.subscriber.numbers
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    stage.subscriber.held.clear()
    for option in (zmq.UNSUBSCRIBE, zmq.SUBSCRIBE):
        stage.subscriber.socket.setsockopt_string(option, "kv@")
    assert len(stage.agrees()) == 4
    assert stage.subscriber.events[-5]["type"] == "AllBlocksCleared"


def test_a_hash_is_a_number_where_engines_publish_numbers() -> None:
    block_hash = bytes(range(32))
    assert kv_events.shown(block_hash, is_integer=True) == int.from_bytes(block_hash[-8:], "big")
    assert kv_events.shown(block_hash, is_integer=False) == block_hash
