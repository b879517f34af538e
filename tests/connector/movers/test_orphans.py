# SPDX-License-Identifier: Apache-2.0
"""Movers belong to one engine: they end with it, however it ends, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from crews import Crews, is_alive, is_waiting, payload, shut, wait_until

from kvtier_connector.io_workers.worker import start_process
from kvtier_connector.store.blockstore import Hit

ENGINE = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from crews import CrewUnderTest
crew = CrewUnderTest(Path(sys.argv[1]), movers=3, file_system=sys.argv[2])
crew.write(1)
if sys.argv[2]:
    crew.load(1, 1)
print(*crew.processes, flush=True)
sys.stdin.read()
"""


def start_engine(crews: Crews, file_system: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a process that has three movers; one reads, if there is a file system."""
    arguments = [str(crews.directory / "volume"), file_system, *sys.path]
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    return engine, [int(number) for number in engine.stdout.readline().split()]


@pytest.mark.parametrize("file_system", ["", "mover_fs:GatedFs"])
def test_movers_end_with_their_engine_even_if_it_is_killed(crews: Crews, file_system: str) -> None:
    shut(crews)
    engine, movers = start_engine(crews, file_system)
    assert len(movers) == 3
    assert all(is_alive(mover) for mover in movers)
    wait_until(lambda: not file_system or is_waiting(crews), "a read hangs")
    left = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names

    engine.kill()
    engine.communicate()

    wait_until(lambda: not any(is_alive(mover) for mover in movers), "no mover is left")
    assert {name for name in os.listdir("/dev/shm") if "kvtier" in name} <= left  # noqa: PTH208 - names


def ignores(process: int, number: int) -> bool:
    """Say whether the process has come so far in its start that it ignores the signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return bool(int(status["SigIgn"], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_leaves_the_movers_to_their_engine(crews: Crews, number: int) -> None:
    crew = crews.make(movers=2)
    crew.write(*range(20))
    crew.load(0, *range(20))
    crew.wait_for(20)
    # One of them may have loaded everything while the other was still starting.
    wait_until(lambda: all(ignores(process, number) for process in crew.processes), "each mover is past its start")
    for process in crew.processes:
        os.kill(process, number)
    crew.load(20, *range(20))
    crew.wait_for(40)

    assert all(isinstance(ended.outcome, Hit) for ended in crew.ended.values())
    assert all(is_alive(process) for process in crew.processes)
    assert crew.movers.close(20.0)
    assert not any(is_alive(process) for process in crew.processes)


def test_the_movers_of_two_engines_of_one_pod_know_nothing_of_each_other(crews: Crews) -> None:
    one, movers = start_engine(crews)
    other = crews.make(movers=2)
    one.kill()
    one.communicate()
    wait_until(lambda: not any(is_alive(mover) for mover in movers), "no mover of the dead engine is left")

    other.load(1, 1)
    other.wait_for(1)
    assert other.row(0) == payload(1)
    assert all(is_alive(mover) for mover in other.processes)


def waits(process: int) -> int:
    """Return how often a process has waited for something."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_movers_stay_with_an_engine_that_asks_for_nothing(crews: Crews) -> None:
    crew = crews.make(movers=2)
    wait_until(lambda: all(ignores(process, signal.SIGTERM) for process in crew.processes), "they are past their start")

    def have_looked(since: list[int]) -> bool:
        assert all(is_alive(process) for process in crew.processes)
        return all(waits(process) > before + 2 for process, before in zip(crew.processes, since, strict=True))

    since = [waits(process) for process in crew.processes]
    wait_until(lambda: have_looked(since), "each has looked for work again and again")
    crew.write(1)
    crew.load(1, 1)
    crew.wait_for(1)
    assert all(is_alive(process) for process in crew.processes)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "glibc.cpu.x86_non_temporal_threshold=0x10000"),
        (
            "glibc.malloc.arena_max=2",
            "glibc.malloc.arena_max=2:glibc.cpu.x86_non_temporal_threshold=0x10000",
        ),
        ("glibc.cpu.x86_non_temporal_threshold=0x40000000", "glibc.cpu.x86_non_temporal_threshold=0x40000000"),
    ],
)
def test_how_movers_copy_can_be_set_by_the_environment_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    (tmp_path / "tells.py").write_text("import os; print(os.environ['GLIBC_TUNABLES'], flush=True)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GLIBC_TUNABLES", given)
    with start_process("tells", "", stdout=subprocess.PIPE) as process:
        said, _ = process.communicate()
    assert said.decode().strip() == expected
