# SPDX-License-Identifier: Apache-2.0
"""The process of one mover, which ends with its engine.

Run as ``python -m kvtier_connector.io_workers.worker <settings as JSON>``. It has one thread, so it can hang on a
volume without holding up anybody; its engine kills it then. Its work is less urgent than the engine's.

What one mover does, in a process of its own or, where that is not possible, on a thread of the engine's process.

It takes the token of a task from a pipe, moves a chunk between its row and its file, or looks for files, and sends an
answer back. It may hang for as long as the volume does; nobody waits for it.

The system calls of a mover that is a process of its own: it reads files in memory, and closes files, in its own way.

A close is a round trip to a network volume, and of the three that a block takes the one whose answer nobody needs: the
next file is opened meanwhile.

Many processes that read files in memory wait for each other: the first `read` of a page that was written moves it from
one of the kernel's lists to another under one lock, and with sixteen readers on a tmpfs that takes longer than the
copy. A mapping advised to be read once leaves the lists alone, and saves a copy. A file that is cut short while it is
being read ends the process: a mover may, its engine counts a fault and starts another.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvtier_connector.contract import engine
from kvtier_connector.io_workers.buffers import MappedRows, Region, Rows, address_of, view_of
from kvtier_connector.io_workers.task_table import NO_TICKET, TOKEN, Board, Current
from kvtier_connector.io_workers.tasks import REPLY, Answer, Lane, Looked, Task, decode_task, encode_answer
from kvtier_connector.store.blockstore import BlockStore, StoreFault
from kvtier_connector.store.fs import FileSystem, is_in_memory, is_page_aligned
from kvtier_connector.store.header import Fault

logger = logging.getLogger("vllm.kvtier.movers")

_IDLE_MILLISECONDS = 1000
"""How often a mover without work looks whether it is still wanted."""
_BARRED_MILLISECONDS = 20
"""How often one that may not store looks whether it may."""


@dataclass(frozen=True, kw_only=True)
class MoversSettings:
    """What the movers work on, and how many they may be."""

    root: str
    direct: bool | None = None
    keys_dir: str = ""
    compression: str = engine.COMPRESSION_OFF
    """As for `BlockStore`."""
    processes: int
    """At most; 0 leaves it to threads."""
    first_processes: int = 0
    """So many are started, and more as they help; 0 starts all."""
    threads: int
    """That take over where processes cannot live."""
    deadline_seconds: float
    """A mover that works at one chunk for longer hangs: the task is late, and the mover is killed."""
    probe_seconds: float = 2.0
    """The same of a probe, which is a few system calls."""
    retry_seconds: float = 30.0
    """After how long processes that were given up are tried again, for the first time."""
    file_system: str = ""
    """``module:class`` of the system calls of processes, for tests; empty for the real ones."""

    def open_volume(self, fs: FileSystem) -> BlockStore:
        """Return the volume as a mover uses it: without a limit, which is the engine's affair."""
        return BlockStore(
            Path(self.root),
            fs=fs.beneath(self.root),
            direct=self.direct,
            keys_dir=self.keys_dir,
            compression=self.compression,
        )


class Permit(NamedTuple):
    """What the engine lets a mover do."""

    may_go_on: bool
    may_store: bool


class Mover:
    """One mover; `run` is its thread's."""

    def __init__(  # noqa: PLR0913 - what a mover works with
        self,
        number: int,
        *,
        board: Board,
        rows: Rows,
        row_bytes: int,
        store: BlockStore,
        pipes: Sequence[int],
        replies: int,
        permit: Callable[[], Permit],
    ) -> None:
        """Store the parts.

        Args:
            number: Its own, on the board.
            board: Says which tasks are still wanted.
            rows: Where the chunks are.
            row_bytes: Length of each.
            store: The volume, of `MoversSettings.open_volume`.
            pipes: Where tokens of each lane come from.
            replies: Where answers go.
            permit: Asked before each task.
        """
        self._number = number
        self._board = board
        self._rows = rows
        self._row_bytes = row_bytes
        self._store = store
        self._pipes = pipes
        self._replies = replies
        self._permit = permit
        self._may_store = True
        self._all, self._urgent = select.poll(), select.poll()
        for lane, pipe in zip(Lane, pipes, strict=True):
            self._all.register(pipe, select.POLLIN)
            if lane is not Lane.STORE:
                self._urgent.register(pipe, select.POLLIN)
        self._room = select.poll()
        self._room.register(replies, select.POLLOUT)
        staging = mmap.mmap(-1, row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            staging.madvise(mmap.MADV_HUGEPAGE)
        self._staging = memoryview(staging)
        self._staging_address = address_of(self._staging)

    def run(self) -> None:
        """Work until the engine closes the pipes, or does not want it any more."""
        self._rest()
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                token = self._next_token()
                if token:
                    self._work(*TOKEN.unpack(token))
        self._board.set_current(self._number, Current(0, NO_TICKET, 0.0))

    def _next_token(self) -> bytes:
        """Take the most urgent token there is, or wait a while for one; raise EOFError at the end."""
        poll, wait = (self._all, _IDLE_MILLISECONDS) if self._may_store else (self._urgent, _BARRED_MILLISECONDS)
        ready = dict(poll.poll(wait))
        may_go_on, self._may_store = self._permit()
        if not may_go_on:
            raise EOFError
        for pipe in self._pipes if self._may_store else self._pipes[: Lane.STORE]:
            if pipe in ready:
                try:
                    token = os.read(pipe, TOKEN.size)
                except BlockingIOError:
                    # Another one was quicker.
                    continue
                if not token:
                    raise EOFError
                return token
        return b""

    def _work(self, entry: int, ticket: int) -> None:
        started = time.monotonic()
        self._board.set_current(self._number, Current(entry, ticket, started))
        answer = self._do(entry, ticket) if self._board.ticket(entry) == ticket else None
        code, number = encode_answer(answer)
        self._rest()
        self._reply(REPLY.pack(ticket, code, time.monotonic() - started, number))

    def _rest(self) -> None:
        """Say that it has nothing to do, which also says that it is ready."""
        self._board.set_current(self._number, Current(0, NO_TICKET, time.monotonic()))

    def _reply(self, answer: bytes) -> None:
        """Send an answer; where a host that is short of pipes gave a small one, wait until the engine reads it."""
        while True:
            try:
                os.write(self._replies, answer)
            except BlockingIOError:
                self._room.poll()
            else:
                return

    def _do(self, entry: int, ticket: int) -> Answer | None:
        try:
            task, active_key = decode_task(self._board.task(entry))
        except (ValueError, EOFError, TypeError):
            # It was taken back and the entry given to another while it was read.
            return None
        if self._board.ticket(entry) != ticket:
            # So was this one, and it reads like a task all the same.
            return None
        try:
            if task.lane is Lane.PROBE:
                return self._look(task)
            if task.lane is Lane.STORE:
                return self._save(task, entry, ticket, active_key)
            return self._load(task, entry, ticket)
        except Exception:
            # The edge of the thread: a store reports what it expects by itself, so this is a defect of ours.
            logger.exception("A mover failed at a task")
            return StoreFault.IO if task.lane is Lane.STORE else Fault.IO

    def _look(self, task: Task) -> Answer:
        present: list[bool] = []
        for key in task.keys:
            found = self._store.look_up(key)
            if isinstance(found, Fault):
                return Looked(tuple(present)) if present else found
            present.append(found)
            if task.is_prefix and not found:
                break
        return Looked(tuple(present))

    def _load(self, task: Task, entry: int, ticket: int) -> Answer | None:
        board, number, row_bytes = self._board, self._number, self._row_bytes
        row = self._rows.address(task.row)

        def take(offset: int, piece: memoryview) -> bool:
            if offset + piece.nbytes > row_bytes:
                raise ValueError(f"{piece.nbytes} bytes at {offset} do not fit a row of {row_bytes}")
            source = address_of(piece)
            board.lock(number)
            try:
                if board.ticket(entry) != ticket:
                    return False
                ctypes.memmove(row + offset, source, piece.nbytes)
            finally:
                board.unlock(number)
            return True

        return self._store.stream(task.keys[0], self._staging, take)

    def _save(self, task: Task, entry: int, ticket: int, active_key: str) -> Answer | None:
        address = self._rows.address(task.row)
        if self._store.keyring is None and self._rows.is_lasting:
            row = view_of(address, self._row_bytes)
            if is_page_aligned(row):
                return self._save_from(row, task, entry, ticket)
        self._board.lock(self._number)
        try:
            if self._board.ticket(entry) != ticket:
                return None
            ctypes.memmove(self._staging_address, address, self._row_bytes)
        finally:
            self._board.unlock(self._number)
        if (keyring := self._store.keyring) is not None:
            keyring.activate(active_key)
        return self._store.put(task.keys[0], self._staging, task.lineage, is_scratch=True, queued=task.queued)

    def _save_from(self, row: memoryview, task: Task, entry: int, ticket: int) -> Answer | None:
        """Write a row from where it is; a copy would cost as much of a processor as a fast volume does.

        No lock is held for as long as a volume takes, so the row may be given away meanwhile: then the file,
        which has no name yet, gets none.
        """

        def is_ours() -> bool:
            return self._board.ticket(entry) == ticket

        outcome = self._store.put(task.keys[0], row, task.lineage, is_wanted=is_ours, queued=task.queued)
        return None if isinstance(outcome, StoreFault) and not is_ours() else outcome


_SLOW_SECONDS = 0.0003
"""A close that takes longer is worth another thread's waking up."""
_MOST_WAITING = 2
"""Whoever reads waits itself while so many wait: then the volume, or this machine, does not keep up."""
_MOST_MAPPED_BYTES = 4 << 30
"""No block is as long: a longer file, which may have no bytes at all, is read as elsewhere."""


class ReleasingFs(FileSystem):
    """The real system calls. One thread, besides its own, which closes."""

    def __init__(self) -> None:
        """Start without knowing how long a close takes."""
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._is_started = False
        self._is_slow = False
        """Whether the last close was; set by whichever thread that was, and only speed is at stake."""

    def release(self, fd: int) -> None:
        """Close a file that was only read: at once where that is quick, behind the caller's back where it is not."""
        if self._is_slow and self._waiting.qsize() < _MOST_WAITING and self._can_wait():
            self._waiting.put(fd)
        else:
            self._close(fd)

    def _can_wait(self) -> bool:
        if not self._is_started:
            # A host that has no room for another thread goes without.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._close_all, name="kvtier-close", daemon=True).start()
                self._is_started = True
        return self._is_started

    def _close_all(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self._close(self._waiting.get())

    def _close(self, fd: int) -> None:
        began = time.monotonic()
        try:
            self.close(fd)
        finally:
            self._is_slow = time.monotonic() - began > _SLOW_SECONDS


class MappingFs(ReleasingFs):
    """The real system calls, and mappings of files in memory. One thread, besides the one that closes."""

    def __init__(self) -> None:
        """Start without knowing any volume."""
        super().__init__()
        self._in_memory: dict[int, bool] = {}

    def map(self, fd: int) -> memoryview | None:
        """Map a file that lies in memory; the mapping ends with the last view of it."""
        status = os.fstat(fd)
        is_ours = self._in_memory.get(status.st_dev)
        if is_ours is None:
            is_ours = self._in_memory[status.st_dev] = is_in_memory(status.st_dev)
        if not is_ours or not 0 < status.st_size <= _MOST_MAPPED_BYTES:
            return None
        # Writable, and private to this process, only so that its address can be asked for.
        memory = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY)
        memory.madvise(mmap.MADV_SEQUENTIAL)
        return memoryview(memory)


_PACKAGE = str(Path(__file__).parents[2])
_PR_SET_PDEATHSIG = 1
_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""Copies into the CPU tier of 64 KiB and more bypass the processor's caches: it is the GPU that reads them next. That
saves reading each line before it is written, a third of the memory traffic. Other C libraries ignore it."""
UNWANTED = 3
"""How a mover ends that the engine has told to."""
_NICENESS = 5
"""The engine's threads get three times the processor time of a mover where both want it."""


@dataclass(frozen=True, kw_only=True)
class MoverSettings:
    """What a mover is told; numbers of descriptors are those it inherits."""

    mover: int
    """Its number on the board."""
    parent: int
    """Process number of the engine."""
    board: int
    regions: tuple[Region, ...]
    """The files of the CPU tier."""
    row_bytes: int
    pipes: tuple[int, ...]
    """Where tokens of each lane come from."""
    replies: int
    """Where answers go."""
    settings: MoversSettings

    def encode(self) -> str:
        """Return what `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> MoverSettings:
        """Read what `encode` returned."""
        fields: dict[str, Any] = json.loads(text)
        fields["regions"] = tuple(Region(*region) for region in fields["regions"])
        fields["pipes"] = tuple(fields["pipes"])
        fields["settings"] = MoversSettings(**fields["settings"])
        return cls(**fields)


def start_process(
    module: str, settings: str, descriptors: Sequence[int] = (), *, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a module of this package with its settings; raise OSError where the host has no room for it."""
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
    """Ask the system to kill this process when its parent ends, should the parent end without closing the pipes.

    What goes to all processes at once goes to the parent too, which ends this one when it has finished with it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended before we asked.
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def give_way() -> None:
    """Let the engine go first; a sandbox may forbid to say so."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # It never interrupts another thread when it wakes up.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(settings: MoverSettings) -> None:
    """Run a mover."""
    die_with(settings.parent)
    give_way()
    # Directories are the group's, see FileSystem.mkdir: they have their mode at once, which saves two round trips each.
    os.umask(0o007)
    number, board = settings.mover, Board(settings.board)

    def permit() -> Permit:
        wanted, storing = board.head()
        return Permit(number < wanted, number < storing)

    store = settings.settings.open_volume(_file_system(settings.settings.file_system))
    # A purge from before this process is told from a later one, and a volume that hangs holds up no task.
    threading.Thread(target=store.learn_purges, name="kvtier-purges", daemon=True).start()
    Mover(
        number,
        board=board,
        rows=MappedRows(settings.regions, settings.row_bytes),
        row_bytes=settings.row_bytes,
        store=store,
        pipes=settings.pipes,
        replies=settings.replies,
        permit=permit,
    ).run()
    if number >= board.head().wanted:
        sys.exit(UNWANTED)


def _file_system(name: str) -> FileSystem:
    if not name:
        return MappingFs()
    module, _, attribute = name.partition(":")
    made: FileSystem = getattr(importlib.import_module(module), attribute)()
    return made


if __name__ == "__main__":
    main(MoverSettings.decode(sys.argv[1]))
