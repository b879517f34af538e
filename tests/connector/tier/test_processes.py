# SPDX-License-Identifier: Apache-2.0
"""The disk tier with worker processes: it behaves as with threads."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rig import ROW_BYTES, Rig, Rigs, keys, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "io_workers"))

from worker_fs import GATE

from kvtier_connector.cascade import attach
from kvtier_connector.contract import engine
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.io_workers.buffers import Region
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.health import Breaker
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit


def workers() -> list[int]:
    """Return the worker processes of this process."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_child = int((directory / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if is_child and b"kvtier_connector.io_workers.worker" in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found


@pytest.fixture
def rig(rigs: Rigs) -> Iterator[Rig]:
    made = rigs.make(io_processes=2)
    assert len(workers()) == 2
    yield made
    made.close()
    assert not workers()


def test_workers_that_stop_cost_a_deadline_and_are_replaced(rigs: Rigs) -> None:
    rigs.write(keys(6))
    rig = rigs.make(io_processes=2, load_deadline_seconds=0.5)
    # They have begun to work once one has answered.
    assert rig.serve(keys(1, first=100), "a prompt of nobody").hit_blocks == 0
    wait_until(lambda: rig.poll() and rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    stopped = workers()
    for process in stopped:
        os.kill(process, signal.SIGSTOP)

    assert rig.serve(keys(6), "stopped").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "deadline") == 6
    for process in stopped:
        # Stopped while they waited for work, they hold no task that would make them look stuck.
        os.kill(process, signal.SIGKILL)
    attempts = itertools.count()
    wait_until(lambda: rig.serve(keys(6), f"again {next(attempts)}").hit_blocks == 6, "loads work again")
    assert not set(workers()) & set(stopped)


def test_fewer_than_one_process_is_refused(rigs: Rigs) -> None:
    with pytest.raises(ConfigInvalid, match="io_processes=0 must be between 1"):
        rigs.config_file(io_processes=0)


def test_workers_that_die_cost_no_breaker_and_the_tier_is_inert_until_they_are_back(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    rig = rigs.make()
    view = rig.primary.get_kv_memoryview()
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
    found = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208 - numbers
    return {fd for fd in found if is_open(fd)}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_an_engine_on_one_processor_has_a_worker_for_loads_while_others_store(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    # On a volume that answers at once nothing asks for more of them.
    monkeypatch.setattr("kvtier_connector.cascade.attach._measure_round_trip", lambda *_: 0.0)
    rig = rigs.make(io_processes=None)
    rig.offload(keys(4))
    assert rig.serve(keys(4)).hit_blocks == 4
    assert rig.metric("vllm:kvtier_disk_io_processes") == 3


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_an_engine_that_can_start_no_process_serves_without_its_disk_tier_and_says_so(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rigs.write(keys(4))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    rig = rigs.make(io_processes=2)
    rig.offload(keys(4, first=10))

    assert rig.serve(keys(4)).hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_io_processes") == 0
    assert rig.metric("vllm:kvtier_disk_active") == 0
    assert rig.metric("vllm:kvtier_disk_shed_stores", "stuck") == 4
