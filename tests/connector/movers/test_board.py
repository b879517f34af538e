# SPDX-License-Identifier: Apache-2.0
"""The pieces that movers are made of: the board, the encoding of tasks, and the file behind mapped memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.movers.board import ENTRIES, MOST_TASK_BYTES, Board, Current, Result, create_board
from kvtier_connector.movers.region import find_region
from kvtier_connector.movers.tasks import Task, decode_outcome, decode_task, encode_outcome, encode_task
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored, StoreFault
from kvtier_connector.store.format import Fault
from kvtier_connector.store.layout import BlockKey, Lineage

HASHES = st.binary(min_size=3, max_size=32)


@given(
    is_load=st.booleans(),
    key=st.builds(BlockKey, HASHES, st.integers(0, 2**32 - 1), st.from_regex(r"[a-z0-9]{0,32}", fullmatch=True)),
    slot=st.integers(0, 2**40),
    lineage=st.builds(Lineage, HASHES, st.integers(0, 2**32 - 1)),
)
def test_a_task_is_read_back_as_it_was_written_and_fits_an_entry(
    is_load: bool, key: BlockKey, slot: int, lineage: Lineage
) -> None:
    task = Task(is_load=is_load, key=key, slot=slot, lineage=lineage)
    encoded = encode_task(task)
    assert decode_task(encoded) == task
    assert len(encoded) <= MOST_TASK_BYTES


@pytest.mark.parametrize("outcome", [None, Hit(123), Miss(), Stored(2**40), Present(), *Fault, *StoreFault])
def test_an_outcome_is_read_back_as_it_was_written(outcome: Hit | Miss | Stored | Present | Fault | None) -> None:
    assert decode_outcome(*encode_outcome(outcome)) == outcome


def test_both_sides_of_a_board_see_the_same() -> None:
    fd = create_board()
    engine, mover = Board(fd), Board(fd)
    last = ENTRIES - 1
    engine.write_task(last, b"x" * MOST_TASK_BYTES)
    engine.set_ticket(last, 2**32 - 1)
    mover.set_current(255, Current(last, 7, 1.5))
    mover.write_result(last, Result(3, 2**40, 0.25))

    assert mover.task(last) == b"x" * MOST_TASK_BYTES
    assert mover.ticket(last) == 2**32 - 1
    assert mover.ticket(last - 1) == 0
    assert engine.current(255) == Current(last, 7, 1.5)
    assert engine.result(last) == Result(3, 2**40, 0.25)
    with pytest.raises(ValueError, match="does not fit"):
        engine.write_task(0, b"x" * (MOST_TASK_BYTES + 1))
    for board in (engine, mover):
        board.close()
    os.close(fd)


def test_a_lock_held_by_another_process_is_seen_and_ends_with_that_process() -> None:
    fd = create_board()
    board = Board(fd)
    told, tells = os.pipe()
    ends, end = os.pipe()
    process = os.fork()
    if process == 0:
        # Never back into the test.
        try:
            with board.locked(3):
                os.write(tells, b"x")
                os.close(end)
                os.read(ends, 1)
                os.kill(os.getpid(), 9)
        finally:
            os._exit(1)
    os.read(told, 1)
    assert not board.is_unlocked(3)
    assert board.is_unlocked(2)
    os.close(end)
    os.waitpid(process, 0)
    assert board.is_unlocked(3)
    board.close()
    for descriptor in (fd, told, tells, ends):
        os.close(descriptor)


def test_the_file_behind_shared_memory_is_found_even_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "region"
    with path.open("w+b") as file:
        file.truncate(4 * mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE)
        path.unlink()
        region = find_region(memoryview(memory)[mmap.PAGESIZE :])
        assert region is not None
        assert (region.offset, region.size) == (mmap.PAGESIZE, 3 * mmap.PAGESIZE)
        os.pwrite(region.fd, b"seen", region.offset)
        assert memory[mmap.PAGESIZE : mmap.PAGESIZE + 4] == b"seen"
        os.close(region.fd)
        memory.close()


def test_memory_of_this_process_alone_has_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    assert find_region(memoryview(bytearray(100))) is None
    assert find_region(memoryview(bytes(100))) is None
    assert find_region(memoryview(mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))) is None
    with path.open("r+b") as file:
        private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        assert find_region(memoryview(private)) is None
        private.close()
