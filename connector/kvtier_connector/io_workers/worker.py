# SPDX-License-Identifier: Apache-2.0
"""An I/O worker: takes tasks from pipes, moves chunks between rows and files, and sends answers back.

Run as ``python -m kvtier_connector.io_workers.worker SETTINGS``, with the settings as JSON. The process works at one
task at a time and may hang in the volume as long as the volume hangs; its supervisor kills it then. It ends with its
engine, and has a lower priority than the engine. Tests run the same `Worker` on threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import pkgutil
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier_connector.contract import engine as contract
from kvtier_connector.io_workers.buffers import MappedRows, Region, RowBuffers, address_of, view_of
from kvtier_connector.io_workers.task_table import NO_TICKET, Current, TaskTable
from kvtier_connector.io_workers.tasks import REPLY, TASK_BYTES, Answer, Lane, TaskMessage, decode_task, encode_answer
from kvtier_connector.store.blockstore import BlockStore, StoreFault
from kvtier_connector.store.fs import FileSystem, is_page_aligned
from kvtier_connector.store.header import Fault
from kvtier_connector.store.mounts import is_in_memory

logger = logging.getLogger("vllm.kvtier.io_workers")

_BARRED_MILLISECONDS = 20
"""How often a worker that may not store checks whether it may."""
_PREPARING_MILLISECONDS = 5
"""A worker that has no task for so long prepares another row."""
_MOST_MAPPED_FILE_BYTES = 4 << 30
"""No block is longer. A longer file may have no bytes at all, and is read instead of mapped."""

_PACKAGE = str(Path(__file__).parents[2])
_PR_SET_PDEATHSIG = 1
_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""Copies of 64 KiB and more bypass the processor's caches, since the GPU reads the rows next.

A cache line is then not read before it is written, which saves a third of the memory traffic. Other C libraries
ignore the setting.
"""
_NICENESS = 5
"""The engine's threads get three times the processor time of a worker where both want it."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """The volume of the workers, their number and their deadlines."""

    root: str
    direct: bool | None = None
    keys_dir: str = ""
    compression: str = contract.COMPRESSION_OFF
    """`root` to `compression` are arguments of `BlockStore`."""
    workers: int
    """Most workers."""
    first_workers: int = 0
    """Number of workers at first; more are started where the volume answers slowly. 0 starts all."""
    deadline_seconds: float
    """A worker that spends longer on one chunk hangs: its task ends late, and the worker is killed."""
    retry_seconds: float = 30.0
    """First delay before processes that failed are started again."""
    file_system: str = ""
    """``module:class`` of the file system of worker processes, for tests; empty for the real one."""

    def open_volume(self, fs: FileSystem) -> BlockStore:
        """Return the volume as a worker uses it: without a limit of bytes, which the engine observes."""
        return BlockStore(
            Path(self.root),
            fs=fs.rooted(self.root),
            direct=self.direct,
            keys_dir=self.keys_dir,
            compression=self.compression,
        )


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Arguments of a worker process. Descriptors are inherited from the engine."""

    worker: int
    """Number of the worker in the task table."""
    parent: int
    """Process number of the engine."""
    table: int
    """Descriptor of the task table."""
    regions: tuple[Region, ...]
    """Files of the CPU tier."""
    row_bytes: int
    pipes: tuple[int, ...]
    """Descriptors for the tasks of each lane."""
    replies: int
    """Descriptor for answers."""
    pool: PoolSettings

    def encode(self) -> str:
        """Return the text that `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> WorkerSettings:
        """Return the settings that `encode` encoded."""
        fields: dict[str, Any] = json.loads(text)
        fields["regions"] = tuple(Region(*region) for region in fields["regions"])
        fields["pipes"] = tuple(fields["pipes"])
        fields["pool"] = PoolSettings(**fields["pool"])
        return cls(**fields)


class Worker:
    """One worker; `run` is its thread's."""

    def __init__(self, settings: WorkerSettings, *, table: TaskTable, rows: RowBuffers, store: BlockStore) -> None:
        """Store the parts; `store` is as `PoolSettings.open_volume` returns it."""
        self._number, self._row_bytes = settings.worker, settings.row_bytes
        self._table, self._rows, self._store = table, rows, store
        self._pipes, self._replies = settings.pipes, settings.replies
        self._is_preparing = True
        self._lanes: tuple[int, ...] = self._pipes
        """Pipes from which it may take tasks at present."""
        self._room = select.poll()
        self._room.register(self._replies, select.POLLOUT)
        staging = mmap.mmap(-1, self._row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            staging.madvise(mmap.MADV_HUGEPAGE)
        self._staging = memoryview(staging)
        self._staging_address = address_of(self._staging)

    def run(self) -> None:
        """Work until the engine closes the pipes."""
        self._rest()
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                if message := self._next_message():
                    self._work(decode_task(message))
        self._table.set_current(self._number, Current(NO_TICKET, 0.0))

    def _next_message(self) -> bytes:
        """Return the most urgent message, empty if none came for a while; raise EOFError at the end."""
        poll = select.poll()
        for pipe in self._lanes:
            poll.register(pipe, select.POLLIN)
        wait = None if self._lanes == self._pipes else _BARRED_MILLISECONDS
        ready = dict(poll.poll(_PREPARING_MILLISECONDS if self._is_preparing else wait))
        if not ready and self._is_preparing:
            self._is_preparing = self._rows.prepare()
        may_read = self._number >= self._table.reading_from
        may_store = self._number < self._table.storing
        self._lanes = self._pipes[0 if may_read else Lane.STORE : None if may_store else Lane.STORE]
        for pipe in self._lanes:
            if pipe in ready:
                try:
                    message = os.read(pipe, TASK_BYTES)
                except BlockingIOError:
                    # Another worker was faster.
                    continue
                if not message:
                    raise EOFError
                return message
        return b""

    def _work(self, message: TaskMessage) -> None:
        started, ticket = time.monotonic(), message.ticket
        self._table.set_current(self._number, Current(ticket, started))
        code, number = encode_answer(self._do(message) if self._table.ticket(message.entry) == ticket else None)
        self._rest()
        ended = time.monotonic()
        self._reply(REPLY.pack(ticket, code, ended - started, ended, number))

    def _rest(self) -> None:
        """Show that the worker is idle, and ready."""
        self._table.set_current(self._number, Current(NO_TICKET, time.monotonic()))

    def _reply(self, answer: bytes) -> None:
        """Send an answer; wait until the engine has read earlier ones if the pipe is full."""
        while True:
            try:
                os.write(self._replies, answer)
            except BlockingIOError:
                self._room.poll()
            else:
                return

    def _do(self, message: TaskMessage) -> Answer | None:
        is_store = message.task.lane is Lane.STORE
        try:
            return self._save(message) if is_store else self._load(message)
        except Exception:
            # The edge of the thread. The store returns expected faults as values, so this is a defect.
            logger.exception("An I/O worker failed at a task")
            return StoreFault.IO if is_store else Fault.IO

    def _load(self, message: TaskMessage) -> Answer | None:
        entry, ticket, task, _ = message
        table, number, row_bytes = self._table, self._number, self._row_bytes
        row = self._rows.address(task.row)

        def take(offset: int, piece: memoryview) -> bool:
            if offset + piece.nbytes > row_bytes:
                raise ValueError(f"{piece.nbytes} bytes at {offset} do not fit a row of {row_bytes}")
            source = address_of(piece)
            table.lock(number)
            try:
                if table.ticket(entry) != ticket:
                    return False
                ctypes.memmove(row + offset, source, piece.nbytes)
            finally:
                table.unlock(number)
            return True

        return self._store.stream(task.key, self._staging, take)

    def _save(self, message: TaskMessage) -> Answer | None:
        entry, ticket, task, active_key = message
        address = self._rows.address(task.row)
        if self._store.keyring is None and self._rows.is_lasting:
            row = view_of(address, self._row_bytes)
            if is_page_aligned(row):
                return self._save_in_place(row, message)
        self._table.lock(self._number)
        try:
            if self._table.ticket(entry) != ticket:
                return None
            ctypes.memmove(self._staging_address, address, self._row_bytes)
        finally:
            self._table.unlock(self._number)
        if (keyring := self._store.keyring) is not None:
            keyring.active_name = active_key
        return self._store.put(task.key, self._staging, task.lineage, is_scratch=True, queued=task.queued)

    def _save_in_place(self, row: memoryview, message: TaskMessage) -> Answer | None:
        """Write a row without a copy, which would cost as much processor time as a fast volume does.

        The lock is not held while the volume writes, so the row may be given away meanwhile. The file has no name yet
        then, and gets none.
        """
        entry, ticket, task, _ = message

        def is_wanted() -> bool:
            return self._table.ticket(entry) == ticket

        outcome = self._store.put(task.key, row, task.lineage, is_wanted=is_wanted, queued=task.queued)
        return None if isinstance(outcome, StoreFault) and not is_wanted() else outcome


class WorkerFileSystem(FileSystem):
    """The file system of a worker process, which maps files that lie in memory.

    Processes that read files in memory wait for each other. The first `read` of a page that was written moves the page
    between two lists of the kernel, under one lock. With sixteen readers on a tmpfs that takes longer than the copy. A
    mapping that is advised to be read once leaves the lists alone, and saves a copy. A file that is cut short during
    the read ends the process; the engine counts a fault and starts another.
    """

    def __init__(self) -> None:
        """Start without measurements."""
        self._in_memory: dict[int, bool] = {}

    def map(self, fd: int) -> memoryview | None:
        """Map a file that lies in memory, until the last view of it is gone; return None for other files."""
        status = os.fstat(fd)
        is_mapped = self._in_memory.get(status.st_dev)
        if is_mapped is None:
            is_mapped = self._in_memory[status.st_dev] = is_in_memory(status.st_dev)
        if not is_mapped or not 0 < status.st_size <= _MOST_MAPPED_FILE_BYTES:
            return None
        # Writable and private to this process, since only the address of writable memory can be taken.
        memory = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY)
        memory.madvise(mmap.MADV_SEQUENTIAL)
        return memoryview(memory)


def start_process(
    module: str, settings: str, descriptors: Sequence[int] = (), *, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a module of this package with its settings; raise OSError where no process can be started."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([_PACKAGE, *(path for path in sys.path if path)])
    tunables = environment.get("GLIBC_TUNABLES", "")
    if _TUNABLES.partition("=")[0] not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_TUNABLES}" if tunables else _TUNABLES
    return subprocess.Popen(
        [sys.executable, "-m", module, settings],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        pass_fds=descriptors,
        env=environment,
    )


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, in case the parent ends without closing the pipes.

    Signals to the process group are ignored: they reach the parent, too, which ends this process when it is done.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the call.
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def lower_priority() -> None:
    """Let the engine run first, unless a sandbox forbids to set priorities."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # A batch process never interrupts another thread when it wakes up.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(settings: WorkerSettings) -> None:
    """Run a worker."""
    die_with(settings.parent)
    lower_priority()
    # Directories belong to the group, see FileSystem.mkdir. With this mask they get their mode without two more calls.
    os.umask(0o007)
    table = TaskTable(settings.table)
    store = settings.pool.open_volume(file_system(settings.pool.file_system))
    # Read here, so that earlier purges are told from later ones; on a thread, since the volume may hang.
    threading.Thread(target=store.learn_purges, name="kvtier-purges", daemon=True).start()
    Worker(settings, table=table, rows=MappedRows(settings.regions, settings.row_bytes), store=store).run()


def file_system(name: str) -> FileSystem:
    """Return the file system of a worker process: ``module:class``, or empty for the real one."""
    made: FileSystem = pkgutil.resolve_name(name)() if name else WorkerFileSystem()
    return made


if __name__ == "__main__":
    main(WorkerSettings.decode(sys.argv[1]))
