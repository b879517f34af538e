# SPDX-License-Identifier: Apache-2.0
"""What a subscriber of the volume's KV events knows is what lies on the volume, whatever has happened to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from tier_dir import BLOCK_BYTES, PAYLOAD_BYTES, Engine, Rig, key
from waiting import until

from kvtier_cli.app import main
from kvtier_connector.janitor import events as kv_events
from kvtier_connector.janitor.events import EventFeed, Publisher
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.journal import Op
from kvtier_connector.store.layout import block_path, find_home, parse_block_path

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
                owner = "/".join(filter(None, ("ns/llama", home.name, block.tenant)))
                found.add((owner, block.group, block.hash))
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
    chain = [stored[key(number).hash].get("parent_block_hash") for number in range(3)]
    assert chain == [None, key(0).hash, key(1).hash]
    assert {event["block_size"] for event in stored.values()} == {64}
    assert stored[key(7, "alice").hash]["ownership"] == "ns/llama/aa/alice"


def quarantine(rig: Rig, engine: Engine) -> None:
    path = engine.root / block_path(key(3, "alice"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    engine.store.get(key(3, "alice"), memoryview(bytearray(PAYLOAD_BYTES)))
    engine.note(Op.GONE, 3, "alice")


def purge(rig: Rig, engine: Engine) -> None:
    assert main(["purge", str(rig.dir), "--tenant", "alice", "--yes"]) == 0


def unlink(rig: Rig, engine: Engine) -> None:
    """No journal names this block, so the next walk finds it."""
    (engine.root / block_path(key(3, "alice"))).unlink()
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
    assert {block[2] for block in stage.agrees()} == {key(1).hash, key(2).hash}


def test_a_janitor_that_starts_anew_tells_everything_anew(rig: Rig, stage: Stage, engine: Engine) -> None:
    engine.put(*range(5))
    stage.agrees()
    stage.stop()
    engine.put(5)
    (engine.root / block_path(key(0))).unlink()
    rig.clock.move(4 * 86_400)
    stage.start()
    assert len(stage.agrees()) == 5


def test_another_generation_replaces_what_was_told(rig: Rig, stage: Stage, engine: Engine) -> None:
    engine.put(1, 2)
    stage.agrees()
    rig.engine("bb").put(1)
    stage.sweeper.configure(replace(rig.config, current="bb"))
    assert stage.agrees("bb") == {("ns/llama/bb", 0, key(1).hash)}
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
