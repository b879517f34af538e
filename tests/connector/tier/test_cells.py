# SPDX-License-Identifier: Apache-2.0
"""Where pages lie in the chunks of the shared region, and which copies move whole chunks."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier_connector.tier import cells
from kvtier_connector.tier.cells import Arrays, Cells, Ends, TensorPlace, TensorRef, make_cells

BLOCKS_PER_CHUNK = 2
PAGES = (32, 48, 16)
ROW_BYTES = 4096
STAGING = 1 << 40


def places(pages: tuple[int, ...] = PAGES) -> list[TensorPlace]:
    tensors, host = [], 1 << 30
    for number, page in enumerate(pages):
        tensors.append(TensorPlace((number + 1) << 20, page, page, host, ROW_BYTES))
        host += page * BLOCKS_PER_CHUNK
    return tensors


def refs(*members: int) -> list[TensorRef]:
    return [TensorRef(member, PAGES[member]) for member in members]


def cells_for(*groups: list[TensorRef]) -> Cells:
    made = make_cells(places(), groups, BLOCKS_PER_CHUNK)
    assert isinstance(made, Cells), made
    return made


def test_a_group_with_all_tensors_owns_the_whole_cell_in_one_run() -> None:
    made = cells_for(refs(2, 0, 1))
    assert made.cell_bytes == 192
    assert made.groups[0].runs.tolist() == [[0, 192]]
    assert made.groups[0].table[:, 3].tolist() == [0, 64, 160]
    assert made.groups[0].block_bytes == 96


def test_a_group_with_some_tensors_owns_a_run_for_each_neighbourhood() -> None:
    made = cells_for(refs(0, 2), refs(1, 2))
    assert [group.runs.tolist() for group in made.groups] == [[[0, 64], [160, 32]], [[64, 128]]]


def test_the_staging_buffer_has_as_many_cells_as_fit_but_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for staging_bytes in (1, 192, 5 * 192 + 1, 1 << 40):
        monkeypatch.setattr(cells, "STAGING_BYTES", staging_bytes)
        counts.append(cells_for(refs(0, 1, 2)).slots)
    assert counts == [1, 1, 5, cells.MOST_BLOCKS_OF_A_STEP // BLOCKS_PER_CHUNK]


def test_what_has_no_cells_is_refused_with_the_reason() -> None:
    good = places()
    group = refs(0, 1, 2)
    moved = [*good[:2], good[2]._replace(host_address=good[2].host_address + 16)]
    longer = [*good[:2], good[2]._replace(host_stride_bytes=2 * ROW_BYTES)]
    for tensors, groups, reason in (
        ([], [], "no KV tensor"),
        (moved, [group], "not contiguous"),
        (longer, [group], "rows of different lengths"),
        ([good[0]._replace(address=8), *good[1:]], [group], "not aligned"),
        ([good[0]._replace(stride_bytes=40), *good[1:]], [group], "not aligned"),
        (places((40, 48, 16)), [group], "not aligned"),
        (good, [group, []], "no KV tensor"),
        (good, [[*group, TensorRef(0, 32)]], "share"),
        (good, [[TensorRef(0, 16)]], "padded"),
        (places((1 << 28,)), [[TensorRef(0, 1 << 28)]], "MiB"),
    ):
        assert reason in str(make_cells(tensors, groups, BLOCKS_PER_CHUNK))


def test_chunks_are_counted_from_the_middle_of_the_first_to_the_middle_of_the_last() -> None:
    made = cells_for(refs(0, 1, 2))
    assert [made.count_chunks(size, start) for size, start in ((0, 1), (1, 0), (2, 0), (2, 1), (4, 3))] == [
        0,
        1,
        1,
        2,
        3,
    ]
    assert made.are_whole([4], [6])
    assert not made.are_whole([3], [6])
    assert not made.are_whole([4], [5])


def test_the_copies_of_a_transfer_are_written_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "STAGING_BYTES", 2 * 192)
    made = cells_for(refs(0, 2))
    arrays = Arrays(*(np.full(40, -1, dtype=np.int64) for _ in Arrays._fields))
    ends = Ends(np.array([70, 71, 72, 73], dtype=np.int32), np.array([9, 4, 6], dtype=np.int32), skipped=1)
    steps = made.fill(0, ends, arrays, 10, staging_address=STAGING)

    host = 1 << 30
    assert [(step.descriptors, step.moves) for step in steps] == [
        (slice(10, 14), slice(16, 19)),
        (slice(14, 16), slice(19, 20)),
    ]
    assert arrays.host[10:16].tolist() == [
        host + chunk * ROW_BYTES + offset for chunk in (9, 4, 6) for offset in (0, 160)
    ]
    assert arrays.gpu[10:16].tolist() == [STAGING + slot * 192 + offset for slot in (0, 1, 0) for offset in (0, 160)]
    assert arrays.sizes[10:16].tolist() == [64, 32] * 3
    moves = arrays.sizes[16:20]
    assert (moves & 0xFFFFFFFF).tolist() == [70, 71, 72, 73]
    assert (moves >> 32).tolist() == [1, 2, 3, 0]
    assert {int(value) for array in arrays for value in (*array[:10], *array[20:])} == {-1}
    assert steps[-1].moves.stop - 10 <= made.count_entries([4])
