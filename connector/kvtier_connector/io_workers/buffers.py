# SPDX-License-Identifier: Apache-2.0
"""Rows of the CPU tier as a worker addresses them: the engine's own memory, or its files mapped a second time.

A row holds one chunk: the bytes of all ranks side by side. Each mapped page takes eight bytes of page tables, so a
process maps a large CPU tier in windows, and only so many of them. To enter the pages of a row into the page table
takes longer than to copy it, so a worker does that ahead while it has no task.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from kvtier_connector.contract.engine import MOST_MAPPED_BYTES

_WINDOW_BYTES = 256 << 20
_MADV_POPULATE_READ = 22


class Region(NamedTuple):
    """A file that holds consecutive rows."""

    fd: int
    """Open for reading and writing while there are workers."""
    first_row: int
    rows: int


class OwnRows:
    """Rows in memory of this process. The owner of the memory must keep it until the copies are over."""

    is_lasting = False
    """Whether the memory stays readable until the next call even if the engine ends."""

    def __init__(self, view: memoryview) -> None:
        """Store the address of the rows without keeping a reference; the first dimension counts rows."""
        self.count, self.row_bytes = shape_of_rows(view)
        self._start = address_of(view.cast("B"))

    def address(self, row: int) -> int:
        """Return the address of a row."""
        if not 0 <= row < self.count:
            raise ValueError(f"there is no row {row}")
        return self._start + row * self.row_bytes

    def prepare(self) -> bool:
        """Return False: all pages are in the page table of this process."""
        return False


def shape_of_rows(view: memoryview) -> tuple[int, int]:
    """Return the number of rows of the CPU tier and the length of each: a chunk of all ranks, page by page.

    Raises:
        ValueError: The view is not a contiguous table of rows.
    """
    if view.ndim != 2 or view.shape is None or view.strides is None or not view.c_contiguous:  # noqa: PLR2004 - a table
        raise ValueError("the CPU tier must be a contiguous table of one row per chunk")
    return view.shape[0], view.strides[0]


class _Window(NamedTuple):
    memory: mmap.mmap
    first_row: int
    address: int
    """Address of the first row."""
    touched: set[int]
    """Rows whose pages are in the page table."""


class MappedRows:
    """Rows in files of another process, mapped window by window on use. One thread."""

    is_lasting = True

    def __init__(self, regions: Sequence[Region], row_bytes: int, *, most_bytes: int = MOST_MAPPED_BYTES) -> None:
        """Store the settings; nothing is mapped yet."""
        self._regions = regions
        self._row_bytes = row_bytes
        self._rows_of_window = max(1, _WINDOW_BYTES // row_bytes)
        self._most_windows = max(2, most_bytes // (self._rows_of_window * row_bytes))
        self._windows: dict[tuple[int, int], _Window] = {}
        """In the order in which they were mapped."""
        rows = sum(region.rows for region in regions)
        self._unprepared = iter(range(min(rows, self._most_windows * self._rows_of_window)))

    def address(self, row: int) -> int:
        """Return the address of a row, whose pages are in the page table then."""
        for region in self._regions:
            if 0 <= row - region.first_row < region.rows:
                break
        else:
            raise ValueError(f"there is no row {row}")
        name = (region.fd, (row - region.first_row) // self._rows_of_window)
        window = self._windows.get(name)
        if window is None:
            if len(self._windows) == self._most_windows:
                # Rows are used in turn, so those of the window that was mapped last are needed latest.
                self._windows.popitem()[1].memory.close()
            window = self._windows[name] = self._map(region, name[1])
        address = window.address + (row - window.first_row) * self._row_bytes
        if row not in window.touched:
            window.touched.add(row)
            # Its pages are entered into the page table at once: cheaper than one fault for each page.
            start = address - window.address
            begin = start - start % mmap.PAGESIZE
            # An older kernel does it fault by fault.
            with contextlib.suppress(OSError, ValueError):
                window.memory.madvise(_MADV_POPULATE_READ, begin, start + self._row_bytes - begin)
        return address

    def prepare(self) -> bool:
        """Enter the pages of one more row into the page table, in the order in which vLLM first gives rows away.

        False once there is none left, or as much is mapped as may be.
        """
        try:
            self.address(next(self._unprepared))
        except (StopIteration, OSError, ValueError):
            return False
        return True

    def _map(self, region: Region, number: int) -> _Window:
        first = number * self._rows_of_window
        count = min(self._rows_of_window, region.rows - first)
        start = first * self._row_bytes
        # A mapping begins at a page; the rows may not.
        slack = start % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(region.fd, count * self._row_bytes + slack, offset=start - slack)
        return _Window(memory, region.first_row + first, address_of(memoryview(memory)) + slack, set())


RowBuffers = OwnRows | MappedRows


def view_of(address: int, count: int) -> memoryview:
    """Return the bytes at an address; the caller ensures that they stay allocated."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
