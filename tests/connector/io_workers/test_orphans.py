# SPDX-License-Identifier: Apache-2.0
"""Workers belong to one engine: they end with it, however it ends, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pools import Pools, is_alive, is_waiting, payload, shut, wait_until

from kvtier_connector.io_workers.worker import start_process
from kvtier_connector.store.blockstore import Hit

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
    left = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names

    engine.kill()
    engine.communicate()

    wait_until(lambda: not any(is_alive(worker) for worker in workers), "no worker is left")
    assert {name for name in os.listdir("/dev/shm") if "kvtier" in name} <= left  # noqa: PTH208 - names


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
    assert pool.workers.close(20.0)
    assert not any(is_alive(process) for process in pool.processes)


def test_the_workers_of_two_engines_of_one_pod_know_nothing_of_each_other(pools: Pools) -> None:
    one, workers = start_engine(pools)
    other = pools.make(workers=2)
    one.kill()
    one.communicate()
    wait_until(lambda: not any(is_alive(worker) for worker in workers), "no worker of the dead engine is left")

    other.load(1, 1)
    other.wait_for(1)
    assert other.row(0) == payload(1)
    assert all(is_alive(worker) for worker in other.processes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.cpu.x86_non_temporal_threshold=0x10000"),
        ("glibc.malloc.arena_max=2", "glibc.malloc.arena_max=2:glibc.cpu.x86_non_temporal_threshold=0x10000"),
        ("glibc.cpu.x86_non_temporal_threshold=0x40000000", "glibc.cpu.x86_non_temporal_threshold=0x40000000"),
    ],
)
def test_how_workers_copy_can_be_set_by_the_environment_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    (tmp_path / "tells.py").write_text("import os; print(os.environ['GLIBC_TUNABLES'], flush=True)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    with start_process("tells", "", stdout=subprocess.PIPE) as process:
        said, _ = process.communicate()
    assert said.decode().strip() == expected
