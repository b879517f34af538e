# SPDX-License-Identifier: Apache-2.0
"""What movers store: the bytes of its own block or none, within the limit, and never with all of their number."""

from __future__ import annotations

import os
import signal

from crews import ROW_BYTES, Crews, count_waited, is_waiting, key, payload, shut, wait_until

from kvtier_connector.io_workers.tasks import Ending
from kvtier_connector.store.blockstore import Hit, Stored, StoreFault
from kvtier_connector.store.header import HEADER_BYTES

HIT = Hit(HEADER_BYTES + ROW_BYTES)


def test_a_late_save_never_stores_the_bytes_of_another_block(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, file_system="mover_fs:GatedFs")
    crew.write(1)
    crew.set_row(9, payload(9))
    crew.load(1, 1)
    wait_until(lambda: is_waiting(crews), "the read hangs")
    crew.save(2, 9, row=9)

    crew.withdraw(2)
    crew.set_row(9, payload(3))
    gate.unlink()
    crew.wait_for(2)
    crew.save(3, 8, row=9)
    crew.wait_for(3)

    assert crew.blocks.look_up(key(9)) is False
    assert crew.blocks.look_up(key(8)) is True


def test_a_row_that_is_given_to_another_block_while_it_is_written_is_stored_under_neither_name(crews: Crews) -> None:
    gate = shut(crews)
    crew = crews.make(movers=1, max_bytes=2 * (ROW_BYTES + HEADER_BYTES), file_system="mover_fs:GatedWritesFs")
    crew.set_row(9, payload(9))
    crew.save(1, 9, row=9)
    wait_until(lambda: is_waiting(crews), "the header is written")

    crew.withdraw(1)
    crew.set_row(9, payload(3))
    gate.unlink()
    crew.save(2, 8, row=9)
    crew.wait_for(2)

    assert crew.outcome(1) is Ending.WITHDRAWN
    assert crew.blocks.look_up(key(9)) is False
    assert crew.blocks.get(key(8), memoryview(bytearray(ROW_BYTES))) == HIT
    assert crew.store.usage_bytes() == ROW_BYTES + HEADER_BYTES
    assert not list((crews.directory / "volume").rglob("*partial*"))


def test_a_load_finds_a_mover_that_is_free_while_the_volume_holds_up_all_that_store(crews: Crews) -> None:
    crew = crews.make(movers=4, file_system="mover_fs:GatedWritesFs")
    crew.write(1)
    gate = shut(crews)
    for number in range(10, 20):
        crew.save(number, number, row=number)

    def is_held_up() -> bool:
        crew.collect()
        return count_waited(crews) == 3

    wait_until(is_held_up, "three of four movers store")
    crew.load(1, 1)
    crew.wait_for(1)
    assert crew.outcome(1) == HIT
    assert count_waited(crews) == 3
    gate.unlink()
    crew.wait_for(11)


def test_the_limit_of_the_tier_holds_for_what_movers_write(crews: Crews) -> None:
    crew = crews.make(max_bytes=5 * (ROW_BYTES + HEADER_BYTES))
    for task in range(9):
        crew.save(task, task, row=task)
    crew.wait_for(9)

    outcomes = [done.outcome for done in crew.ended.values()]
    assert outcomes.count(StoreFault.NO_BUDGET) == 4
    assert outcomes.count(Stored(ROW_BYTES + HEADER_BYTES)) == 5
    assert crew.store.usage_bytes() == 5 * (ROW_BYTES + HEADER_BYTES)


def test_a_store_that_is_withdrawn_gives_its_room_back(crews: Crews) -> None:
    crew = crews.make(movers=1, max_bytes=2 * (ROW_BYTES + HEADER_BYTES))
    os.kill(crew.processes[0], signal.SIGSTOP)
    crew.save(0, 0, row=0)
    crew.save(1, 1, row=1)
    assert crew.store.usage_bytes() == 2 * (ROW_BYTES + HEADER_BYTES)
    crew.withdraw(0, 1)
    assert crew.store.usage_bytes() == 0
    os.kill(crew.processes[0], signal.SIGCONT)
