# SPDX-License-Identifier: Apache-2.0
"""The disk tier with movers: what it promises with threads, it promises with processes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rig import IO_THREADS, ROW_BYTES, Rig, Rigs, key, keys, payload, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "movers"))

from mover_fs import GATE

from kvtier_connector import contract
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.movers.dispatch import Dispatcher, DispatchSettings
from kvtier_connector.movers.region import find_region
from kvtier_connector.store.blockstore import Hit
from kvtier_connector.store.breaker import Breaker, Direction, State
from kvtier_connector.store.format import HEADER_BYTES, Header, decode_header
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.shared import SharedStore
from kvtier_connector.tier.jobs import Block, Job
from kvtier_connector.tier.slots import Slots
from kvtier_connector.tier.transfers import Transfers
from kvtier_connector.tier.transports import ProcessTransport, ThreadTransport, make_transport
from kvtier_connector.tier.workers import Lane, WorkerPool, default_limits


def movers() -> list[int]:
    """Return the movers of this process."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_child = int((directory / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if is_child and b"kvtier_connector.movers.process" in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found


@pytest.fixture
def rig(rigs: Rigs) -> Iterator[Rig]:
    made = rigs.make(io_processes=2)
    assert len(movers()) == 2
    yield made
    made.close()
    assert not movers()


def test_what_one_engine_stored_another_one_serves(rigs: Rigs, rig: Rig) -> None:
    rig.offload(keys(20))
    reader = rigs.make(io_processes=3)

    assert reader.serve(keys(20)).hit_blocks == 20
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 20
    assert reader.metric("vllm:kvtier_disk_io_processes") == 3
    assert reader.metric("vllm:kvtier_disk_read_bytes") == 20 * (ROW_BYTES + HEADER_BYTES)
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 20
    reader.close()


def test_a_damaged_block_is_a_miss_counted_by_cause_and_is_written_anew(rigs: Rigs) -> None:
    rigs.write(keys(3))
    path = rigs.block_file(key(1))
    path.write_bytes(path.read_bytes()[:-1])
    rig = rigs.make(io_processes=2)

    assert rig.serve(keys(3), "first").hit_blocks == 1
    assert rig.metric("vllm:kvtier_disk_misses", "truncated") == 1
    rig.offload([key(1)])
    assert rigs.make().serve([key(1)]).hit_blocks == 1


def test_the_limit_of_the_tier_holds_for_what_movers_write(rigs: Rigs) -> None:
    rig = rigs.make(io_processes=2, max_bytes=5 * (ROW_BYTES + HEADER_BYTES))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_used_bytes") == 0 and rig.tier.has_pending_work() is False, "open")
    rig.offload(keys(9))

    assert rig.metric("vllm:kvtier_disk_written_blocks") == 5
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_budget") == 4
    assert rig.metric("vllm:kvtier_disk_used_bytes") == 5 * (ROW_BYTES + HEADER_BYTES)


def test_movers_that_stop_cost_a_deadline_and_are_replaced(rigs: Rigs) -> None:
    rigs.write(keys(6))
    rig = rigs.make(io_processes=2, load_deadline_seconds=0.5, rescan_seconds=0.2)
    stopped = movers()
    for process in stopped:
        os.kill(process, signal.SIGSTOP)

    assert rig.serve(keys(6), "stopped").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "deadline") == 6
    for process in stopped:
        # Stopped while they waited for work, they hold no task that would make them look stuck.
        os.kill(process, signal.SIGKILL)
    attempts = itertools.count()
    wait_until(lambda: rig.serve(keys(6), f"again {next(attempts)}").hit_blocks == 6, "loads work again")
    assert not set(movers()) & set(stopped)


def test_resetting_the_cache_waits_for_the_movers(rigs: Rigs) -> None:
    rigs.write(keys(6))
    rig = rigs.make(io_processes=2)
    context = rig.request("r")

    def is_loading() -> bool:
        assert rig.find_prefix(keys(6), context) is None
        rig.end_step()
        return rig.tier.has_pending_work()

    wait_until(is_loading, "the blocks are being loaded")
    rig.manager.reset_cache()
    assert not rig.tier.has_pending_work()
    rig.finish(context)


def test_no_number_of_processes_below_zero_is_accepted(rigs: Rigs) -> None:
    with pytest.raises(ConfigInvalid, match="io_processes=-1 must be between 0"):
        rigs.config_file(io_processes=-1)


def test_movers_encrypt_with_the_active_key_and_read_nothing_without_it(rigs: Rigs, tmp_path: Path) -> None:
    keys_dir = tmp_path / "keys"
    keys_dir.mkdir()
    (keys_dir / "k1").write_bytes(bytes(range(32)))
    live = tmp_path / "live.json"
    live.write_text(contract.encode_live("ReadWrite", active_key="k1"))
    settings = {"io_processes": 2, "keys_dir": str(keys_dir), "live_file": str(live)}
    rigs.make(**settings).offload(keys(5))

    assert rigs.make(**settings).serve(keys(5)).hit_blocks == 5
    header = decode_header(rigs.block_file(key(1)).read_bytes())
    assert isinstance(header, Header)
    assert header.seal.key_id == "k1"
    assert rigs.make(io_processes=2).serve(keys(5), "keyless").hit_blocks == 0


class Parts:
    """What a transport needs, around the rows and the volume of an engine that moves nothing itself."""

    def __init__(self, rigs: Rigs) -> None:
        self.rows = rigs.make().primary.get_kv_memoryview()
        self.breaker = Breaker()
        self.transfers = Transfers(Slots(self.rows), SharedStore(rigs.root), self.breaker)
        self.pool = WorkerPool(
            IO_THREADS, default_limits(IO_THREADS, probe_seconds=20, transfer_seconds=20), staging_bytes=ROW_BYTES
        )
        self.pool.start()
        self.ended: list[Job] = []

    def load_job(self, job_id: int, count: int) -> Job:
        blocks = [Block(of, slot, BlockKey(of[:-4], 0)) for slot, of in enumerate(keys(count))]
        deadline = time.monotonic() + 60
        return Job(job_id, is_load=True, request="r", blocks=blocks, deadline=deadline, on_complete=self.ended.append)

    def close(self) -> None:
        self.pool.close(20)
        self.transfers.slots.release()
        self.rows.release()


@pytest.fixture
def parts(rigs: Rigs) -> Iterator[Parts]:
    made = Parts(rigs)
    yield made
    made.close()


def test_movers_that_die_cost_no_breaker_and_threads_serve_until_they_are_back(rigs: Rigs, parts: Parts) -> None:
    rigs.write(keys(40))
    region = find_region(parts.rows.cast("B"))
    assert region is not None
    gate = rigs.root.parent / GATE
    gate.touch()
    dispatcher = Dispatcher(
        DispatchSettings(
            movers=2,
            region=region,
            row_bytes=ROW_BYTES,
            root=str(rigs.root),
            direct=None,
            stuck_seconds=60,
            file_system="mover_fs:DyingWhileShutFs",
            retry_seconds=0.3,
        )
    )
    dispatcher.start()
    counts: set[int] = set()
    transport = ProcessTransport(dispatcher, ThreadTransport(parts.pool, parts.transfers), parts.transfers, ROW_BYTES)

    def carry_out(job: Job) -> list[object]:
        transport.load(job)

        def is_over() -> bool:
            transport.collect()
            counts.add(transport.count_processes())
            return job in parts.ended

        wait_until(is_over, "the job has ended")
        return list(job.outcomes)

    outcomes = carry_out(parts.load_job(1, 40))
    # Each death costs the block in hand, and once there were too many, threads did the rest.
    assert 0 < sum(isinstance(outcome, Hit) for outcome in outcomes) < 40
    assert parts.breaker.view(Direction.LOAD).state is State.CLOSED
    assert 0 in counts
    gate.unlink()

    def are_back() -> bool:
        transport.collect()
        return transport.count_processes() == 2

    wait_until(are_back, "the movers are back")
    assert all(isinstance(outcome, Hit) for outcome in carry_out(parts.load_job(2, 40)))
    assert bytes(parts.rows.cast("B")[:ROW_BYTES]) == payload(key(0))
    transport.close(20)


def test_an_engine_that_runs_out_of_descriptors_at_any_point_of_its_start_moves_blocks_by_threads(
    rigs: Rigs, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    config = contract.decode(rigs.config_file(io_processes=1).read_text())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = []
    made = []
    before = open_descriptors()
    while len(holes) < max(before) + 1 - len(before):
        holes.append(os.dup(0))
    for spare in range(16):
        opened = open_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1 + spare, hard))
        try:
            transport = make_transport(config, parts.rows, parts.transfers, parts.pool, LOCAL)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        made.append(transport.count_processes())
        transport.close(20)
        assert open_descriptors() == opened
    for hole in holes:
        os.close(hole)
    assert made == sorted(made)
    assert {made[0], made[-1]} == {0, 1}
    assert any("threads" in record.message for record in caplog.records)


def open_descriptors() -> set[int]:
    found = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 - numbers
    return {fd for fd in found if is_open(fd)}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_an_engine_on_a_host_without_room_for_processes_serves_by_threads_and_says_so(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", refuse)
    rig = rigs.make(io_processes=2)
    rig.offload(keys(4))

    assert rig.serve(keys(4)).hit_blocks == 4
    assert rigs.make().serve(keys(4)).hit_blocks == 4
    assert rig.metric("vllm:kvtier_disk_io_processes") == 0


def test_a_host_with_room_for_some_threads_serves_with_those(monkeypatch: pytest.MonkeyPatch) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start
    started = itertools.count()

    def start_two(thread: threading.Thread) -> None:
        if next(started) >= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    done = threading.Semaphore(0)
    pool = WorkerPool(4, default_limits(4, probe_seconds=20, transfer_seconds=20), staging_bytes=4096)
    monkeypatch.setattr(threading.Thread, "start", start_two)
    pool.start()
    monkeypatch.undo()
    pool.submit(Lane.LOAD, [lambda _: done.release() for _ in range(8)])
    assert all(done.acquire(timeout=20) for _ in range(8))
    assert pool.close(20)
