# SPDX-License-Identifier: Apache-2.0
"""How many calls on the volume a block costs: on a network file system each is a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_contract import BLOCK_BYTES, key, pages, payload
from store_faults import WatchedFs

from kvtier_connector.store.blockstore import BlockStore, Hit, Present, Stored
from kvtier_connector.store.identity import Claim, Standing, claim
from kvtier_connector.store.shared import SharedStore


class Counting(WatchedFs):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, call: str, path: str | None) -> None:
        self.calls.append(call)


@pytest.fixture
def fs() -> Counting:
    return Counting()


@pytest.fixture
def store(tmp_path: Path, fs: Counting) -> BlockStore:
    claim(tmp_path, {}, "d1gest")
    return BlockStore(tmp_path, fs=fs, direct=False)


def test_a_store_of_a_block_costs_five_calls(store: BlockStore, fs: Counting) -> None:
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    # Its directories are there now.
    store.delete(key(1))
    fs.calls.clear()
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert fs.calls == ["open", "open", "pwritev", "close", "rename"]


def test_the_first_block_of_a_directory_costs_what_makes_the_directory_and_no_more(
    store: BlockStore, fs: Counting
) -> None:
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    made = ["open", "open", *["mkdir"] * 5, "open", "pwritev", "close", "rename"]
    assert [call for call in fs.calls if call != "chmod"] == made


def test_a_load_of_a_block_costs_three_calls(store: BlockStore, fs: Counting) -> None:
    store.put(key(1), payload(1))
    fs.calls.clear()
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert fs.calls == ["open", "preadv", "close"]


def test_a_block_that_is_there_costs_four_calls_and_no_write(store: BlockStore, fs: Counting) -> None:
    store.put(key(1), payload(1))
    fs.calls.clear()
    assert store.put(key(1), payload(1)) == Present()
    assert fs.calls == ["open", "fstat", "preadv", "close"]


def test_hearing_of_three_other_engines_costs_a_listing_and_three_calls_each(tmp_path: Path, fs: Counting) -> None:
    claim(tmp_path, {}, "d1gest")
    store = SharedStore(tmp_path, fs=fs)
    store.synchronize()
    for _ in range(3):
        SharedStore(tmp_path).synchronize()
    store.synchronize()
    fs.calls.clear()
    assert store.synchronize().problem == ""
    assert sorted(fs.calls) == sorted(["scandir", *["open", "preadv", "close"] * 3])


def test_looking_after_a_claim_costs_one_call(tmp_path: Path, fs: Counting) -> None:
    ours = Claim(tmp_path, {}, "d1gest", fs=fs)
    ours.renew()
    fs.calls.clear()
    assert ours.look(may_write=True) is Standing.SAME
    assert fs.calls == ["stat"]
