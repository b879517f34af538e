# SPDX-License-Identifier: Apache-2.0
"""What movers move, and what becomes of a task when its mover hangs, dies or is too late."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from crews import ROW_BYTES, ROWS, Crews, CrewUnderTest, is_alive, is_waiting, key, payload, shut, wait_until

from kvtier_connector.movers.board import ENTRIES
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.format import HEADER_BYTES, Fault


def test_blocks_are_loaded_into_their_rows_and_saved_from_them(crews: Crews) -> None:
    crew = crews.make(movers=3)
    crew.write(*range(8))
    crew.set_row(20, payload(20))

    crew.load(1, *range(8), 99, first_slot=4)
    crew.save(2, 20, slot=20)
    crew.wait_for(10)

    assert [crew.row(4 + number) for number in range(8)] == [payload(number) for number in range(8)]
    assert all(crew.outcome(1, index) == Hit(HEADER_BYTES + ROW_BYTES) for index in range(8))
    assert crew.outcome(1, 8) == Miss()
    assert crew.outcome(2) == Stored(HEADER_BYTES + ROW_BYTES)
    crew.save(3, 20, slot=20)
    crew.load(4, 20, first_slot=31)
    crew.wait_for(12)
    assert crew.outcome(3) == Present()
    assert crew.row(31) == payload(20)


def test_a_damaged_block_is_a_fault_and_is_moved_out_of_the_way(crews: Crews) -> None:
    crew = crews.make(movers=1)
    crew.write(1)
    (path,) = (crews.directory / "volume" / "blocks").rglob("*.kvb")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    crew.load(1, 1)
    crew.wait_for(1)

    assert crew.outcome(1) is Fault.CHECKSUM
    assert not path.exists()


def test_more_tasks_than_the_board_has_entries_all_end_once(crews: Crews) -> None:
    crew = crews.make(movers=2)
    crew.write(1)
    count = 2 * ENTRIES + 7

    crew.load(1, *[1] * ROWS)
    for owner in range(2, 2 + count // ROWS):
        crew.load(owner, *[1] * ROWS)
    crew.wait_for(ROWS * (1 + count // ROWS))

    assert all(ended.outcome == Hit(HEADER_BYTES + ROW_BYTES) for ended in crew.ended.values())


def test_a_late_read_never_lands_in_a_row_that_was_given_to_another_block(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:GatedFs")
    crew.write(1, 2)
    crew.load(1, 1, first_slot=5)
    wait_until(lambda: is_waiting(crews), "the read hangs")
    assert crew.dispatcher.begun(1) == [0]

    crew.withdraw(1)
    crew.set_row(5, payload(7))
    gate.unlink()
    # The only mover has ended the late read before it begins this one.
    crew.load(2, 2, first_slot=6)
    crew.wait_for(1)

    assert crew.row(6) == payload(2)
    assert crew.row(5) == payload(7)
    assert (1, 0) not in crew.ended


def test_a_late_save_never_stores_the_bytes_of_another_block(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:GatedFs")
    crew.write(1)
    crew.set_row(9, payload(9))
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the read hangs")
    crew.save(2, 9, slot=9)

    crew.withdraw(2)
    crew.set_row(9, payload(3))
    gate.unlink()
    crew.wait_for(1)
    crew.save(3, 8, slot=9)
    crew.wait_for(2)

    assert crew.store.look_up(key(9)) is False
    assert crew.store.look_up(key(8)) is True


def test_a_task_is_not_taken_back_while_its_row_is_being_copied(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:HoldingFs")
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the mover holds its lock")

    assert not crew.dispatcher.withdraw(1)
    gate.unlink()
    crew.withdraw(1)
    crew.set_row(0, payload(4))
    crew.load(2, 1, first_slot=1)
    crew.wait_for(1)
    assert crew.row(0) == payload(4)


def test_a_mover_that_never_ends_its_copy_is_killed_and_then_the_row_is_free(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:HoldingFs")
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the mover holds its lock")

    crew.withdraw(1)
    wait_until(lambda: not is_alive(crew.processes[0]), "the mover is dead")
    gate.unlink()
    crew.load(2, 1)
    crew.wait_for(1)
    assert crew.row(0) == payload(1)


def test_a_mover_that_hangs_is_killed_and_replaced_and_its_task_has_failed(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, stuck_seconds=0.2, file_system="mover_fs:GatedFs")
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the read hangs")
    seen: list[bool] = []

    def has_ended() -> bool:
        crew.collect()
        seen.append(crew.dispatcher.is_stuck())
        return bool(crew.ended)

    wait_until(has_ended, "the mover is given up")
    gate.unlink()
    assert crew.outcome(1) is Fault.IO
    assert any(seen)
    crew.load(2, 1)
    crew.wait_for(2)
    assert crew.row(0) == payload(1)
    assert not crew.dispatcher.is_stuck()


def test_a_mover_killed_in_the_middle_of_a_read_costs_that_block_and_no_other(crews: Crews) -> None:
    crew = crews.make(movers=2, file_system="mover_fs:DyingFs")
    crew.write(*range(20))
    shut(crews)

    crew.load(1, *range(20))
    crew.wait_for(20)

    failed = [index for index in range(20) if crew.outcome(1, index) is Fault.IO]
    assert len(failed) == 1
    assert all(crew.row(index) == payload(index) for index in range(20) if index not in failed)


def test_movers_killed_from_outside_lose_no_queued_task(crews: Crews) -> None:
    crew = crews.make(movers=2)
    crew.write(*range(ROWS))
    for process in crew.processes:
        os.kill(process, signal.SIGSTOP)
    crew.load(1, *range(ROWS))
    crew.save(2, 77, slot=0)
    for process in crew.processes:
        os.kill(process, signal.SIGKILL)

    crew.wait_for(ROWS + 1)
    lost = [ended for ended in crew.ended.values() if isinstance(ended.outcome, Fault | StoreFault)]
    assert len(lost) <= len(crew.processes)
    assert crew.dispatcher.is_usable


def test_movers_that_die_again_and_again_are_given_up(crews: Crews) -> None:
    crew = crews.make(movers=1, file_system="mover_fs:AlwaysDyingFs")
    crew.write(1)
    crew.load(1, *[1] * ROWS)

    def is_over() -> bool:
        crew.collect()
        return not crew.dispatcher.is_usable

    wait_until(is_over, "the crew is given up")
    crew.withdraw(1)


def step_until(crew: CrewUnderTest, is_usable: bool) -> None:
    def is_reached() -> bool:
        crew.collect()
        return crew.dispatcher.is_usable == is_usable

    wait_until(is_reached, f"movers are {'' if is_usable else 'not '}usable")


def test_movers_that_were_given_up_are_tried_again_until_they_work_and_it_is_said_once(
    crews: Crews, caplog: pytest.LogCaptureFixture
) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:DyingWhileShutFs", retry_seconds=0.02)
    crew.write(1)
    assert crew.dispatcher.count_movers() == 1
    for attempt in range(3):
        crew.load(attempt, *[1] * ROWS)
        step_until(crew, is_usable=False)
        assert crew.dispatcher.count_movers() == 0
        crew.withdraw(attempt)
        # On trial a single death ends it, so most of what was asked for was never begun.
        assert attempt == 0 or sum(owner == attempt for owner, _ in crew.ended) <= 1
        step_until(crew, is_usable=True)
    gate.unlink()

    crew.load(9, 1, first_slot=3)
    wait_until(lambda: crew.collect() or (9, 0) in crew.ended, "the block is loaded")

    assert crew.row(3) == payload(1)
    assert crew.dispatcher.count_movers() == 1
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
        step_until(crew, is_usable=False)
        before = len(started)
        seen: set[bool] = set()

        def are_tried() -> bool:
            crew.collect()
            seen.add(crew.dispatcher.is_usable)
            return len(started) >= before + 6

        wait_until(are_tried, "they are tried again and again")
        assert seen == {False}
    step_until(crew, is_usable=True)
    crew.write(1)
    crew.load(1, 1)
    crew.wait_for(1)
    assert crew.row(0) == payload(1)


def test_only_a_mover_that_hung_says_something_of_the_volume(crews: Crews) -> None:
    gate = shut(crews)
    dying = crews.make(movers=1, file_system="mover_fs:DyingFs")
    dying.write(1)
    dying.load(1, 1)
    dying.wait_for(1)
    assert dying.ended[1, 0].outcome is Fault.IO
    assert not dying.ended[1, 0].is_of_volume

    gate.touch()
    hanging = crews.make(movers=1, stuck_seconds=0.2, file_system="mover_fs:GatedFs")
    hanging.load(1, 1)
    hanging.wait_for(1)
    gate.unlink()
    assert hanging.ended[1, 0].outcome is Fault.IO
    assert hanging.ended[1, 0].is_of_volume


def test_movers_that_hang_and_are_killed_are_never_given_up(crews: Crews) -> None:
    shut(crews)
    crew = crews.make(movers=1, stuck_seconds=0.01, file_system="mover_fs:GatedFs")
    crew.write(1)
    for owner in range(12):
        crew.load(owner, 1)
    crew.wait_for(12)
    assert crew.dispatcher.is_usable


def test_a_host_that_has_room_for_processes_again_gets_its_movers(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", refuse)
        crew = crews.make(movers=2, retry_seconds=0.01)
        assert not crew.dispatcher.is_usable
    step_until(crew, is_usable=True)
    crew.write(1)
    crew.load(1, 1)
    crew.wait_for(1)
    assert crew.row(0) == payload(1)
    assert crew.dispatcher.count_movers() == 2


def test_a_host_without_room_for_a_process_costs_the_movers_and_nothing_else(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = crews.make(movers=2)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    os.kill(crew.processes[0], signal.SIGKILL)

    def is_over() -> bool:
        crew.collect()
        return not crew.dispatcher.is_usable

    wait_until(is_over, "the crew is given up")
    assert not crews.make(movers=2).dispatcher.is_usable


def test_closing_ends_idle_movers_and_those_that_hang(crews: Crews) -> None:
    shut(crews)
    idle: CrewUnderTest = crews.make(movers=2)
    hanging = crews.make(movers=1, file_system="mover_fs:GatedFs")
    hanging.write(1)
    hanging.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the read hangs")
    hanging.withdraw(1)

    assert idle.dispatcher.close(20.0)
    assert hanging.dispatcher.close(0.2)
    assert not any(is_alive(process) for process in (*idle.processes, *hanging.processes))
