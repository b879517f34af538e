# SPDX-License-Identifier: Apache-2.0
"""What movers move, and what becomes of a task when its mover hangs, dies or is too late."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from crews import (
    PATIENCE_SECONDS,
    ROW_BYTES,
    ROWS,
    Crews,
    CrewUnderTest,
    children,
    is_alive,
    is_waiting,
    key,
    payload,
    shut,
    wait_until,
)

from kvtier_connector.io_workers import pool
from kvtier_connector.io_workers.task_table import ENTRIES, Board
from kvtier_connector.io_workers.tasks import Ending, Lane, Looked
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.health import Direction, State
from kvtier_connector.store.index import Presence

HIT = Hit(HEADER_BYTES + ROW_BYTES)


@pytest.mark.parametrize("movers", [3, 0])
def test_blocks_are_loaded_into_their_rows_and_saved_from_them(crews: Crews, movers: int) -> None:
    crew = crews.make(movers=movers)
    crew.write(*range(8))
    crew.set_row(14, payload(20))

    crew.load(0, *range(8), 99, first_row=4)
    crew.save(20, 20, row=14)
    crew.wait_for(10)

    assert [crew.row(4 + number) for number in range(8)] == [payload(number) for number in range(8)]
    assert all(crew.outcome(index) == HIT for index in range(8))
    assert crew.outcome(8) == Miss()
    assert crew.outcome(20) == Stored(HEADER_BYTES + ROW_BYTES)
    crew.save(30, 20, row=14)
    crew.load(31, 20, first_row=15)
    crew.wait_for(12)
    assert crew.outcome(30) == Present()
    assert crew.row(15) == payload(20)


@pytest.mark.parametrize("movers", [2, 0])
def test_movers_compress_what_they_save_and_put_it_back_into_the_row(crews: Crews, movers: int) -> None:
    crew = crews.make(movers=movers, compression="Always")
    crew.set_row(3, payload(1))
    crew.save(1, 1, row=3)
    crew.wait_for(1)
    crew.load(2, 1, first_row=9)
    crew.wait_for(2)

    stored = crew.outcome(1)
    assert isinstance(stored, Stored)
    assert stored.bytes_written < HEADER_BYTES + ROW_BYTES
    assert crew.outcome(2) == Hit(stored.bytes_written)
    assert crew.row(9) == payload(1)


def test_rows_of_a_second_file_are_reached_as_those_of_the_first(crews: Crews) -> None:
    crew = crews.make()
    crew.write(*range(ROWS))
    crew.load(0, *range(ROWS))
    crew.wait_for(ROWS)
    assert [crew.row(row) for row in range(ROWS)] == [payload(row) for row in range(ROWS)]


def test_a_task_that_took_the_place_of_another_in_its_entry_is_not_taken_for_that(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading, may_read = threading.Event(), threading.Event()
    read = Board.task

    def read_late(board: Board, entry: int) -> bytes:
        is_reading.set()
        may_read.wait(PATIENCE_SECONDS)
        return read(board, entry)

    monkeypatch.setattr(Board, "task", read_late)
    crew = crews.make(movers=0, threads=1)
    crew.write(1)
    crew.probe(0, 0)
    assert is_reading.wait(PATIENCE_SECONDS)
    crew.withdraw(0)
    crew.probe(1, 1)
    may_read.set()
    crew.wait_for(2)
    assert crew.outcome(1) == Looked((True,))
    assert crew.store.state(key(0)) is Presence.UNKNOWN, "nobody has looked"


@pytest.mark.parametrize("movers", [2, 0])
def test_a_probe_says_up_to_where_a_prefix_is_there_and_the_index_knows_it(crews: Crews, movers: int) -> None:
    crew = crews.make(movers=movers)
    crew.write(0, 1, 3)
    crew.probe(0, 0, 1, 2, 3)
    crew.probe(1, 3)
    crew.wait_for(2)

    assert crew.outcome(0) == Looked((True, True, False))
    assert crew.outcome(1) == Looked((True,))
    states = [crew.store.state(key(number)) for number in range(4)]
    assert states == [Presence.PRESENT, Presence.PRESENT, Presence.ABSENT, Presence.PRESENT]

    crew.probe(2, 5, 0, 6, 1, is_prefix=False)
    crew.wait_for(3)
    assert crew.outcome(2) == Looked((False, True, False, True))


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
    assert crew.store.state(key(1)) is Presence.ABSENT


def test_more_tasks_than_the_board_takes_of_one_lane_all_end_once(crews: Crews) -> None:
    crew = crews.make(movers=2)
    crew.write(1)
    count = (ENTRIES // 4) // ROWS + 2
    for batch in range(count):
        crew.load(batch * ROWS, *[1] * ROWS, lane=Lane.PREFETCH)
    crew.wait_for(ROWS * count)

    assert all(done.outcome == HIT for done in crew.ended.values())


def test_loads_go_before_what_is_stored_and_prefetched_and_what_is_hastened_goes_with_them(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:GatedFs")
    crew.write(*range(20))
    order: list[int] = []
    crew.load(0, 0)
    wait_until(lambda: is_waiting(crews), "the only mover reads")
    crew.save(100, 100, row=10)
    crew.load(200, *range(1, 9), first_row=1, lane=Lane.PREFETCH)
    crew.load(300, *range(9, 11), first_row=11)
    crew.movers.hasten([204, 205, 999])
    gate.unlink()

    def is_over() -> bool:
        order.extend(done.task for done in crew.movers.collect())
        return len(order) == 12

    wait_until(is_over, "all have ended")
    assert order == [0, 300, 301, 204, 205, 200, 201, 202, 203, 206, 207, 100]
    assert crew.row(5) == payload(5)


def test_a_load_does_not_wait_for_what_fills_the_board_with_stores(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:GatedFs")
    crew.write(1)
    crew.load(0, 1)
    wait_until(lambda: is_waiting(crews), "the only mover reads")
    stores = ENTRIES // 8 + 40
    for number in range(stores):
        crew.save(1000 + number, 1000 + number % 7, row=9)
    crew.load(1, 1, first_row=1)
    gate.unlink()
    crew.wait_for(stores + 2)
    # In the order in which they ended, whenever that was looked at.
    assert list(crew.ended).index(1) <= 8


@pytest.mark.parametrize("movers", [1, 0])
def test_a_withdrawn_task_that_nobody_began_ends_as_withdrawn(crews: Crews, movers: int) -> None:
    crew = crews.make(movers=movers)
    crew.write(1, 2)
    crew.set_row(0, payload(7))
    if crew.processes:
        os.kill(crew.processes[0], signal.SIGSTOP)
    crew.load(1, *[1] * 8, lane=Lane.PREFETCH)
    crew.withdraw(*range(1, 9))
    endings = {done.outcome for done in crew.ended.values()}
    if crew.processes:
        assert endings == {Ending.WITHDRAWN}
        os.kill(crew.processes[0], signal.SIGCONT)
    else:
        assert endings <= {Ending.WITHDRAWN, HIT}
    crew.load(10, 2, first_row=9)
    crew.wait_for(9)
    assert crew.row(9) == payload(2)
    if crew.processes:
        assert crew.row(0) == payload(7)


def test_a_late_read_never_lands_in_a_row_that_was_given_to_another_block(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:GatedFs")
    crew.write(1, 2)
    crew.load(1, 1, first_row=5)
    wait_until(lambda: is_waiting(crews), "the read hangs")

    crew.withdraw(1)
    assert crew.outcome(1) is Ending.WITHDRAWN
    crew.set_row(5, payload(7))
    gate.unlink()
    # The only mover has ended the late read before it begins this one.
    crew.load(2, 2, first_row=6)
    crew.wait_for(2)

    assert crew.row(6) == payload(2)
    assert crew.row(5) == payload(7)


def test_a_prefetch_that_is_made_urgent_while_it_is_taken_back_is_under_way_once(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LOCK_SECONDS", PATIENCE_SECONDS)
    crew = crews.make(movers=2, file_system="mover_fs:HoldingFs")
    crew.write(1, 2, 3)
    gate = shut(crews)
    crew.load(1, 1, 2)
    working = crew.movers._dispatcher.working
    wait_until(lambda: len(working()) == 2, "both movers hold their locks")
    crew.load(3, 3, first_row=3, lane=Lane.PREFETCH)
    holding, dying = crew.processes
    os.kill(dying, signal.SIGKILL)
    flight = crew.movers._open[3]

    def is_left_alone() -> bool:
        crew.collect()
        return flight.is_taken_back and not flight.ticket

    wait_until(is_left_alone, "the next mover has seen that the task is taken back, and the first holds its lock")
    crew.movers.hasten([3])
    if flight.ticket:
        wait_until(lambda: flight.ticket in working(), "the next mover reads it")
    os.kill(next(iter(set(children(os.getpid())) - {holding, dying})), signal.SIGSTOP)
    gate.unlink()
    crew.wait_for(3)
    crew.set_row(3, payload(4))
    for process in children(os.getpid()):
        os.kill(process, signal.SIGCONT)
    crew.load(4, 1, 2, 3)
    crew.wait_for(6)
    assert crew.row(3) == payload(4), "it was given to another block"


def test_a_task_does_not_end_while_its_row_is_being_copied(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:HoldingFs")
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the mover holds its lock")

    crew.movers.withdraw([1])
    crew.collect()
    assert not crew.ended
    gate.unlink()
    crew.wait_for(1)
    crew.set_row(0, payload(4))
    crew.load(2, 1, first_row=1)
    crew.wait_for(2)
    assert crew.row(0) == payload(4)


def test_a_mover_that_never_ends_its_copy_is_killed_and_then_the_row_is_free(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:HoldingFs")
    crew.write(1)
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the mover holds its lock")

    crew.withdraw(1)
    assert crew.outcome(1) is Ending.WITHDRAWN
    wait_until(lambda: not is_alive(crew.processes[0]), "the mover is dead")
    gate.unlink()
    crew.load(2, 1)
    crew.wait_for(2)
    assert crew.row(0) == payload(1)


@pytest.mark.parametrize("lane", [Lane.LOAD, Lane.PREFETCH])
def test_a_mover_that_hangs_is_killed_and_replaced_and_its_task_is_late(crews: Crews, lane: Lane) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, stuck_seconds=0.2, file_system="mover_fs:GatedFs")
    crew.write(1)
    crew.load(1, 1, lane=lane)
    seen: list[bool] = []

    def has_ended() -> bool:
        crew.collect()
        seen.append(crew.movers.is_stuck(lane))
        return bool(crew.ended) and any(seen)

    wait_until(has_ended, "the mover is given up")
    gate.unlink()
    assert crew.outcome(1) is Ending.LATE
    assert crew.breaker.view(Direction.LOAD).cause == "timeout"


def test_what_waits_in_line_behind_a_volume_that_answers_is_not_late(crews: Crews) -> None:
    crew = crews.make(movers=1, stuck_seconds=0.5, file_system="mover_fs:SlowFs")
    crew.write(1)
    crew.load(0, *[1] * 15)
    crew.wait_for(15)
    assert {done.outcome for done in crew.ended.values()} == {HIT}
    assert crew.breaker.view(Direction.LOAD).state is State.CLOSED


def test_what_waits_in_line_is_late_when_no_mover_gets_on_and_they_are_replaced(crews: Crews) -> None:
    crew = crews.make(movers=2, stuck_seconds=1.0)
    crew.write(1)
    crew.load(0, 1)
    crew.wait_for(1)
    for process in crew.processes:
        os.kill(process, signal.SIGSTOP)
    crew.load(1, *[1] * 8, first_row=1)
    crew.wait_for(9)
    assert {crew.outcome(task) for task in range(1, 9)} == {Ending.LATE}
    wait_until(lambda: crew.collect() or not any(is_alive(process) for process in crew.processes), "they are dead")

    def is_loaded() -> bool:
        task = max(crew.ended) + 1
        crew.load(task, 1)
        crew.wait_for(task + 1)
        return crew.outcome(task) == HIT

    wait_until(is_loaded, "others load")


def test_a_breaker_that_opens_refuses_what_waits_in_line(crews: Crews) -> None:
    crew = crews.make()
    crew.breaker.record_timeout(Direction.LOAD)
    crew.load(0, *range(4))
    crew.wait_for(4)
    assert {done.outcome for done in crew.ended.values()} == {("breaker",)}


def test_closing_ends_idle_movers_and_those_that_hang_and_every_task(crews: Crews) -> None:
    shut(crews)
    idle: CrewUnderTest = crews.make(movers=2)
    hanging = crews.make(movers=1, file_system="mover_fs:GatedFs")
    hanging.write(1)
    hanging.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the read hangs")

    assert idle.movers.close(20.0)
    assert hanging.movers.close(0.2)
    assert not any(is_alive(process) for process in (*idle.processes, *hanging.processes))
    hanging.collect()
    assert hanging.outcome(1) is Ending.WITHDRAWN
    hanging.load(2, 1)
    hanging.collect()
    assert hanging.outcome(2) == ("closed",)
