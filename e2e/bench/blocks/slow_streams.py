# SPDX-License-Identifier: Apache-2.0
"""A file system with slow streams, as clouds have: more streams move more."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from kvtier_connector.store.fs import FileSystem

RATE: Final = "KVTIER_BENCH_STREAM_BYTES_PER_SECOND"
"""Variable of the environment: of one call. Not set, calls are as quick as ever."""


class SlowStreams(FileSystem):
    """Calls that read and write take as long as one stream does."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers."""
        began = time.monotonic()
        return _late(super().preadv(fd, buffers, offset), began)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write the buffers."""
        began = time.monotonic()
        return _late(super().pwritev(fd, buffers, offset), began)


def _late(count: int, began: float) -> int:
    if RATE in os.environ:
        time.sleep(max(0.0, began + count / float(os.environ[RATE]) - time.monotonic()))
    return count
