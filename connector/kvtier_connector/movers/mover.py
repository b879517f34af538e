# SPDX-License-Identifier: Apache-2.0
"""What one mover does, in a process of its own or, where that is not possible, on a thread of the engine's process.

It takes the token of a task from a pipe, moves a chunk between its row and its file, or looks for files, and sends an
answer back. It may hang for as long as the volume does; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier_connector import contract
from kvtier_connector.movers.board import NO_TICKET, TOKEN, Board, Current
from kvtier_connector.movers.rows import Rows, address_of, view_of
from kvtier_connector.movers.tasks import REPLY, Answer, Lane, Looked, Task, decode_task, encode_answer
from kvtier_connector.store.blockstore import BlockStore, StoreFault
from kvtier_connector.store.format import Fault
from kvtier_connector.store.fs import FileSystem, is_page_aligned

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
    compression: str = contract.COMPRESSION_OFF
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
