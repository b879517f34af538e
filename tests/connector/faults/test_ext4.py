# SPDX-License-Identifier: Apache-2.0
"""The store on an ext4 of its own: O_DIRECT, a volume that is really full, and one that becomes read-only or goes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from checks import check
from plain_engine import PlainEngine
from store_contract import BLOCK_BYTES, BlockStoreContract, key, pages, payload
from tier_dir import Rig

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.fs import LOCAL, DirectIo, FileSystem
from kvtier_connector.store.health import Breaker, CircuitState, Direction
from kvtier_connector.store.identity import RootClaim, RootState, claim
from kvtier_connector.store.journal import Op


class TestStoreOnExt4WithDirectIo(BlockStoreContract):
    @pytest.fixture
    def base(self, ext4: Path) -> Path:
        return ext4

    @pytest.fixture
    def direct(self) -> bool | None:
        return True


@pytest.fixture
def root(ext4: Path) -> Path:
    root = ext4 / "d1gest"
    claim(root, {}, "d1gest")
    return root


def test_ext4_takes_direct_io_and_blocks_are_written_and_read_with_it(root: Path) -> None:
    flags: list[int] = []

    class Listing(FileSystem):
        def open(self, path: str, how: int) -> int:
            flags.append(how)
            return super().open(path, how)

    assert DirectIo(LOCAL, str(root), direct=None).is_supported()
    store = BlockStore(root, fs=Listing())
    store.put(key(1), payload(1))
    assert any(how & os.O_DIRECT for how in flags)
    flags.clear()
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert any(how & os.O_DIRECT for how in flags)


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_ext4_stops_stores_keeps_loads_and_takes_stores_again(root: Path, *, direct: bool) -> None:
    seconds = [0.0]
    store, breaker = PlainEngine(root, direct=direct), Breaker(now=lambda: seconds[0])
    megabyte = 1 << 20
    outcomes = []
    for number in range(100):
        outcomes.append(store.put(key(number), payload(number, megabyte)))
        breaker.record_store(outcomes[-1])
        if breaker.state(Direction.STORE) is CircuitState.OPEN:
            break
    assert outcomes[-1] is StoreFault.NO_SPACE
    assert len(outcomes) > 40
    assert not list(root.rglob("*-partial"))
    assert isinstance(store.get(key(0), pages(size=megabyte)), Hit)
    # A journal has to fit too; if it does not, it waits.
    store.tell()
    assert store.delete(key(0), payload_bytes=megabyte)
    assert store.delete(key(1), payload_bytes=megabyte)
    seconds[0] += 1
    assert breaker.admit(Direction.STORE)
    breaker.record_store(store.put(key(200), payload(200, megabyte)))
    assert breaker.state(Direction.STORE) is CircuitState.CLOSED
    assert store.tell() == ""
    assert check(root, partial_age_seconds=0) == []


def test_an_ext4_that_becomes_read_only_keeps_loads_and_recovers(ext4: Path, root: Path) -> None:
    store = PlainEngine(root)
    store.put(key(1), payload(1))
    assert subprocess.run(["mount", "-o", "remount,ro", str(ext4)], check=False).returncode == 0
    assert store.put(key(2), payload(2)) is StoreFault.READ_ONLY
    assert store.put(key(1), payload(1)) == Present()
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert "Read-only" in store.tell()
    assert PlainEngine(root).get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert subprocess.run(["mount", "-o", "remount,rw", str(ext4)], check=False).returncode == 0
    assert store.tell() == ""
    assert store.put(key(2), payload(2)) == Stored(BLOCK_BYTES)
    assert check(root, partial_age_seconds=0) == []


def test_without_its_mount_a_tier_has_its_blocks_and_nothing_is_stored_in_its_place(ext4: Path) -> None:
    rig = Rig(ext4)
    engine, claimed = rig.engine(), RootClaim(rig.dir / "aa", {"model": "test"}, "aa")
    claimed.renew()
    engine.put(*range(95))
    sweeper = rig.swept(max_bytes=100 * BLOCK_BYTES)
    subprocess.run(["umount", str(ext4)], check=True)
    try:
        with pytest.raises(StoreUnavailable, match="is not mounted any more"):
            claimed.look(may_write=True)
        assert engine.store.put(key(200), payload(200)) is StoreFault.IO
        assert engine.store.get(key(1), pages()) == Miss()
        engine.journal.append(Op.GONE, key(1), BLOCK_BYTES)
        with pytest.raises(StoreUnavailable, match="is not mounted any more"):
            engine.journal.flush()
        rig.work(sweeper, 300, seconds=25)
        assert "is not mounted any more" in sweeper.report.problems["volume"]
        assert list(ext4.iterdir()) == []
    finally:
        subprocess.run(["mount", "-o", "loop", str(ext4.with_name("image")), str(ext4)], check=True)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.is_counted, usage.problems) == (95, True, ())
    assert claimed.look(may_write=True) is not RootState.GONE
    assert isinstance(engine.store.put(key(200), payload(200)), Stored)
