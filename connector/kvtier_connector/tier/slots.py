# SPDX-License-Identifier: Apache-2.0
"""The rows of vLLM's primary (CPU) tier, which the engine's workers share with this process.

A row is one chunk: the bytes of all ranks side by side, padded to the page. It belongs to the disk tier only while a
job has claimed it.
"""

from __future__ import annotations

import numpy as np

from kvtier_connector.tier.workers import Bytes


class Slots:
    """Copies rows out of and into vLLM's memory; the copy runs without the GIL.

    Any thread may copy; the caller makes sure that the row is its own and that nobody copies after `release`.
    """

    def __init__(self, view: memoryview) -> None:
        """Keep vLLM's view: one row per slot."""
        if view.ndim != 2 or view.shape is None or view.strides is None or not view.c_contiguous:  # noqa: PLR2004 - a table
            raise ValueError("the primary tier must be a contiguous table of one row per chunk")
        self.count: int = view.shape[0]
        self.row_bytes: int = view.strides[0]
        self._bytes: Bytes | None = np.frombuffer(view.cast("B"), dtype=np.uint8)

    def copy_out(self, slot: int, target: Bytes) -> None:
        """Copy a row into a buffer."""
        np.copyto(target, self._part(slot, 0, self.row_bytes))

    def copy_in(self, slot: int, source: memoryview, offset: int = 0) -> None:
        """Copy a buffer into a row, from an offset on."""
        np.copyto(self._part(slot, offset, source.nbytes), source)

    def release(self) -> None:
        """Let go of vLLM's memory, which it unmaps next."""
        self._bytes = None

    def _part(self, slot: int, offset: int, size: int) -> Bytes:
        if self._bytes is None:
            raise ValueError("the primary tier was released")
        if offset + size > self.row_bytes:
            raise ValueError(f"{size} bytes at {offset} do not fit a row of {self.row_bytes}")
        start = slot * self.row_bytes + offset
        return self._bytes[start : start + size]
