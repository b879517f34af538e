# SPDX-License-Identifier: Apache-2.0
"""What becomes of tasks when workers die, and when they cannot be started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pools import HIT, PATIENCE_SECONDS, Pools, PoolUnderTest, is_waiting, payload, refuse, shut, wait_until
from waiting import is_alive

from kvtier_connector.io_workers.pool import NO_WORKERS
from kvtier_connector.io_workers.tasks import Lane
from kvtier_connector.io_workers.worker import start_process
from kvtier_connector.store.blockstore import Hit
from kvtier_connector.store.header import Fault
from kvtier_connector.store.health import CircuitState, Direction


def test_a_worker_killed_in_the_middle_of_a_read_costs_that_block_and_no_other(pools: Pools) -> None:
    pool = pools.make(workers=2, file_system="worker_fs:DyingFs")
    pool.write(*range(20))
    shut(pools)
    pool.load(0, *range(20))
    pool.wait_for(20)
    failed = [index for index in range(20) if pool.outcome(index) is Fault.IO]
    assert len(failed) == 1
    assert all(pool.row(index) == payload(index) for index in range(20) if index not in failed)


def test_a_worker_killed_before_it_says_what_it_took_costs_no_block(pools: Pools) -> None:
    pool = pools.make(workers=1, file_system="worker_fs:DyingWithATaskFs")
    pool.write(*range(8))
    gate = shut(pools)
    pool.load(0, *range(8))
    pool.wait_for(8)
    assert not gate.exists()
    assert [pool.outcome(task) for task in range(8)] == [HIT] * 8


def step_until(pool: PoolUnderTest, has_processes: bool) -> None:
    what = f"there are {'' if has_processes else 'no '}processes"
    wait_until(lambda: pool.step() or pool.has_processes == has_processes, what)


def test_workers_given_up_are_tried_until_they_work_and_told_once(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    gate = shut(pools)
    pool = pools.make(workers=1, file_system="worker_fs:DyingWhileShutFs", retry_seconds=0.02)
    pool.write(1)
    assert pool.has_processes
    for attempt in range(3):
        pool.load(100 * attempt, *[1] * 16)
        step_until(pool, has_processes=False)
        step_until(pool, has_processes=True)
    gate.unlink()
    wait_until(lambda: pool.collect() or sum(task < 1000 for task in pool.ended) == 48, "all have ended")
    assert pool.loads(900, row=3)
    assert pool.has_processes
    # After a new start, a single death is enough to give up.
    for attempt in (1, 2):
        assert len([task for task in range(100 * attempt, 100 * attempt + 16) if pool.outcome(task) is Fault.IO]) <= 1
    assert [record.levelname for record in caplog.records if "given up" in record.message] == ["ERROR"]


def test_workers_that_die_before_they_are_ready_cost_no_block(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    started: list[object] = []

    def start_nothing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(command)
        return popen([sys.executable, "-S", "-c", "pass"], **options)

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", start_nothing)
        pool = pools.make(workers=2, retry_seconds=0.01)
        step_until(pool, has_processes=False)
        before = len(started)
        seen: set[bool] = set()

        def are_tried() -> bool:
            step_until(pool, has_processes=False)
            seen.add(pool.has_processes)
            return len(started) >= before + 6

        wait_until(are_tried, "they are tried again and again")
        assert seen == {False}
    step_until(pool, has_processes=True)
    pool.write(1)
    assert pool.loads(1)


def test_workers_that_die_say_nothing_of_the_volume(pools: Pools) -> None:
    gate = shut(pools)
    dying = pools.make(workers=1, file_system="worker_fs:DyingFs")
    dying.write(1)
    for task in range(5):
        gate.touch()
        dying.load(task, 1)
        dying.wait_for(task + 1)
    assert {done.outcome for done in dying.ended.values()} == {Fault.IO}
    assert dying.breaker.state(Direction.LOAD) is CircuitState.CLOSED
    gate.unlink(missing_ok=True)


def test_workers_that_hang_and_are_killed_are_never_given_up(pools: Pools) -> None:
    shut(pools)
    pool = pools.make(workers=1, stuck_seconds=0.01, file_system="worker_fs:GatedFs")
    pool.write(1)
    for task in range(12):
        wait_until(lambda: pool.collect() or not pool.workers.is_stuck(Lane.LOAD), "a worker lives")
        pool.load(task, 1)
        pool.wait_for(task + 1)
    assert pool.has_processes


def test_without_processes_all_tasks_are_refused(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        pool = pools.make(workers=2, retry_seconds=0.01)
        assert not pool.has_processes
        pool.write(1)
        pool.load(0, 1)
        pool.save(1, 2, row=0)
        pool.collect()
        assert {pool.outcome(0), pool.outcome(1)} == {NO_WORKERS}
        assert "serves without its disk tier" in caplog.text
    step_until(pool, has_processes=True)
    assert pool.loads(2)
    assert pool.workers.counts().processes == 2


def test_without_room_for_a_process_those_that_run_do_the_work(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pools.make(workers=2, retry_seconds=0.01)
    pool.write(1)
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        os.kill(pool.processes[0], signal.SIGKILL)
        wait_until(lambda: pool.collect() or pool.workers.counts().processes == 1, "the dead one is gone")
        assert pool.loads(1)
    wait_until(lambda: pool.collect() or pool.workers.counts().processes == 2, "both run again")


ENGINE = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from pools import PoolUnderTest
pool = PoolUnderTest(Path(sys.argv[1]), workers=3, file_system=sys.argv[2])
pool.write(1)
if sys.argv[2]:
    pool.load(1, 1)
print(*pool.processes, flush=True)
sys.stdin.read()
"""


def start_engine(pools: Pools, file_system: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a process that has three workers; one reads, if there is a file system."""
    arguments = [str(pools.directory / "volume"), file_system, *sys.path]
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return engine, [int(number) for number in engine.stdout.readline().split()]


@pytest.mark.parametrize("file_system", ["", "worker_fs:GatedFs"])
def test_workers_end_with_their_engine_even_if_it_is_killed(pools: Pools, file_system: str) -> None:
    shut(pools)
    engine, workers = start_engine(pools, file_system)
    assert len(workers) == 3
    assert all(is_alive(worker) for worker in workers)
    wait_until(lambda: not file_system or is_waiting(pools), "a read hangs")
    left = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names, not paths
    engine.kill()
    engine.communicate()
    wait_until(lambda: not any(is_alive(worker) for worker in workers), "no worker is left")
    assert {name for name in os.listdir("/dev/shm") if "kvtier" in name} <= left  # noqa: PTH208 - names, not paths


def ignores(process: int, number: int) -> bool:
    """Say whether the process has come so far in its start that it ignores the signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_the_workers_to_their_engine(pools: Pools, number: int) -> None:
    pool = pools.make(workers=2)
    pool.write(*range(20))
    pool.load(0, *range(20))
    pool.wait_for(20)
    # One of them may have loaded everything while the other was still starting.
    wait_until(lambda: all(ignores(process, number) for process in pool.processes), "each worker is past its start")
    for process in pool.processes:
        os.kill(process, number)
    pool.load(20, *range(20))
    pool.wait_for(40)
    assert all(isinstance(ended.outcome, Hit) for ended in pool.ended.values())
    assert all(is_alive(process) for process in pool.processes)
    assert pool.workers.close(PATIENCE_SECONDS)
    assert not any(is_alive(process) for process in pool.processes)


def test_the_workers_of_two_engines_of_one_pod_know_nothing_of_each_other(pools: Pools) -> None:
    one, workers = start_engine(pools)
    other = pools.make(workers=2)
    one.kill()
    one.communicate()
    wait_until(lambda: not any(is_alive(worker) for worker in workers), "no worker of the dead engine is left")
    assert other.loads(1)
    assert all(is_alive(worker) for worker in other.processes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.cpu.x86_non_temporal_threshold=0x10000"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.cpu.x86_non_temporal_threshold=0x10000"),
        ("glibc.cpu.x86_non_temporal_threshold=0x40000000", "glibc.cpu.x86_non_temporal_threshold=0x40000000"),
    ],
)
def test_how_workers_copy_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: str) -> None:
    (tmp_path / "tells.py").write_text("import os; print(os.environ['GLIBC_TUNABLES'], flush=True)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    with start_process("tells", "", stdout=subprocess.PIPE) as process:
        said, _ = process.communicate()
    assert said.decode().strip() == expected
