# SPDX-License-Identifier: Apache-2.0
"""System calls that go wrong inside a worker's process; files beside the volume say when."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from kvtier_connector.store.fs import FileSystem

GATE = "gate"
WAITING = "waiting"


class GatedFs(FileSystem):
    """Reads of a payload wait while the gate is there, as on a dead network mount."""

    def __init__(self) -> None:
        self._settings = json.loads(sys.argv[1])
        self._beside = Path(self._settings["pool"]["root"]).parent

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.wait()
        return super().preadv(fd, buffers, offset)

    def wait(self) -> None:
        if (self._beside / GATE).exists():
            with (self._beside / WAITING).open("ab") as file:
                file.write(b".")
        while (self._beside / GATE).exists():
            threading.Event().wait(0.005)


class GatedWritesFs(GatedFs):
    """Writes wait while the gate is there, half done."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return FileSystem.preadv(self, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers) == 1:
            return super().pwritev(fd, buffers, offset)
        done = super().pwritev(fd, buffers[:1], offset)
        self.wait()
        return done


class HoldingFs(GatedFs):
    """Reads wait with the worker's lock held, as if a copy took that long."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        fcntl.lockf(self._settings["table"], fcntl.LOCK_EX, 1, self._settings["worker"])
        self.wait()
        fcntl.lockf(self._settings["table"], fcntl.LOCK_UN, 1, self._settings["worker"])
        return FileSystem.preadv(self, fd, buffers, offset)


class DyingFs(GatedFs):
    """The process is killed in the middle of a read while the gate is there, and takes it away."""

    def wait(self) -> None:
        try:
            (self._beside / GATE).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class DyingWithATaskFs(DyingFs):
    """While the gate is there, the process is killed when it has taken a task and not said so yet."""

    def __init__(self) -> None:
        super().__init__()
        worker = sys.modules["__main__"]
        decode = worker.decode_task

        def decode_or_die(data: bytes) -> object:
            DyingFs.wait(self)
            return decode(data)

        worker.decode_task = decode_or_die

    def wait(self) -> None:
        pass


class DyingWhileShutFs(GatedFs):
    """Every read kills the process while the gate is there."""

    def wait(self) -> None:
        if (self._beside / GATE).exists():
            os.kill(os.getpid(), signal.SIGKILL)


class SlowFs(FileSystem):
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        threading.Event().wait(0.1)
        return super().preadv(fd, buffers, offset)
