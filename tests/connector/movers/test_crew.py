# SPDX-License-Identifier: Apache-2.0
"""What becomes of tasks when movers die, and when they cannot be started."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from crews import ROW_BYTES, ROWS, Crews, CrewUnderTest, payload, shut, wait_until

from kvtier_connector.io_workers.tasks import Ending, Lane
from kvtier_connector.store.blockstore import Hit, StoreFault
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.health import Direction, State

HIT = Hit(HEADER_BYTES + ROW_BYTES)


def test_a_mover_killed_in_the_middle_of_a_read_costs_that_block_and_no_other(crews: Crews) -> None:
    crew = crews.make(movers=2, file_system="mover_fs:DyingFs")
    crew.write(*range(20))
    shut(crews)

    crew.load(0, *range(20))
    crew.wait_for(20)

    failed = [index for index in range(20) if crew.outcome(index) is Fault.IO]
    assert len(failed) == 1
    assert all(crew.row(index) == payload(index) for index in range(20) if index not in failed)


def test_movers_killed_from_outside_lose_no_queued_task(crews: Crews) -> None:
    crew = crews.make(movers=2)
    crew.write(*range(ROWS))
    for process in crew.processes:
        os.kill(process, signal.SIGSTOP)
    crew.load(0, *range(ROWS))
    crew.save(77, 77, row=0)
    for process in crew.processes:
        os.kill(process, signal.SIGKILL)

    crew.wait_for(ROWS + 1)
    lost = [done for done in crew.ended.values() if isinstance(done.outcome, Fault | StoreFault)]
    assert len(lost) <= len(crew.processes)
    assert crew.has_processes


def test_movers_that_die_again_and_again_are_given_up_and_threads_do_the_rest(crews: Crews) -> None:
    crew = crews.make(movers=1, file_system="mover_fs:AlwaysDyingFs")
    crew.write(1)
    crew.load(0, *[1] * 16)
    crew.wait_for(16)

    assert not crew.has_processes
    assert sum(thread.name.startswith("kvtier-io-") for thread in threading.enumerate()) == 2
    # Each death cost the block in hand, and says nothing against the volume.
    assert {crew.ended[task].outcome for task in range(16)} == {HIT, Fault.IO}
    assert crew.breaker.view(Direction.LOAD).state is State.CLOSED


def step_until(crew: CrewUnderTest, has_processes: bool) -> None:
    def is_reached() -> bool:
        # Only a crew with something to do is looked after at once.
        crew.keep_busy()
        crew.collect()
        return crew.has_processes == has_processes

    wait_until(is_reached, f"there are {'' if has_processes else 'no '}processes")


def test_movers_that_were_given_up_are_tried_again_until_they_work_and_it_is_said_once(
    crews: Crews, caplog: pytest.LogCaptureFixture
) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:DyingWhileShutFs", retry_seconds=0.02)
    crew.write(1)
    assert crew.has_processes
    for attempt in range(3):
        crew.load(100 * attempt, *[1] * 16)
        step_until(crew, has_processes=False)
        step_until(crew, has_processes=True)
    gate.unlink()

    wait_until(lambda: crew.collect() or sum(task < 1000 for task in crew.ended) == 48, "all have ended")
    crew.load(900, 1, first_row=3)
    wait_until(lambda: crew.collect() or 900 in crew.ended, "the block is loaded")

    assert crew.row(3) == payload(1)
    assert crew.has_processes
    # On trial a single death ends it.
    for attempt in (1, 2):
        faults = [task for task in range(100 * attempt, 100 * attempt + 16) if crew.outcome(task) is Fault.IO]
        assert len(faults) <= 1
    assert [record.levelname for record in caplog.records if "given up" in record.message] == ["ERROR"]


def test_movers_that_die_before_they_are_ready_cost_no_block_when_they_are_tried_again(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen = subprocess.Popen
    started: list[object] = []

    def start_nothing(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(command)
        return popen([sys.executable, "-S", "-c", "pass"], **options)

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", start_nothing)
        crew = crews.make(movers=2, retry_seconds=0.01)
        step_until(crew, has_processes=False)
        before = len(started)
        seen: set[bool] = set()

        def are_tried() -> bool:
            step_until(crew, has_processes=False)
            seen.add(crew.has_processes)
            return len(started) >= before + 6

        wait_until(are_tried, "they are tried again and again")
        assert seen == {False}
    step_until(crew, has_processes=True)
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: crew.collect() or 1 in crew.ended, "the block is loaded")
    assert crew.row(0) == payload(1)


def test_only_a_mover_that_hung_says_something_of_the_volume(crews: Crews) -> None:
    gate = shut(crews)
    dying = crews.make(movers=1, file_system="mover_fs:DyingFs")
    dying.write(1)
    for task in range(5):
        gate.touch()
        dying.load(task, 1)
        dying.wait_for(task + 1)
    assert {done.outcome for done in dying.ended.values()} == {Fault.IO}
    assert dying.breaker.view(Direction.LOAD).state is State.CLOSED

    gate.touch()
    hanging = crews.make(movers=1, stuck_seconds=0.2, file_system="mover_fs:GatedFs")
    hanging.load(1, 1)
    hanging.wait_for(1)
    gate.unlink()
    assert hanging.outcome(1) is Ending.LATE
    assert hanging.breaker.view(Direction.LOAD).state is not State.CLOSED


def test_movers_that_hang_and_are_killed_are_never_given_up(crews: Crews) -> None:
    shut(crews)
    crew = crews.make(movers=1, stuck_seconds=0.01, file_system="mover_fs:GatedFs")
    crew.write(1)
    for task in range(12):
        wait_until(lambda: crew.collect() or not crew.movers.is_stuck(Lane.LOAD), "a mover lives")
        crew.load(task, 1)
        crew.wait_for(task + 1)
    assert crew.has_processes


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_host_that_has_room_for_processes_again_gets_its_movers(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        crew = crews.make(movers=2, retry_seconds=0.01)
        assert not crew.has_processes
    step_until(crew, has_processes=True)
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: crew.collect() or 1 in crew.ended, "the block is loaded")
    assert crew.row(0) == payload(1)
    assert crew.movers.counts().processes == 2


def test_a_host_without_room_for_a_process_costs_the_movers_and_threads_take_over(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crews.make(movers=2)
    crew.write(1)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    os.kill(crew.processes[0], signal.SIGKILL)
    step_until(crew, has_processes=False)

    crew.load(1, 1)
    wait_until(lambda: crew.collect() or 1 in crew.ended, "the block is loaded")
    assert crew.row(0) == payload(1)
