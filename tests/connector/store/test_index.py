# SPDX-License-Identifier: Apache-2.0
"""What the index answers, when it stops being sure, and what a key costs in memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from clocks import Clock
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_contract import key

from kvtier_connector.store import index as index_module
from kvtier_connector.store.index import BlockIndex, Presence, compact
from kvtier_connector.store.layout import BlockKey

CONNECTOR = Path(index_module.__file__ or "").parents[2]
PRESENT, ABSENT, UNKNOWN = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN


def walk(index: BlockIndex, *numbers: int) -> int:
    index.begin_walk()
    for number in numbers:
        index.add(key(number))
    return index.end_walk()


def test_before_the_first_walk_what_nobody_told_of_is_unknown() -> None:
    index = BlockIndex()
    index.add(key(1))
    assert [index.state(key(number)) for number in (1, 2)] == [PRESENT, UNKNOWN]


def test_after_a_walk_what_nobody_told_of_is_absent() -> None:
    index = BlockIndex()
    assert walk(index, 1) == 0
    assert [index.state(key(number)) for number in (1, 2)] == [PRESENT, ABSENT]
    index.add(key(2))
    assert index.state(key(2)) is PRESENT


def test_a_walk_forgets_what_it_did_not_find_and_keeps_what_was_told_meanwhile() -> None:
    index = BlockIndex()
    walk(index, 1, 2)
    index.begin_walk()
    index.add(key(3))
    index.add(key(1))
    assert index.end_walk() == 1
    assert [index.state(key(number)) for number in (1, 2, 3)] == [PRESENT, ABSENT, PRESENT]
    assert len(index) == 2


def test_many_walks_forget_nothing_that_is_there() -> None:
    index = BlockIndex()
    for _ in range(600):
        assert walk(index, 1, 2) == 0
    assert len(index) == 2


def test_a_walk_that_is_given_up_forgets_nothing() -> None:
    index = BlockIndex()
    index.add(key(1))
    index.begin_walk()
    assert index.state(key(1)) is PRESENT
    assert not index.is_complete
    assert walk(index, 1) == 0


def test_a_discarded_block_is_absent_until_somebody_tells_of_it() -> None:
    index = BlockIndex()
    assert index.add(key(1))
    assert not index.add(key(1))
    assert index.discard(key(1))
    assert not index.discard(key(1))
    assert index.state(key(1)) is ABSENT
    assert index.add(key(1))
    assert index.state(key(1)) is PRESENT


def test_a_negative_answer_expires_while_the_index_is_incomplete() -> None:
    clock = Clock(1000.0)
    index = BlockIndex(negative_seconds=30, now=clock)
    index.discard(key(1))
    clock.seconds += 29
    assert index.state(key(1)) is ABSENT
    clock.seconds += 1
    assert index.state(key(1)) is UNKNOWN
    walk(index)
    assert index.state(key(1)) is ABSENT


def test_only_so_many_negative_answers_are_kept() -> None:
    index = BlockIndex(most_negatives=2)
    for number in range(3):
        index.discard(key(number))
    assert [index.state(key(number)) for number in range(3)] == [UNKNOWN, ABSENT, ABSENT]


def test_without_news_an_unknown_block_may_be_there_after_all() -> None:
    index = BlockIndex()
    walk(index, 1)
    index.lapse()
    assert [index.state(key(number)) for number in (1, 2)] == [PRESENT, UNKNOWN]
    index.renew()
    assert index.state(key(2)) is ABSENT


def test_news_alone_do_not_make_an_index_complete() -> None:
    index = BlockIndex()
    index.renew()
    assert index.state(key(1)) is UNKNOWN


def test_groups_of_one_hash_are_different_blocks() -> None:
    index = BlockIndex()
    index.add(key(1, group=0))
    assert index.state(key(1, group=1)) is UNKNOWN


def test_the_shortest_hashes_work() -> None:
    index = BlockIndex()
    index.add(BlockKey(b"abc", 2**32 - 1))
    assert index.state(BlockKey(b"abc", 2**32 - 1)) is PRESENT


def test_threads_that_change_it_at_once_leave_it_whole() -> None:
    index = BlockIndex()
    start = threading.Barrier(5)

    def work(first: int) -> None:
        start.wait()
        for number in range(first, first + 2000):
            index.add(key(number))
            index.state(key(number))
            if number % 3 == 0:
                index.discard(key(number))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 8000, 2000)]
    for thread in threads:
        thread.start()
    start.wait()
    for _ in range(20):
        walk(index)
    for thread in threads:
        thread.join()
    walk(index, *range(100))
    assert len(index) == 100


class IndexMachine(RuleBasedStateMachine):
    """Compares the index with two sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.present: set[int] = set()
        self.confirmed: set[int] | None = None
        self.is_walked = False

    @rule(number=st.integers(0, 9))
    def add(self, number: int) -> None:
        assert self.index.add(key(number)) == (number not in self.present)
        self.present.add(number)
        if self.confirmed is not None:
            self.confirmed.add(number)

    @rule(number=st.integers(0, 9))
    def discard(self, number: int) -> None:
        assert self.index.discard(key(number)) == (number in self.present)
        self.present.discard(number)

    @rule()
    def begin(self) -> None:
        self.index.begin_walk()
        self.confirmed = set()

    @rule()
    def end(self) -> None:
        if self.confirmed is not None:
            self.index.end_walk()
            self.present &= self.confirmed
            self.confirmed = None
            self.is_walked = True

    @invariant()
    def agrees(self) -> None:
        for number in range(10):
            assert (self.index.state(key(number)) is PRESENT) == (number in self.present)
            assert not self.is_walked or self.index.state(key(number)) is not UNKNOWN


TestIndexAgainstSets = IndexMachine.TestCase
TestIndexAgainstSets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

MEASURE = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from kvtier_connector.store.index import BlockIndex
from kvtier_connector.store.layout import BlockKey
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
index, before = BlockIndex(), resident()
for number in range(int(sys.argv[2])):
    index.add(BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest(), 0))
print((resident() - before) / int(sys.argv[2]))
"""


def test_a_key_of_a_million_takes_at_most_120_bytes() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", MEASURE, str(CONNECTOR), "1000000"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    assert float(completed.stdout) <= 120


def test_no_two_of_many_keys_are_taken_for_one_another() -> None:
    index = BlockIndex()
    hashes = [hashlib.sha256(number.to_bytes(8, "little")).digest() for number in range(20_000)]
    for digest in hashes[:10_000]:
        index.add(BlockKey(digest, 0))
    assert all(index.state(BlockKey(digest, 0)) is UNKNOWN for digest in hashes[10_000:])


def test_a_walk_does_not_bring_back_a_block_that_was_discarded_meanwhile() -> None:
    index = BlockIndex(now=lambda: 5.0)
    index.begin_walk()
    index.add(key(1))
    index.discard(key(1))
    index.find(compact(key(1)))
    index.find(compact(key(2)))
    index.end_walk()

    assert index.state(key(1)) is Presence.ABSENT
    assert index.state(key(2)) is Presence.PRESENT


def test_the_next_walk_finds_a_block_that_was_discarded_before_it() -> None:
    now = [5.0]
    index = BlockIndex(now=lambda: now[0])
    index.discard(key(1))
    now[0] = 6.0
    index.begin_walk()
    index.find(compact(key(1)))
    index.end_walk()

    assert index.state(key(1)) is Presence.PRESENT


def test_blocks_of_two_tenants_are_two_blocks() -> None:
    index = BlockIndex()
    of = BlockKey(bytes(range(32)), 0)
    index.add(of._replace(tenant="acme"))
    assert index.state(of._replace(tenant="acme")) is PRESENT
    assert index.state(of._replace(tenant="other")) is UNKNOWN
    assert index.state(of) is UNKNOWN
    index.discard(of)
    assert index.state(of._replace(tenant="acme")) is PRESENT


def test_a_short_hash_of_a_tenant_is_found_again() -> None:
    index = BlockIndex()
    of = BlockKey(b"abc", 1, "acme")
    index.add(of)
    assert index.state(of) is PRESENT
    assert index.discard(of)
