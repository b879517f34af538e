# SPDX-License-Identifier: Apache-2.0
"""Real workers over a small CPU tier, and the helpers of their tests."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until
from worker_fs import GATE, WAITING

from kvtier_connector.io_workers import pool as pool_module
from kvtier_connector.io_workers import worker as worker_module
from kvtier_connector.io_workers.buffers import Region
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.tasks import Done, Lane, Task
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.blockstore import BlockStore, Hit
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.health import Breaker
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.permit import PERMIT_FILE, Permit, StorePermit, encode_permit

ROW_BYTES = 16384
ROWS = 32
HIT = Hit(HEADER_BYTES + ROW_BYTES)
FIRST_LOAD = 1_000_000
PATIENCE_SECONDS = 120.0
wait_until = functools.partial(until, seconds=PATIENCE_SECONDS, pause_seconds=0.002)


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest(), 0)


def payload(number: int) -> bytes:
    return hashlib.sha512(str(number).encode()).digest() * (ROW_BYTES // 64)


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def pass_deadlines(monkeypatch: pytest.MonkeyPatch, has_hung: Callable[[], bool], *, open_tasks: int = 1) -> None:
    """Have deadlines of workers on threads pass once something hangs and so many tasks are open, and not before.

    However busy the machine is, no other task is late then.
    """
    ahead: list[float] = []
    shifted = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead), sleep=time.sleep)
    for module in (pool_module, worker_module):
        monkeypatch.setattr(module, "time", shifted)
    tick = WorkerPool._tick

    def tick_late(self: WorkerPool, now: float) -> None:
        if not ahead and len(self._open) == open_tasks and has_hung():
            ahead.append(3600.0)
            now = shifted.monotonic()
        tick(self, now)

    monkeypatch.setattr(WorkerPool, "_tick", tick_late)


class PoolUnderTest:
    """A CPU tier of `ROWS` rows in shared memory, in two files, a volume, and workers between them."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        root: Path,
        *,
        workers: int = 2,
        first: int = 0,
        stuck_seconds: float = 60.0,
        file_system: str = "",
        retry_seconds: float = 60.0,
        max_bytes: int = 0,
        compression: str = "Off",
        on_threads: bool = False,
        fs: FileSystem = LOCAL,
    ) -> None:
        self.blocks = BlockStore(root)
        path = root.parent / PERMIT_FILE
        self.permit = StorePermit(str(path))
        self.permit.is_needed = max_bytes > 0
        for number in ("one", "two") if max_bytes else ():
            path.write_bytes(encode_permit(Permit(number, 3600.0, max_bytes)))
            self.permit.refresh()
        self.breaker = Breaker()
        self._fds = [os.memfd_create("cpu-tier") for _ in range(2)]
        half = ROWS // 2
        self.memories = []
        for fd in self._fds:
            os.ftruncate(fd, half * ROW_BYTES)
            self.memories.append(mmap.mmap(fd, half * ROW_BYTES))
        # Threads see the first file only, through the engine's own memory.
        rows = memoryview(self.memories[0]).cast("B", (half, ROW_BYTES))
        before = set(children(os.getpid()))
        self.workers = WorkerPool(
            PoolSettings(
                root=str(root),
                workers=workers,
                first_workers=first,
                deadline_seconds=stuck_seconds,
                file_system=file_system,
                retry_seconds=retry_seconds,
                compression=compression,
            ),
            permit=self.permit,
            breaker=self.breaker,
            rows=rows,
            regions=[Region(fd, first * half, half) for first, fd in enumerate(self._fds)],
            fs=FileSystem() if on_threads else fs,
        )
        rows.release()
        self.workers.start()
        self.processes = sorted(set(children(os.getpid())) - before)
        self.ended: dict[int, Done] = {}
        self._last_load = FIRST_LOAD

    def row(self, row: int) -> bytes:
        memory, row = self.memories[row >= ROWS // 2], row % (ROWS // 2)
        return memory[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def set_row(self, row: int, content: bytes) -> None:
        memory, row = self.memories[row >= ROWS // 2], row % (ROWS // 2)
        memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.blocks.put(key(number), memoryview(payload(number)))

    def load(self, first: int, *numbers: int, first_row: int = 0, lane: Lane = Lane.LOAD) -> None:
        """Ask for blocks, as tasks from a number on, into the rows from one on."""
        self.workers.submit(
            (first + index, Task(lane, key(number), first_row + index)) for index, number in enumerate(numbers)
        )

    def save(self, task: int, number: int, row: int) -> None:
        self.workers.submit([(task, Task(Lane.STORE, key(number), row))])

    def step(self) -> None:
        """Have one load of a block that is not there under way: only a pool with something to do is looked after."""
        if self._last_load in self.ended or self._last_load == FIRST_LOAD:
            self._last_load += 1
            self.load(self._last_load, FIRST_LOAD, first_row=ROWS // 2 - 1)
        self.collect()

    def collect(self) -> None:
        for done in self.workers.collect():
            assert done.task not in self.ended, "a task ended twice"
            self.ended[done.task] = done

    def wait_for(self, count: int) -> None:
        wait_until(lambda: self.collect() or len(self.ended) >= count, f"{count} tasks have ended")

    def loads(self, task: int, *, row: int = 0) -> bool:
        """Load block 1 into a row, and tell whether its bytes are there then."""
        self.load(task, 1, first_row=row)
        wait_until(lambda: self.collect() or task in self.ended, "the block is loaded")
        return self.row(row) == payload(1)

    def outcome(self, task: int) -> object:
        return self.ended[task].outcome

    def cancel(self, *tasks: int) -> None:
        """Give tasks up, and step until all of them have ended."""
        self.workers.cancel(tasks)
        wait_until(lambda: self.collect() or self.ended.keys() >= set(tasks), "the tasks are cancelled")

    def load_until_a_worker_hangs(self, lane: Lane = Lane.LOAD) -> object:
        """Load block 1 until a worker is found hanging in the read; return how that load ended.

        A worker of a busy machine may come too late to its task, which says nothing of the volume.
        """
        asked: list[int] = []
        seen: set[bool] = set()

        def has_hung() -> bool:
            if len(asked) == len(self.ended):
                asked.append(len(asked))
                self.load(asked[-1], 1, lane=lane)
            self.collect()
            seen.add(self.workers.is_stuck(lane))
            return True in seen and len(asked) == len(self.ended)

        wait_until(has_hung, "a worker hangs")
        return self.outcome(asked[-1])

    @property
    def has_processes(self) -> bool:
        return self.workers.counts().processes > 0

    def close(self) -> None:
        self.workers.close(5.0)
        for memory, fd in zip(self.memories, self._fds, strict=True):
            memory.close()
            os.close(fd)


class Pools:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: list[PoolUnderTest] = []

    def make(self, **options: Any) -> PoolUnderTest:
        pool = PoolUnderTest(self.directory / "volume", **options)
        self._made.append(pool)
        return pool

    def close(self) -> None:
        for pool in self._made:
            pool.close()


def shut(pools: Pools) -> Path:
    gate = pools.directory / GATE
    gate.touch()
    return gate


def is_waiting(pools: Pools) -> bool:
    return (pools.directory / WAITING).exists()


def count_waited(pools: Pools) -> int:
    return len((pools.directory / WAITING).read_bytes()) if is_waiting(pools) else 0
