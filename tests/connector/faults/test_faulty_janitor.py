# SPDX-License-Identifier: Apache-2.0
"""The janitor on a mount that hangs and fails: it says so, stays healthy, and goes on when the volume answers again."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from checks import check
from faulty_mounts import WAIT_SECONDS, FaultyVolume, wait_for
from store_contract import BLOCK_BYTES, key, payload

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.loop import Loop
from kvtier_connector.store.blockstore import BlockStore, Stored
from kvtier_connector.store.identity import claim


@contextmanager
def janitor(volume: FaultyVolume, fault: AbstractContextManager[None]) -> Iterator[Loop]:
    """Run a janitor on a volume with ten blocks, of which five have room, with a fault from its beginning."""
    root = volume.path / "ns.llama" / "aa"
    claim(root, {}, "aa")
    store = BlockStore(root)
    for number in range(10):
        assert store.put(key(number), payload(number)) == Stored(BLOCK_BYTES)
    config = JanitorConfig(
        tier="ns/llama",
        tier_dir=str(root.parent),
        current="aa",
        max_bytes=10 * BLOCK_BYTES,
        low_watermark=0.5,
        sweep_seconds=0.1,
        threads=2,
    )
    loop = Loop(config, hang_seconds=0.3, tick_seconds=0.05)
    thread = threading.Thread(target=loop.run, daemon=True)
    try:
        with fault:
            thread.start()
            yield loop
    finally:
        volume.clear()
        loop.stop()
        thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert check(root) == []


def is_done(loop: Loop) -> bool:
    report = loop.report()
    return report.usage.blocks == 5 and not report.problems


@pytest.mark.parametrize("call", ["lookup", "unlink"])
def test_a_volume_that_hangs_is_stated_and_the_work_is_done_when_it_answers(
    faulty_volume: FaultyVolume, call: str
) -> None:
    with janitor(faulty_volume, faulty_volume.hanging(call)) as loop:
        wait_for(lambda: "hang" in loop.report().problems, "the problem")
        assert loop.health() == ""
        faulty_volume.clear()
        wait_for(lambda: is_done(loop), "the eviction")


@pytest.mark.parametrize("number", [errno.EIO])
def test_a_volume_that_refuses_to_remove_is_stated_until_it_does(faulty_volume: FaultyVolume, number: int) -> None:
    with janitor(faulty_volume, faulty_volume.failing(number, "unlink")) as loop:
        wait_for(lambda: os.strerror(number) in loop.report().problems.get("remove", ""), "the problem")
        assert loop.health() == ""
        faulty_volume.clear()
        wait_for(lambda: is_done(loop), "the eviction")
