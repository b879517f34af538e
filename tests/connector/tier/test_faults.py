# SPDX-License-Identifier: Apache-2.0
"""The disk tier on a volume that hangs, fails, is full or is missing: the engine serves, and no byte is wrong."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pools import pass_deadlines, refuse
from rig import DIGEST, IO_THREADS, ROW_BYTES, Rigs, key, keys, wait_until
from store_faults import GatedFs
from vllm.v1.kv_offload.base import get_offload_block_hash
from worker_fs import GATE

from kvtier_connector.cascade import attach
from kvtier_connector.contract import engine
from kvtier_connector.contract.engine import encode_live
from kvtier_connector.io_workers.buffers import Region
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.health import Breaker
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit


def is_read_of(*hanging: bytes) -> Callable[[str, str], bool]:
    names = [get_offload_block_hash(of).hex() for of in hanging]
    return lambda call, path: call == "preadv" and any(name in path for name in names)


def test_a_read_that_hangs_ends_at_its_deadline_and_the_rest_is_kept(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.write(keys(6))
    fs = GatedFs(is_read_of(key(4)))
    pass_deadlines(monkeypatch, lambda: fs.waiting == 1)
    reader = rigs.make(fs=fs)
    assert reader.serve(keys(6)).hit_blocks == 4
    reader.settle()
    assert reader.metric("vllm:kvtier_disk_misses", "deadline") == 1
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 5
    fs.open_gate()


@pytest.mark.parametrize("copy", ["out of its row", "into its row"])
def test_a_chunk_past_its_deadline_is_not_reported_while_its_row_is_being_copied(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    # Reported earlier, the row would go to another block in the middle of the copy.
    began, go = threading.Event(), threading.Event()

    def slow(to: int, source: int, count: int) -> None:
        began.set()
        go.wait(60)
        ctypes.memmove(to, source, count)

    monkeypatch.setattr("kvtier_connector.io_workers.worker.ctypes", SimpleNamespace(memmove=slow))
    rigs.write([key(1)])
    # A store that is quick after the copy may be written before it is given up.
    fs = GatedFs(lambda call, path: call == "pwritev" and "/blocks/" in path)
    rig = rigs.make(load_deadline_seconds=2.0, fs=fs)  # a busy machine begins a copy later
    if copy == "out of its row":
        context = rig.begin_offload([key(2)])
    else:
        context = rig.request("r")
        rig.begin_load([key(1)], context)
    assert began.wait(60)
    past = time.monotonic() + 2.1
    wait_until(lambda: time.monotonic() > past, "the deadline has passed")
    for _ in range(5):
        rig.end_step()
        assert rig.manager.has_pending_work()
    go.set()
    rig.settle()
    if copy == "into its row":
        rig.manager.release_load("r")
    else:
        assert rig.metric("vllm:kvtier_disk_shed_stores", "deadline") == 1
    fs.open_gate()
    rig.finish(context)


def test_one_probe_that_hangs_does_not_hold_up_other_requests(rigs: Rigs) -> None:
    rigs.write(keys(4))
    name = get_offload_block_hash(key(0)).hex()
    fs = GatedFs(lambda call, path: call == "stat" and name in path)
    rig = rigs.make(fs=fs)
    stuck = rig.request("stuck")
    assert rig.find_prefix([key(0)], stuck) is None
    rig.end_step()
    wait_until(lambda: fs.waiting >= 1, "the probe hangs")
    assert rig.serve(keys(3, first=1), "free").hit_blocks == 3
    assert fs.waiting >= 1
    assert rig.find_prefix([key(0)], stuck) is None
    fs.open_gate()
    rig.finish(stuck)


def test_a_hanging_lookup_is_a_miss_until_the_volume_answers(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    for constant in ("LEAST_WAIT_SECONDS", "MOST_WAIT_SECONDS"):
        monkeypatch.setattr(f"kvtier_connector.cascade.lookup.{constant}", 0.05)
    rigs.write(keys(4))
    fs = GatedFs(lambda call, path: call == "stat" and path.endswith(".kvb"))
    rig = rigs.make(fs=fs)
    assert rig.serve(keys(4), "unanswered").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "late_probe") >= 1
    fs.open_gate()
    attempts = itertools.count()
    wait_until(lambda: rig.serve(keys(4), f"again {next(attempts)}").hit_blocks == 4, "blocks are served again")


def test_an_engine_ends_although_the_volume_hangs(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.attach.CLOSE_WAIT_SECONDS", 0.2)
    rigs.write(keys(4))
    fs = GatedFs(lambda call, path: call in {"preadv", "pwritev"} and "/blocks/" in path)
    rig = rigs.make(fs=fs)
    rig.begin_load(keys(4), rig.request("r"))
    rig.end_step()
    closing = threading.Thread(target=rig.tier.shutdown)
    closing.start()
    closing.join(50)
    assert not closing.is_alive()
    fs.open_gate()


def test_when_every_thread_hangs_lookups_are_misses_until_it_ends(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.memory.ASIDE_SECONDS", 0.2)
    rigs.write(keys(8))
    fs = GatedFs(lambda call, path: call == "preadv" and "blocks" in path)
    pass_deadlines(monkeypatch, lambda: fs.waiting == IO_THREADS, open_tasks=8)
    rig = rigs.make(fs=fs)
    assert rig.serve(keys(8), "first").hit_blocks == 0
    wait_until(lambda: rig.metric("vllm:kvtier_disk_stuck_threads") >= IO_THREADS, "every thread counts as stuck")
    rig.end_step()  # the scheduler looks once in each step
    assert rig.serve(keys(8), "second", max_steps=0).hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "stuck") > 0
    fs.open_gate()
    wait_until(lambda: rig.poll() and rig.metric("vllm:kvtier_disk_stuck_threads") == 0, "the threads are free")
    attempts = itertools.count()
    wait_until(lambda: rig.serve(keys(8), f"third {next(attempts)}").hit_blocks == 8, "blocks are served again")


def test_draining_is_bounded_by_the_deadline_of_the_jobs(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rigs.write(keys(2))
    fs = GatedFs(is_read_of(key(0), key(1)))
    pass_deadlines(monkeypatch, lambda: fs.waiting == 2, open_tasks=2)
    rig = rigs.make(fs=fs)
    context = rig.request("r")
    rig.begin_load(keys(2), context)
    wait_until(lambda: fs.waiting == 2, "the reads hang")
    rig.manager.release_load("r")
    rig.manager.reset_cache()
    assert fs.waiting == 2
    assert rig.find_prefix(keys(2), context) == 0
    rig.finish(context)
    fs.open_gate()


def test_a_volume_that_is_missing_leaves_an_engine_that_serves(rigs: Rigs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    rig = rigs.make(root=str(tmp_path / "file" / DIGEST))
    assert rig.serve(keys(2)).hit_blocks == 0
    rig.offload(keys(2))
    assert rig.metric("vllm:kvtier_disk_active") == 0


def test_an_engine_that_may_only_read_shows_on_the_volume_that_it_is_there(rigs: Rigs) -> None:
    rigs.write(keys(3))
    rig = rigs.make(live_file=str(rigs.live_file("ReadOnly")), refresh_seconds=0.05)
    assert rig.serve(keys(3), "read-only").hit_blocks == 3
    # By that the janitor keeps the generation, see `Retirement`.
    wait_until(lambda: any((rigs.root / "journal").glob("*.kvj")), "a sign of life")
    rig.offload(keys(2, first=10))
    assert rig.metric("vllm:kvtier_disk_shed_stores", "mode") == 2


def test_the_mode_is_changed_while_the_engine_runs(rigs: Rigs) -> None:
    rigs.write(keys(3))
    live = rigs.live_file()
    rig = rigs.make(live_file=str(live), refresh_seconds=0.05)
    assert rig.serve(keys(3), "read-write").hit_blocks == 3
    live.write_text(encode_live("ReadOnly"))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 1, "the mode is ReadOnly")
    rig.offload(keys(2, first=10))
    assert rig.metric("vllm:kvtier_disk_shed_stores", "mode") == 2
    rig.manager.reset_cache()
    assert rig.serve(keys(3), "read-only").hit_blocks == 3
    live.write_text(encode_live("Bypass"))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 2, "the mode is Bypass")
    rig.manager.reset_cache()
    assert rig.serve(keys(3), "bypass", max_steps=0).hit_blocks == 0
    live.write_text(encode_live("ReadWrite"))
    wait_until(lambda: rig.metric("vllm:kvtier_disk_mode") == 0, "the mode is ReadWrite")
    assert rig.serve(keys(3), "again").hit_blocks == 3
    rig.offload(keys(2, first=10), "writer again")
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 2


def test_stores_are_shed_when_too_much_waits_to_be_written(rigs: Rigs) -> None:
    fs = GatedFs(lambda call, path: call == "pwritev" and ".kvb" in path)
    rig = rigs.make(fs=fs, chunks=7)
    kept = rig.begin_offload(keys(4), "kept")
    shed = rig.begin_offload(keys(1, first=10), "shed")
    rig.end_step()
    rig.end_step()
    assert rig.metric("vllm:kvtier_disk_shed_stores", "queue_full") == 1
    assert rig.metric("vllm:kvtier_disk_queued_store_bytes") == 4 * ROW_BYTES
    fs.open_gate()
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 4
    assert rig.metric("vllm:kvtier_disk_queued_store_bytes") == 0
    rig.finish(kept)
    rig.finish(shed)


def test_workers_that_die_open_no_breaker_and_come_back(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rigs.write(keys(40))
    gate = rigs.root.parent / GATE
    gate.touch()
    real = attach._pool_settings

    def settings(config: engine.ConnectorConfig) -> PoolSettings:
        return replace(real(config), file_system="worker_fs:DyingWhileShutFs", retry_seconds=0.3)

    monkeypatch.setattr(attach, "_pool_settings", settings)
    rig = rigs.make(io_processes=2)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    counts: set[float] = set()
    load = rig.begin_load(keys(40), rig.request("first"))

    def has_ended() -> bool:
        rig.end_step()
        rig.poll()
        counts.add(rig.metric("vllm:kvtier_disk_io_processes"))
        return not rig.tier.has_pending_work()

    wait_until(has_ended, "the load has ended")
    # Once too many have died, every block is a miss.
    assert len(load.failed) == 40
    assert rig.metric("vllm:kvtier_disk_load_breaker") == 0
    assert 0 in counts
    rig.manager.release_load("first")
    gate.unlink()
    rig.manager.reset_cache()
    wait_until(lambda: rig.poll() and rig.metric("vllm:kvtier_disk_io_processes") == 2, "the workers are back")
    rig.end_step()
    # A block whose worker died is not tried again for a while.
    lost = int(rig.metric("vllm:kvtier_disk_misses", "io"))
    assert 0 < lost < 40
    assert rig.metric("vllm:kvtier_disk_misses", "no_workers") == 40 - lost
    assert rig.metric("vllm:kvtier_disk_active") == 1


def test_an_engine_that_runs_out_of_descriptors_at_any_point_of_its_start_leaves_none_open(rigs: Rigs) -> None:
    view = rigs.make().primary.get_kv_memoryview()
    fd = os.memfd_create("cpu-tier")
    os.ftruncate(fd, view.nbytes)
    settings = PoolSettings(root=str(rigs.root), workers=1, deadline_seconds=20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = []
    made: list[int] = []
    before = open_descriptors()
    while len(holes) < max(before) + 1 - len(before):
        holes.append(os.dup(0))
    # The volume's own threads open and close files meanwhile, so a limit may leave another number than was meant.
    for spare in (*range(24),) * 5:
        if made and made[-1] == 1 and 0 in made:
            break
        opened = open_descriptors()
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 1 + spare, hard))
        try:
            pool = make_pool(settings, rigs, view, fd)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if pool is not None:
            made.append(pool.counts().processes)
            pool.close(20)
        wait_until(lambda opened=opened: open_descriptors() <= opened, "nothing stays open")
    for hole in (*holes, fd):
        os.close(hole)
    view.release()
    assert set(made) == {0, 1}
    assert made[-1] == 1


def make_pool(settings: PoolSettings, rigs: Rigs, view: memoryview, fd: int) -> WorkerPool | None:
    """Return a pool that was started, None where there is no room for its pipes."""
    try:
        made = WorkerPool(
            settings,
            permit=StorePermit(str(rigs.root.parent / PERMIT_FILE)),
            breaker=Breaker(),
            rows=view,
            regions=[Region(fd, 0, view.nbytes // ROW_BYTES)],
        )
    except OSError:
        return None
    made.start()
    return made


def open_descriptors() -> set[int]:
    # That of the listing itself is closed again.
    return {int(path.name) for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()}


def test_on_one_processor_a_worker_loads_while_others_store(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    # On a volume that answers at once nothing asks for more of them.
    monkeypatch.setattr("kvtier_connector.cascade.attach.measure_round_trip", lambda *_: 0.0)
    rig = rigs.make(io_processes=None)
    rig.offload(keys(4))
    assert rig.serve(keys(4)).hit_blocks == 4
    assert rig.metric("vllm:kvtier_disk_io_processes") == 3


def test_without_processes_an_engine_serves_without_its_tier(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    rigs.write(keys(4))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    rig = rigs.make(io_processes=2)
    rig.offload(keys(4, first=10))
    assert rig.serve(keys(4)).hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_io_processes") == 0
    assert rig.metric("vllm:kvtier_disk_active") == 0
    assert rig.metric("vllm:kvtier_disk_shed_stores", "stuck") == 4
