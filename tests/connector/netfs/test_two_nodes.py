# SPDX-License-Identifier: Apache-2.0
"""What two nodes see of each other's work on a network file system, through each other's caches."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from nodes import PATIENCE_SECONDS, Nodes
from plain_engine import PlainEngine
from store_contract import BLOCK_BYTES, PAYLOAD_BYTES, key, pages, payload, read, remove
from waiting import until

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.follow import JournalFollower
from kvtier_connector.janitor.loop import Loop
from kvtier_connector.store import blockstore
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import Fault
from kvtier_connector.store.journal import JournalWriter, Op

PATHS = [str(Path(blockstore.__file__ or "").parents[2]), str(Path(__file__).parents[1] / "store")]

CLAIMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["CLAIMS"]


def test_what_one_node_stores_the_other_knows_and_reads(nodes: Nodes) -> None:
    writer, reader = BlockStore(nodes.a), BlockStore(nodes.b)
    assert reader.look_up(key(1)) is False
    for number in range(10):
        assert writer.put(key(number), payload(number)) == Stored(BLOCK_BYTES)

    def is_known() -> bool:
        return all(isinstance(reader.get(key(number), pages()), Hit) for number in range(10))

    until(is_known, "the other node knows the blocks")
    for number in range(10):
        assert read(reader, key(number)) == (Hit(BLOCK_BYTES), bytes(payload(number)))
        assert reader.put(key(number), payload(number)) == Present()


@pytest.mark.netfs
def test_a_block_that_the_other_node_removes_is_read_whole_or_missed(nodes: Nodes) -> None:
    remover, reader = BlockStore(nodes.a), BlockStore(nodes.b)
    seen = set()
    for turn in range(30):
        assert remover.put(key(turn % 2), payload(turn % 2)) in {Stored(BLOCK_BYTES), Present()}
        for number in (0, 1):
            into = pages()
            outcome = reader.get(key(number), into)
            assert not isinstance(outcome, Fault)
            assert not isinstance(outcome, Hit) or into == payload(number)
            seen.add(type(outcome))
        remove(nodes.a, key(turn % 2))
    assert Miss in seen


def test_of_two_nodes_that_claim_one_directory_for_different_models_one_is_refused(nodes: Nodes) -> None:
    for attempt in range(2):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CLAIMS, str(root.with_name(f"attempt{attempt}") / "aa"), model, *PATHS],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for root, model in zip(nodes.both() * 2, ("x", "y", "y", "x"), strict=True)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=PATIENCE_SECONDS)[0].strip() for process in processes]
        assert answers.count("refused") == 2
        assert len(set(answers)) == 2


def test_what_is_appended_is_read_once_each_and_in_order_by_the_other_node(nodes: Nodes) -> None:
    writer = JournalWriter(nodes.a)
    reader = JournalFollower(str(nodes.b.parent), fs=FileSystem(), now=itertools.count(1000.0, 60.0).__next__)
    writer.flush()
    heard: list[bytes] = []

    def read() -> None:
        heard.extend(record.key.hash for _, records in reader.read([nodes.b.name]) for record in records)

    for number in range(50):
        writer.append(Op.STORED, key(number), PAYLOAD_BYTES)
        assert writer.flush() == 1
        # It may read in the middle of everything.
        read()

    def is_heard() -> bool:
        read()
        return len(heard) >= 50

    until(is_heard, "all is heard")
    assert heard == [key(number).hash for number in range(50)]
    assert reader.damaged == 0


@pytest.mark.netfs
def test_two_engines_and_a_janitor_on_different_nodes_keep_the_budget_and_serve_nothing_wrong(nodes: Nodes) -> None:
    most = 60 * BLOCK_BYTES
    config = JanitorConfig(
        tier="ns/llama",
        tier_dir=str(nodes.b.parent),
        current="aa",
        max_bytes=most,
        low_watermark=0.5,
        sweep_seconds=0.2,
        threads=2,
    )
    loop = Loop(config, tick_seconds=0.05)
    sweeping = threading.Thread(target=loop.run, daemon=True)

    def work(root: Path, first: int) -> set[object]:
        engine = PlainEngine(root)
        seen: set[object] = set()
        for turn in range(150):
            number = (first + turn * 7) % 100
            seen.add(type(stored := engine.put(key(number), payload(number))))
            assert not isinstance(stored, StoreFault)
            into = pages()
            found = engine.get(key((number * 3) % 100), into)
            assert not isinstance(found, Fault), found
            assert not isinstance(found, Hit) or into == payload((number * 3) % 100)
            seen.add(type(found))
            if turn % 5 == 0:
                assert engine.tell() == ""
        engine.tell()
        return seen

    sweeping.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            seen = set[object]().union(*pool.map(work, nodes.both(), (0, 50)))
        assert {Stored, Hit} <= seen
        # What the janitor reports is what it has counted, and may be older than the last blocks.
        until(lambda: 0 < stored_bytes(nodes.a) <= most, "what is stored is within the budget")
        until(lambda: 0 < loop.report().usage.used_bytes <= most, "the janitor has counted what is left")
        assert not loop.report().problems
    finally:
        loop.stop()
        sweeping.join(PATIENCE_SECONDS)
    assert 0 < stored_bytes(nodes.a) <= most


def stored_bytes(root: Path) -> int:
    """Return what the blocks take, of those that the janitor does not remove meanwhile."""
    found = 0
    for path in root.rglob("*.kvb"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found
