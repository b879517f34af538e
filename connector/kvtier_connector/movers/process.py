# SPDX-License-Identifier: Apache-2.0
"""The process of one mover: takes tasks from a pipe, moves blocks, sends their tokens back, ends with its engine.

Run as ``python -m kvtier_connector.movers.process <settings as JSON>``. It has one thread, so it can hang on a volume
without holding up anybody; whoever started it kills it then.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier_connector.movers.board import NO_TICKET, TOKEN, Board, Current, Result
from kvtier_connector.movers.mapped import MappingFs
from kvtier_connector.movers.tasks import Task, decode_task, encode_outcome
from kvtier_connector.store.blockstore import BlockStore, Outcome, StoreOutcome
from kvtier_connector.store.fs import FileSystem

_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, kw_only=True)
class MoverSettings:
    """What a mover is told; numbers of descriptors are those it inherits."""

    mover: int
    """Its number on the board."""
    parent: int
    """Process number of the engine."""
    board: int
    region: int
    """The file of the CPU tier."""
    region_offset: int
    region_bytes: int
    row_bytes: int
    pipes: tuple[int, ...]
    """Where tokens come from, the most urgent first."""
    done: int
    """Where tokens go when their task has ended."""
    rows: tuple[int, int, int]
    """Which rows come this way: first row, rows in a run, step from run to run."""
    root: str
    direct: bool | None
    keys_dir: str = ""
    file_system: str = ""
    """``module:class`` of the system calls, for tests; empty for the real ones."""

    def encode(self) -> str:
        """Return what `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> MoverSettings:
        """Read what `encode` returned."""
        fields: dict[str, Any] = json.loads(text)
        fields.update({name: tuple(value) for name, value in fields.items() if isinstance(value, list)})
        return cls(**fields)


class Rows:
    """The rows of the CPU tier in this process, and the buffer that stands between them and the volume."""

    def __init__(self, settings: MoverSettings) -> None:
        """Map both."""
        self._settings = settings
        self._memory = mmap.mmap(settings.region, settings.region_offset + settings.region_bytes)
        self._start = _address(memoryview(self._memory)) + settings.region_offset
        staging = mmap.mmap(-1, settings.row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            staging.madvise(mmap.MADV_HUGEPAGE)
        self.staging = memoryview(staging)
        first, run, step = settings.rows
        count = settings.region_bytes // settings.row_bytes
        self._unmapped = iter([row for start in range(first, count, step) for row in range(start, start + run)])

    def copy_in(self, slot: int, offset: int, piece: memoryview) -> None:
        """Copy a piece of a block into its row."""
        if offset + piece.nbytes > self._settings.row_bytes:
            raise ValueError(f"{piece.nbytes} bytes at {offset} do not fit a row of {self._settings.row_bytes}")
        ctypes.memmove(self._row(slot) + offset, _address(piece), piece.nbytes)

    def copy_out(self, slot: int) -> None:
        """Copy a row into the buffer."""
        ctypes.memmove(_address(self.staging), self._row(slot), self._settings.row_bytes)

    def map_next(self) -> bool:
        """Enter one more row into this process's page table, so that its first copy need not; False at the end."""
        row = next(self._unmapped, None)
        if row is None:
            return False
        start = self._settings.region_offset + row * self._settings.row_bytes
        length = min(self._settings.row_bytes, len(self._memory) - start)
        begin = start - start % mmap.PAGESIZE
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE, begin, start + length - begin)
        except (OSError, ValueError):
            # An older kernel: the first copy maps it.
            return False
        return True

    def _row(self, slot: int) -> int:
        if not 0 <= slot < self._settings.region_bytes // self._settings.row_bytes:
            raise ValueError(f"there is no row {slot}")
        return self._start + slot * self._settings.row_bytes


class Mover:
    """The loop of the process."""

    def __init__(self, settings: MoverSettings) -> None:
        """Open everything."""
        self._settings = settings
        self._board = Board(settings.board)
        self._rows = Rows(settings)
        self._store = BlockStore(
            Path(settings.root),
            fs=_file_system(settings.file_system),
            direct=settings.direct,
            keys_dir=settings.keys_dir,
        )
        self._poll = select.poll()
        for pipe in settings.pipes:
            self._poll.register(pipe, select.POLLIN)
        self._room = select.poll()
        self._room.register(settings.done, select.POLLOUT)

    def run(self) -> None:
        """Work until the engine closes the pipes."""
        self._rest()
        is_mapping = True
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                token = self._next_token()
                if token is not None:
                    self._work(*TOKEN.unpack(token))
                    self._return(token)
                elif is_mapping:
                    is_mapping = self._rows.map_next()
                else:
                    self._poll.poll()

    def _next_token(self) -> bytes | None:
        for pipe in self._settings.pipes:
            with contextlib.suppress(BlockingIOError):
                token = os.read(pipe, TOKEN.size)
                if not token:
                    raise EOFError
                return token
        return None

    def _return(self, token: bytes) -> None:
        """Send a token back; where a host that is short of pipes gave a small one, wait until the engine reads it."""
        while True:
            try:
                os.write(self._settings.done, token)
            except BlockingIOError:
                self._room.poll()
            else:
                return

    def _work(self, entry: int, ticket: int) -> None:
        started = time.monotonic()
        mover = self._settings.mover
        self._board.set_current(mover, Current(entry, ticket, started))
        outcome: Outcome | StoreOutcome | None = None
        if self._board.ticket(entry) == ticket:
            task = decode_task(self._board.task(entry))
            outcome = self._load(task, entry, ticket) if task.is_load else self._save(task, entry, ticket)
        if self._board.ticket(entry) == ticket:
            self._board.write_result(entry, Result(*encode_outcome(outcome), time.monotonic() - started))
        self._rest()

    def _rest(self) -> None:
        """Say that it has nothing to do, which also says that it is ready."""
        self._board.set_current(self._settings.mover, Current(0, NO_TICKET, time.monotonic()))

    def _load(self, task: Task, entry: int, ticket: int) -> Outcome | None:
        def take(offset: int, piece: memoryview) -> bool:
            with self._board.locked(self._settings.mover):
                if self._board.ticket(entry) != ticket:
                    return False
                self._rows.copy_in(task.slot, offset, piece)
            return True

        return self._store.stream(task.key, self._rows.staging, take)

    def _save(self, task: Task, entry: int, ticket: int) -> StoreOutcome | None:
        with self._board.locked(self._settings.mover):
            if self._board.ticket(entry) != ticket:
                return None
            self._rows.copy_out(task.slot)
        if (keyring := self._store.keyring) is not None:
            keyring.activate(task.active_key)
        return self._store.put(task.key, self._rows.staging, task.lineage, is_scratch=True)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _file_system(name: str) -> FileSystem:
    if not name:
        return MappingFs()
    module, _, attribute = name.partition(":")
    made: FileSystem = getattr(importlib.import_module(module), attribute)()
    return made


def _die_with(parent: int) -> None:
    """Ask the system to kill this process when its parent ends, should the parent end without closing the pipes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended before we asked.
        sys.exit(0)


def main(settings: MoverSettings) -> None:
    """Run a mover."""
    _die_with(settings.parent)
    # What goes to all processes at once goes to the engine too, which ends its movers when it has finished with them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Mover(settings).run()


if __name__ == "__main__":
    main(MoverSettings.decode(sys.argv[1]))
