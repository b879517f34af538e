# SPDX-License-Identifier: Apache-2.0
"""Slows a volume down on purpose: the I/O processes of an engine share one rate at which they read blocks.

A file has the rate, which may change while they serve. The environment names the file, and vLLM loads the plugin in
each of its processes. Other calls are as quick as ever.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store.header import HEADER_BYTES

FILE: Final = "KVTIER_BENCH_THROTTLE_FILE"
"""Names the file: the time until which the volume is busy by the monotonic clock, and bytes a second."""
_LAG_SECONDS = 0.005
"""A sleep ends late; so much is caught up."""
_BUSY_UNTIL, _RATE = 0, 1
"""Places in the file, of 8 bytes each."""
_HANG_SECONDS = 0.05


class Bucket:
    """A rate that processes of one host share. A process may have many, each of one thread."""

    def __init__(self, path: Path) -> None:
        """Open the file, and make it if it is not there: with a rate of 0."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o660)
        os.ftruncate(self._file, 2 * 8)
        self._shared = memoryview(mmap.mmap(self._file, 2 * 8)).cast("d")

    @property
    def rate(self) -> float:
        """Bytes a second of all processes together; infinite for a volume as quick as it is, 0 for one that hangs."""
        return self._shared[_RATE]

    @rate.setter
    def rate(self, bytes_per_second: float) -> None:
        self._shared[_RATE] = bytes_per_second

    def take(self, count: int) -> None:
        """Wait for as long as the volume takes to read so many bytes after what others asked for."""
        while not (rate := self.rate):
            time.sleep(_HANG_SECONDS)
        if math.isinf(rate):
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            now = time.monotonic()
            until = max(self._shared[_BUSY_UNTIL], now - _LAG_SECONDS) + count / rate
            self._shared[_BUSY_UNTIL] = until
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, until - now))


class ThrottledFileSystem(WorkerFileSystem):
    """The file system of an I/O process whose blocks come at the rate of the bucket."""

    def __init__(self) -> None:
        """Open the bucket."""
        super().__init__()
        self._bucket = Bucket(Path(os.environ[FILE]))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, and take the time of a block's bytes; documents and headers alone are free."""
        count = super().preadv(fd, buffers, offset)
        if count > HEADER_BYTES:
            self._bucket.take(count)
        return count

    def map(self, fd: int) -> memoryview | None:
        """Map a file after the time that reading it takes."""
        mapped = super().map(fd)
        if mapped is not None:
            self._bucket.take(mapped.nbytes)
        return mapped


def slow_down() -> None:
    """Give the I/O processes of this engine the slow file system, where the environment names a bucket."""
    if FILE in os.environ:
        from kvtier_connector.cascade import attach

        usual = attach._pool_settings  # noqa: SLF001 - no setting of users
        name = f"{__name__}:{ThrottledFileSystem.__name__}"
        attach._pool_settings = lambda config: dataclasses.replace(usual(config), file_system=name)  # noqa: SLF001 - the same
