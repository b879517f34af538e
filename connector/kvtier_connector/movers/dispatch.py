# SPDX-License-Identifier: Apache-2.0
"""Hands tasks to the movers and takes their results: the engine's end of the board.

Nothing here waits, and nothing makes a system call on the volume. One token through a pipe tells a mover of a task, one
token back tells of its end, and the scheduler asks for those once in each of its steps.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier_connector.movers.board import ENTRIES, NO_TICKET, TOKEN, Board, Current, create_board
from kvtier_connector.movers.crew import FIRST_BACKOFF_SECONDS, Crew
from kvtier_connector.movers.pipe import TokenPipe
from kvtier_connector.movers.process import MoverSettings
from kvtier_connector.movers.region import Region
from kvtier_connector.movers.tasks import Task, decode_outcome, encode_task
from kvtier_connector.store.blockstore import Outcome, StoreFault, StoreOutcome
from kvtier_connector.store.format import Fault

_RUN_BYTES = 2 << 20
"""Rows that share a page of page-table entries go to the same movers."""
_MOVERS_OF_A_GROUP = 4
_TEND_SECONDS = 0.05
_LOCK_SECONDS = 1.0
"""A copy takes a millisecond; a mover that holds its lock for longer than this is stopped, and is killed."""


@dataclass(frozen=True, kw_only=True)
class DispatchSettings:
    """What the movers work on."""

    movers: int
    region: Region
    row_bytes: int
    root: str
    direct: bool | None
    keys_dir: str = ""
    stuck_seconds: float
    """A mover whose task takes longer hangs, and is killed."""
    file_system: str = ""
    """As in `MoverSettings`."""
    retry_seconds: float = FIRST_BACKOFF_SECONDS
    """After how long movers that were given up are tried again, for the first time."""


class Ended(NamedTuple):
    """One task that a mover has finished with."""

    owner: int
    number: int
    """Within the owner's tasks."""
    outcome: Outcome | StoreOutcome
    seconds: float
    is_of_volume: bool = True
    """Whether the outcome says something of the volume; False where the mover died by itself."""


@dataclass(slots=True)
class _Flight:
    """A task that lies in an entry of the board."""

    owner: int
    index: int
    ticket: int
    task: Task
    is_withdrawn: bool = False


@dataclass(slots=True)
class _Fence:
    """Waits until no mover copies under a ticket that was cleared before."""

    remaining: set[int]
    began: float
    again: list[tuple[int, int, Task]] = field(default_factory=list)
    """Tasks to queue anew afterwards."""


class Dispatcher:
    """Scheduler's thread only. `submit`, `collect`, `withdraw`, then `close`."""

    def __init__(self, settings: DispatchSettings) -> None:
        """Make the board and the pipes; call `start`.

        Raises:
            OSError: the host or this process has no room for them; nothing stays open but the region.
        """
        self._settings = settings
        self._groups = max(1, settings.movers // _MOVERS_OF_A_GROUP)
        self._run_rows = max(1, _RUN_BYTES // settings.row_bytes)
        pipes: list[TokenPipe] = []
        with contextlib.ExitStack() as opened:
            self._board_fd = create_board()
            opened.callback(os.close, self._board_fd)
            self._board = Board(self._board_fd)
            opened.callback(self._board.close)
            for _ in range(2 * self._groups + 1):
                pipes.append(TokenPipe())
                opened.callback(pipes[-1].close)
            opened.pop_all()
        self._load_pipes = pipes[: self._groups]
        self._save_pipes = pipes[self._groups : -1]
        self._done = pipes[-1]
        self._crew = Crew(settings.movers, self._command, first_backoff_seconds=settings.retry_seconds)
        self._free = list(range(ENTRIES))
        self._flights: dict[int, _Flight] = {}
        self._owned: dict[int, set[int]] = {}
        self._waiting: tuple[deque[tuple[int, int, Task]], ...] = (deque(), deque())
        self._fences: dict[int, _Fence] = {}
        self._recoveries: list[_Fence] = []
        self._next_ticket = 1
        self._tended = 0.0
        self._stuck = 0
        self._is_closed = False

    def start(self) -> None:
        """Start the movers."""
        self._crew.start()

    @property
    def is_usable(self) -> bool:
        """Whether tasks may be submitted; what was before is to be withdrawn where not, but for what ends by itself."""
        return self._crew.is_usable and not self._is_closed

    def submit(self, owner: int, tasks: Iterable[tuple[int, Task]]) -> None:
        """Queue tasks, each with its number within the owner's; loads go before what is to be saved."""
        for index, task in tasks:
            self._waiting[0 if task.is_load else 1].append((owner, index, task))
        self._feed()

    def collect(self) -> list[Ended]:
        """Return what ended since the last call."""
        if self._is_closed:
            return []
        ended = self._drain()
        now = time.monotonic()
        if now - self._tended >= _TEND_SECONDS:
            self._tended = now
            ended += self._tend(now)
        self._feed()
        return ended

    def begun(self, owner: int) -> list[int]:
        """Return which tasks of the owner are with a mover now."""
        indices = []
        for mover in range(self._settings.movers):
            current = self._board.current(mover)
            flight = self._flights.get(current.entry)
            if flight is not None and (flight.owner, flight.ticket) == (owner, current.ticket):
                indices.append(flight.index)
        return indices

    def withdraw(self, owner: int) -> bool:
        """Take back every task of the owner; True once no mover will touch its rows again. Call until it is."""
        fence = self._fences.get(owner)
        if fence is None:
            for queue in self._waiting:
                kept = [item for item in queue if item[0] != owner]
                if len(kept) != len(queue):
                    queue.clear()
                    queue.extend(kept)
            entries = self._owned.pop(owner, set())
            for entry in entries:
                self._flights[entry].is_withdrawn = True
                self._board.set_ticket(entry, NO_TICKET)
            for recovery in self._recoveries:
                # Its ticket was cleared before, so the new fence covers it too.
                recovery.again = [item for item in recovery.again if item[0] != owner]
            fence = self._fences[owner] = self._new_fence()
        if not self._is_passed(fence):
            return False
        del self._fences[owner]
        return True

    def is_stuck(self) -> bool:
        """Say whether a new task could not start, because each mover of some group hangs."""
        return self._stuck > 0 and any(
            all(self._hangs(mover, time.monotonic()) for mover in range(group, self._settings.movers, self._groups))
            for group in range(self._groups)
        )

    def count_stuck(self) -> int:
        """Return how many movers hang."""
        return self._stuck

    def count_movers(self) -> int:
        """Return how many movers there are to use."""
        return self._crew.count()

    def close(self, timeout_seconds: float) -> bool:
        """End the movers; False if some hang even now. They touch no row: withdraw every owner before."""
        if self._is_closed:
            return True
        self._is_closed = True
        for pipe in (*self._load_pipes, *self._save_pipes):
            pipe.close()
        is_ended = self._crew.close(timeout_seconds)
        self._done.close()
        self._board.close()
        os.close(self._board_fd)
        os.close(self._settings.region.fd)
        return is_ended

    def _feed(self) -> None:
        """Put as much of what waits on the board as has room."""
        if not self.is_usable:
            return
        tokens: dict[TokenPipe, list[bytes]] = {}
        for queue, pipes in zip(self._waiting, (self._load_pipes, self._save_pipes), strict=True):
            while queue and self._free:
                owner, index, task = queue.popleft()
                entry = self._free.pop()
                ticket = self._next_ticket
                self._next_ticket = ticket % 0xFFFFFFFF + 1
                self._flights[entry] = _Flight(owner, index, ticket, task)
                self._owned.setdefault(owner, set()).add(entry)
                self._board.write_task(entry, encode_task(task))
                self._board.set_ticket(entry, ticket)
                pipe = pipes[task.slot // self._run_rows % self._groups]
                tokens.setdefault(pipe, []).append(TOKEN.pack(entry, ticket))
        for pipe, packed in tokens.items():
            pipe.send(packed)
        for pipe in (*self._load_pipes, *self._save_pipes):
            pipe.flush()

    def _drain(self) -> list[Ended]:
        ended: list[Ended] = []
        if not self._flights:
            # In most steps nothing is under way, and a system call lets other threads in.
            return ended
        for entry, ticket in TOKEN.iter_unpack(self._done.receive()):
            flight = self._flights.get(entry)
            if flight is None or flight.ticket != ticket:
                continue
            self._release(entry, flight)
            self._crew.note_work()
            if flight.is_withdrawn:
                continue
            code, moved_bytes, seconds = self._board.result(entry)
            outcome = decode_outcome(code, moved_bytes)
            ended.append(Ended(flight.owner, flight.index, outcome or _io_fault(flight.task), seconds))
        return ended

    def _release(self, entry: int, flight: _Flight) -> None:
        del self._flights[entry]
        self._board.set_ticket(entry, NO_TICKET)
        self._free.append(entry)
        if not flight.is_withdrawn:
            owned = self._owned[flight.owner]
            owned.discard(entry)
            if not owned:
                del self._owned[flight.owner]

    def _tend(self, now: float) -> list[Ended]:
        """Look after the processes."""
        self._crew.try_again(self._is_ready)
        self._recoveries = [recovery for recovery in self._recoveries if not self._recover(recovery)]
        ended = self._bury(now)
        self._stuck = 0
        for mover in range(self._settings.movers):
            # It is buried the next time, so that until then it counts as stuck.
            if self._hangs(mover, now):
                self._stuck += 1
                self._crew.kill(mover)
        return ended

    def _bury(self, now: float) -> list[Ended]:
        """Settle what dead movers had in hand, and replace them."""
        dead = self._crew.bury()
        if not dead:
            return []
        # Its last results are in the pipe.
        ended = self._drain()
        for mover in dead:
            current = self._board.current(mover)
            flight = self._flights.get(current.entry)
            if flight is not None and flight.ticket == current.ticket:
                self._release(current.entry, flight)
                if not flight.is_withdrawn:
                    was_hanging = self._crew.was_killed(mover)
                    seconds = now - current.started
                    ended.append(Ended(flight.owner, flight.index, _io_fault(flight.task), seconds, was_hanging))
            self._board.set_current(mover, current._replace(ticket=NO_TICKET))
        self._begin_recovery(now)
        for mover in dead:
            self._crew.replace(mover)
        return ended

    def _begin_recovery(self, now: float) -> None:
        """Take back what no living mover has begun: a token may have died with the mover that had just read it."""
        begun = {self._board.current(mover)[:2] for mover in range(self._settings.movers)}
        again = []
        for entry, flight in list(self._flights.items()):
            if (entry, flight.ticket) in begun:
                continue
            if not flight.is_withdrawn:
                again.append((flight.owner, flight.index, flight.task))
            self._release(entry, flight)
        fence = self._new_fence()
        fence.began = now
        fence.again = again
        self._recoveries.append(fence)

    def _recover(self, recovery: _Fence) -> bool:
        if not self._is_passed(recovery):
            return False
        for owner, index, task in recovery.again:
            self._waiting[0 if task.is_load else 1].append((owner, index, task))
        return True

    def _new_fence(self) -> _Fence:
        return _Fence(set(range(self._settings.movers)), time.monotonic())

    def _is_passed(self, fence: _Fence) -> bool:
        fence.remaining = {mover for mover in fence.remaining if not self._board.is_unlocked(mover)}
        if fence.remaining and time.monotonic() - fence.began > _LOCK_SECONDS:
            for mover in fence.remaining:
                self._crew.kill(mover)
        return not fence.remaining

    def _is_ready(self, mover: int) -> bool:
        return self._board.current(mover).started > 0

    def _hangs(self, mover: int, now: float) -> bool:
        current = self._board.current(mover)
        return current.ticket != NO_TICKET and current.started < now - self._settings.stuck_seconds

    def _command(self, mover: int) -> tuple[str, list[int]]:
        settings = self._settings
        # What the one before it said is not true of this one.
        self._board.set_current(mover, Current(0, NO_TICKET, 0.0))
        group = mover % self._groups
        # Half of a group also saves, so that a burst of stores never takes every mover from the loads.
        is_saving = mover // self._groups < max(1, settings.movers // self._groups // 2)
        pipes = (self._load_pipes[group].reader, *((self._save_pipes[group].reader,) if is_saving else ()))
        told = MoverSettings(
            mover=mover,
            parent=os.getpid(),
            board=self._board_fd,
            region=settings.region.fd,
            region_offset=settings.region.offset,
            region_bytes=settings.region.size,
            row_bytes=settings.row_bytes,
            pipes=pipes,
            done=self._done.writer,
            rows=(group * self._run_rows, self._run_rows, self._groups * self._run_rows),
            root=settings.root,
            direct=settings.direct,
            keys_dir=settings.keys_dir,
            file_system=settings.file_system,
        )
        return told.encode(), [self._board_fd, settings.region.fd, *pipes, self._done.writer]


def _io_fault(task: Task) -> Fault | StoreFault:
    return Fault.IO if task.is_load else StoreFault.IO
