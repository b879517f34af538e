# SPDX-License-Identifier: Apache-2.0
"""Servers of a network file system that stop, die, part from each other and run full, under engines on two nodes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from checks import check
from e2e.bench.stress import stress
from nodes import Nodes, mounted, nodes_on
from pools import ROW_BYTES, ROWS, PoolUnderTest
from pools import payload as row_of
from store_contract import key, pages, payload, read, remove
from waiting import until

from kvtier_connector.io_workers.pool import BREAKER, STUCK
from kvtier_connector.io_workers.tasks import Ending
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Outcome, Present, Stored, StoreFault
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.layout import is_partial
from kvtier_netfs.gluster import GlusterDistribute, GlusterReplica
from kvtier_netfs.moosefs import MooseFs
from kvtier_netfs.quotas import XfsQuota
from kvtier_netfs.volume import SharedVolume, UnavailableError

MIB = 1 << 20
BLOCKS = 24
SMALL_DISK_MIB = 320
LEFT_MIB = 32
STOPPED_SECONDS = 30.0
HIT = Hit(HEADER_BYTES + ROW_BYTES)

pytestmark = pytest.mark.netfs


@pytest.fixture
def distributed(tmp_path: Path) -> Iterator[SharedVolume]:
    with mounted(GlusterDistribute, tmp_path / "volume") as volume:
        yield volume


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[SharedVolume]:
    with mounted(GlusterReplica, tmp_path / "volume") as volume:
        yield volume


@pytest.fixture
def pool_of_b(nodes: Nodes) -> Iterator[PoolUnderTest]:
    pool = PoolUnderTest(nodes.b, workers=2, stuck_seconds=1.0)
    yield pool
    pool.close()
    # Workers were killed.
    remove_what_dead_writers_left(nodes)


def test_servers_that_stop_for_a_while_cost_late_reads_and_come_back(nodes: Nodes, pool_of_b: PoolUnderTest) -> None:
    if not nodes.volume.serving:
        pytest.skip(f"{nodes.volume.name} has no servers")
    pool, rows, servers = pool_of_b, ROWS // 2, nodes.volume.servers
    pool.write(*range(rows))
    rounds = 0

    def load_all() -> set[object]:
        """Load every block, also where it ends late; return how that ended."""
        nonlocal rounds
        first, rounds = rounds * rows, rounds + 1
        pool.load(first, *range(rows))
        pool.wait_for(rounds * rows)
        return {pool.outcome(first + index) for index in range(rows)}

    assert load_all() == {HIT}
    stopped = time.monotonic()
    servers.pause(*nodes.volume.serving)
    try:
        while time.monotonic() - stopped < STOPPED_SECONDS:
            # What a client has in its cache is a hit all the same.
            assert load_all() <= {HIT, Ending.LATE, BREAKER, STUCK, Fault.IO}
    finally:
        servers.resume(*nodes.volume.serving)
    until(lambda: load_all() == {HIT}, "the volume is used again")
    assert all(pool.row(index) == row_of(index) for index in range(rows))


def test_engines_janitor_and_servers_that_are_killed_at_random_lose_double_and_spoil_nothing() -> None:
    try:
        run = stress(GlusterDistribute.name, seconds=40.0, seed=3)
    except UnavailableError as error:
        pytest.skip(str(error))
    assert run.problems == []
    assert (run.stalls, run.retained_stores > 0, run.compressed_at_end > 0) == (1, True, True)
    assert run.engine_kills + run.janitor_kills + run.server_kills > 0


def outcomes(store: BlockStore, numbers: range) -> list[Outcome]:
    found = []
    for number in numbers:
        into = pages()
        found.append(store.get(key(number), into))
        assert not isinstance(found[-1], Hit) or into == payload(number)
    return found


def is_all_there(store: BlockStore) -> bool:
    return all(isinstance(found, Hit) for found in outcomes(store, range(BLOCKS)))


def remove_what_dead_writers_left(nodes: Nodes) -> None:
    """Remove what was cut off in the middle, as the janitor does once it is old."""
    for path in list(nodes.a.rglob("*")):
        if is_partial(path.name):
            path.unlink()


def test_a_brick_that_is_killed_costs_its_blocks_until_it_is_back(distributed: SharedVolume) -> None:
    with nodes_on(distributed, "tier") as nodes:
        writer, reader = BlockStore(nodes.a), BlockStore(nodes.b)
        for number in range(BLOCKS):
            assert isinstance(writer.put(key(number), payload(number)), Stored)
        distributed.servers.kill("brick1")
        found = outcomes(reader, range(BLOCKS))
        # Some say that they do not find what they cannot look for.
        assert Hit in {type(each) for each in found} != {Hit}
        assert {each for each in found if isinstance(each, Fault)} <= {Fault.IO}
        stored = [writer.put(key(number), payload(number)) for number in range(BLOCKS, 2 * BLOCKS)]
        assert {type(each) for each in stored} <= {Stored, StoreFault}
        distributed.servers.start("brick1")
        until(lambda: is_all_there(reader), "all blocks are read again")
        until(
            lambda: all(
                isinstance(writer.put(key(number), payload(number)), Stored | Present)
                for number in range(BLOCKS, 2 * BLOCKS)
            ),
            "all blocks are stored",
        )
        remove_what_dead_writers_left(nodes)


def test_a_replica_goes_on_without_a_brick_and_the_brick_catches_up(replicated: SharedVolume) -> None:
    with nodes_on(replicated, "tier") as nodes:
        writer, reader = BlockStore(nodes.a), BlockStore(nodes.b)
        replicated.servers.kill("brick0")
        for number in range(BLOCKS):
            until(
                lambda number=number: isinstance(writer.put(key(number), payload(number)), Stored | Present),
                "it is stored on the other brick",
            )
        assert is_all_there(reader)
        replicated.servers.start("brick0")
        until(lambda: is_all_there(reader) and is_all_there(writer), "all blocks are read")


def test_copies_that_parted_are_never_served_wrongly_and_cost_no_other_block(replicated: SharedVolume) -> None:
    # Each brick gets blocks that the other does not hear of, of one name too: the split brain of two copies.
    for number, (down, other) in enumerate((("brick0", "brick1"), ("brick1", "brick0"))):
        if number:
            replicated.servers.start(other)
        replicated.servers.kill(down)
        root = (replicated.a, replicated.b)[number] / "ns.llama/aa"
        store = BlockStore(root)
        until(lambda store=store: isinstance(store.put(key(0), payload(0)), Stored | Present), "it is stored")
        assert isinstance(store.put(key(1 + number), payload(1 + number)), Stored | Present | StoreFault)
    replicated.servers.start("brick1")
    for root in (replicated.a / "ns.llama/aa", replicated.b / "ns.llama/aa"):
        store = BlockStore(root)
        assert {type(found) for found in outcomes(store, range(4))} <= {Hit, Miss, Fault}
        until(lambda store=store: isinstance(store.put(key(9), payload(9)), Stored | Present), "others are stored")
        assert isinstance(store.get(key(9), pages()), Hit)


def fill(writer: BlockStore, most: int) -> list[int]:
    """Store blocks of a megabyte until the volume says that it is full; return those it says that it has."""
    stored = []
    for number in range(most):
        outcome = writer.put(key(number), payload(number, MIB))
        if outcome is StoreFault.NO_SPACE:
            return stored
        assert isinstance(outcome, Stored), outcome
        stored.append(number)
    raise AssertionError(f"{most} MiB fit")


def assert_kept(nodes: Nodes, stored: list[int]) -> None:
    """What was stored is there for the other node, nothing half-written is, and room that is made is used."""
    for number in stored:
        assert read(BlockStore(nodes.b), key(number), MIB) == (Hit(HEADER_BYTES + MIB), bytes(payload(number, MIB)))
    assert not [path for path in nodes.a.rglob("*") if is_partial(path.name)]
    writer = BlockStore(nodes.a)
    for number in stored[: len(stored) // 2]:
        remove(nodes.a, key(number))
    until(lambda: isinstance(writer.put(key(5000), payload(5000, MIB)), Stored | Present), "there is room again")


def test_a_volume_that_says_only_at_the_close_that_it_is_full_keeps_what_it_took(tmp_path: Path) -> None:
    # The client takes writes before the brick does, so ENOSPC comes late.
    class Small(GlusterDistribute):
        disk_mib = SMALL_DISK_MIB

    with mounted(Small, tmp_path / "volume") as volume, nodes_on(volume, "tier") as nodes:
        for number in range(len(volume.serving)):
            disk = volume.brick(number).parent
            room = os.statvfs(disk)
            with (disk / "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - LEFT_MIB * MIB)
        stored = fill(BlockStore(nodes.a), 4 * LEFT_MIB)
        assert len(stored) > LEFT_MIB // 2
        assert_kept(nodes, stored)


@pytest.mark.parametrize("kind", [MooseFs, XfsQuota])
def test_a_quota_that_is_used_up_keeps_what_was_stored(tmp_path: Path, kind: type[MooseFs | XfsQuota]) -> None:
    with mounted(kind, tmp_path / "volume") as volume, nodes_on(volume, "tier") as nodes:
        volume.set_quota(nodes.a, 40 * MIB)
        stored = fill(BlockStore(nodes.a), 100)
        assert len(stored) > 20
        assert_kept(nodes, stored)
        assert check(nodes.a, partial_age_seconds=0) == []
