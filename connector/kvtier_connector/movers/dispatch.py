# SPDX-License-Identifier: Apache-2.0
"""Hands tasks to the movers and takes their answers: the engine's end of the board.

Nothing here waits, and nothing makes a system call on the volume. One token through a pipe tells the movers of a task,
one message back tells of its end. What the tasks are for is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier_connector.movers.board import (
    ENTRIES,
    FIRST_THREAD,
    NO_TICKET,
    TOKEN,
    Board,
    Current,
    Head,
    MessagePipe,
    create_board,
)
from kvtier_connector.movers.crew import Crew, Threads
from kvtier_connector.movers.mover import Mover, MoversSettings, Permit
from kvtier_connector.movers.process import MoverSettings
from kvtier_connector.movers.rows import OwnRows, Region
from kvtier_connector.movers.sizing import Sizing, enough
from kvtier_connector.movers.tasks import REPLY, Answer, Ending, Lane, Task, decode_answer, encode_task
from kvtier_connector.store.fs import LOCAL, FileSystem

_LANE_ENTRIES = {
    Lane.PROBE: ENTRIES // 8,
    Lane.LOAD: ENTRIES // 2,
    Lane.PREFETCH: ENTRIES // 4,
    Lane.STORE: ENTRIES // 8,
}
"""How much of the board one kind of task may take, so that none keeps another from it."""
_LOCK_SECONDS = 1.0
"""A copy takes a millisecond; a mover that holds its lock for longer than this is stopped, and is killed."""


@dataclass(slots=True, eq=False)
class Flight:
    """A task that was submitted, until it has ended and no mover works at it any more."""

    number: int
    """The caller's."""
    task: Task
    lane: Lane
    """How urgent it is by now."""
    entry: int = 0
    ticket: int = NO_TICKET
    """What movers know it by; none while it waits with the engine."""
    board_lane: Lane = Lane.STORE
    """Whose part of the board it takes."""
    is_taken_back: bool = False
    is_fenced: bool = False
    """Whether it is not known yet that no mover copies for it: until then it has no other ticket."""
    ending: Ending | None = None
    """How it ends if no answer comes before its row is safe."""
    is_told: bool = False
    """Whether the caller knows its end."""
    is_excused: bool = False
    """Whether the breaker has heard of its end."""


@dataclass(slots=True)
class _Fence:
    """Waits until no mover copies under a ticket that was cleared before."""

    remaining: set[int]
    began: float
    flights: list[Flight]


class Dispatcher:
    """Scheduler's thread only."""

    def __init__(
        self, settings: MoversSettings, rows: OwnRows, regions: Sequence[Region], *, fs: FileSystem = LOCAL
    ) -> None:
        """Make the board and the pipes; call `start`.

        Raises:
            OSError: the host or this process has no room for them; nothing stays open.
        """
        self._settings = settings
        self._rows = rows
        self._regions = tuple(regions)
        self._fs = fs
        pipes: list[MessagePipe] = []
        with contextlib.ExitStack() as opened:
            self._board_fd = create_board()
            opened.callback(os.close, self._board_fd)
            self._board = Board(self._board_fd)
            opened.callback(self._board.close)
            for size in (*[TOKEN.size] * len(Lane), REPLY.size):
                pipes.append(MessagePipe(size))
                opened.callback(pipes[-1].close)
            opened.pop_all()
        self._pipes, self._replies = pipes[:-1], pipes[-1]
        # A process of its own knows the real system calls only.
        processes = settings.processes if regions and fs is LOCAL else 0
        least = min(settings.first_processes or processes, processes)
        self._sizing = Sizing(least, processes)
        self._crew = Crew(least, self._command, first_backoff_seconds=settings.retry_seconds)
        self._threads = Threads(settings.threads, self._make_thread)
        self._head = Head(0, 0)
        self._free = list(range(ENTRIES))
        self._taken = dict.fromkeys(Lane, 0)
        self._flights: dict[int, Flight] = {}
        self._unsent: dict[Lane, list[bytes]] = {lane: [] for lane in Lane}
        self._fences: list[_Fence] = []
        self._next_ticket = 1
        self._round_trip_seconds = 0.0
        self._stuck: set[int] = set()

    def start(self) -> None:
        """Start the movers."""
        self.share(1.0)
        self._crew.start()
        if not self._crew.is_usable:
            self._threads.start()

    def has_room(self, lane: Lane) -> bool:
        """Say whether the board takes another task of the lane."""
        return bool(self._free) and self._taken[lane] < _LANE_ENTRIES[lane]

    def place(self, flight: Flight, active_key: str) -> None:
        """Put a task on the board; `send` tells the movers."""
        flight.entry = entry = self._free.pop()
        flight.ticket = ticket = self._next_ticket
        flight.board_lane = flight.lane
        flight.is_taken_back = False
        self._next_ticket = ticket % 0xFFFFFFFF + 1
        self._taken[flight.lane] += 1
        self._flights[ticket] = flight
        self._board.write_task(entry, encode_task(flight.task, active_key))
        self._board.set_ticket(entry, ticket)
        self._unsent[flight.lane].append(TOKEN.pack(entry, ticket))

    def send(self) -> None:
        """Tell the movers of what was placed."""
        for lane, pipe in zip(Lane, self._pipes, strict=True):
            if tokens := self._unsent[lane]:
                self._unsent[lane] = []
            if tokens or pipe.is_full:
                pipe.send(tokens)

    def share(self, share: float) -> None:
        """Let this share of the movers store at most, but one at least."""
        movers = self._crew.size if self._crew.is_usable else self._settings.threads
        head = Head(self._crew.size, max(1, int(share * movers)))
        if head != self._head:
            self._head = head
            self._board.set_head(head)

    def drain(self) -> list[tuple[Flight, Answer | None, float]]:
        """Return the tasks that movers have finished with, with None for one that was taken back before its end."""
        answers = []
        for ticket, code, seconds, number in REPLY.iter_unpack(self._replies.receive()):
            self._crew.note_work()
            flight = self._flights.pop(ticket, None)
            if flight is not None:
                self._clear(flight)
                answers.append((flight, decode_answer(code, number), seconds))
        return answers

    def take_back(self, flights: Iterable[Flight]) -> None:
        """Begin to take tasks back; `returned` tells when."""
        taken = [flight for flight in flights if not flight.is_taken_back]
        for flight in taken:
            self._clear(flight)
            flight.is_fenced = True
        if taken:
            self._fences.append(_Fence(set(self._movers()), time.monotonic(), taken))

    def returned(self) -> list[Flight]:
        """Return tasks that were taken back and whose rows no mover will touch any more."""
        flights: list[Flight] = []
        if self._fences:
            self._fences = [fence for fence in self._fences if not self._is_passed(fence, flights)]
        return flights

    def forget(self, flight: Flight) -> None:
        """Take no answer to a task that was taken back."""
        self._flights.pop(flight.ticket, None)
        flight.ticket = NO_TICKET

    def working(self) -> set[int]:
        """Return the tickets that movers work at now."""
        return {self._board.current(mover).ticket for mover in self._movers()} - {NO_TICKET}

    def on_board(self) -> list[Flight]:
        """Return the tasks that the movers know of."""
        return [flight for flight in self._flights.values() if not flight.is_taken_back]

    def bury(self) -> list[tuple[int, Flight | None]]:
        """Return the movers that died, with the task that each had in hand; `replace` them when that is settled."""
        found = []
        for mover in self._crew.bury():
            current = self._board.current(mover)
            flight = self._flights.pop(current.ticket, None)
            if flight is not None:
                self._clear(flight)
            self._board.set_current(mover, Current(0, NO_TICKET, 0.0))
            found.append((mover, flight))
        return found

    def replace(self, mover: int) -> None:
        """Start another in the place of a dead one."""
        self._crew.replace(mover)

    def end_hanging(self, now: float) -> list[Flight]:
        """Kill the movers that hang, as far as they can be killed, and return what they hang at."""
        found = []
        self._stuck = set()
        for mover in self._movers():
            current = self._board.current(mover)
            if current.ticket == NO_TICKET:
                continue
            flight = self._flights.get(current.ticket)
            is_probe = flight is not None and flight.lane is Lane.PROBE
            seconds = self._settings.probe_seconds if is_probe else self._settings.deadline_seconds
            if now - current.started > seconds:
                # It is buried the next time, so that until then it counts as stuck.
                self._stuck.add(mover)
                self._crew.kill(mover)
                if flight is not None:
                    found.append(flight)
        return found

    def end_all(self) -> None:
        """Kill all processes: none of them does anything."""
        for mover in self._crew.numbers():
            self._crew.kill(mover)

    def tend(self) -> None:
        """Use processes where they live, and threads meanwhile."""
        self._crew.try_again(self._is_ready)
        if self._crew.is_usable:
            self._threads.stop()
        else:
            self._threads.start()

    def resize(self, now: float, *, reads: int, ended: int, round_trip_seconds: float) -> None:
        """Have as many processes as what is under way is worth, on a volume that answers so slowly."""
        if self._crew.is_usable:
            if round_trip_seconds != self._round_trip_seconds:
                self._round_trip_seconds = round_trip_seconds
                processors = len(os.sched_getaffinity(0))
                self._sizing.expect(
                    enough(processors, round_trip_seconds=round_trip_seconds, chunk_bytes=self._rows.row_bytes)
                )
            size = self._sizing.decide(now, reads=reads, ended=ended, wait_share=self._crew.wait_share)
            if size != self._crew.size:
                self._crew.resize(size)

    def is_ready(self) -> bool:
        """Say whether a mover has begun to work."""
        return any(self._is_ready(mover) for mover in self._movers())

    def is_stuck(self, lane: Lane) -> bool:
        """Say whether a new task of the lane would not start, because every mover that could take it hangs."""
        if not self._stuck:
            return False
        able = self._movers()
        if lane is Lane.STORE:
            able = [mover for mover in able if mover % FIRST_THREAD < self._head.storing]
        return self._stuck.issuperset(able)

    def count_processes(self) -> int:
        """Return how many processes there are to use."""
        return self._crew.count()

    def count_stuck(self) -> int:
        """Return how many movers hang."""
        return len(self._stuck)

    def close(self, timeout_seconds: float) -> bool:
        """End the movers; False if some hang even now, which touch no row."""
        self.take_back(self.on_board())
        deadline = time.monotonic() + timeout_seconds
        while self._fences and time.monotonic() < deadline:
            self.returned()
            time.sleep(0.001)
        for pipe in self._pipes:
            os.close(pipe.writer)
        is_ended = self._crew.close(max(0.0, deadline - time.monotonic()))
        if not self._threads.close(max(0.0, deadline - time.monotonic())):
            # What a thread that hangs uses stays open.
            return False
        for pipe in self._pipes:
            os.close(pipe.reader)
        self._replies.close()
        self._board.close()
        os.close(self._board_fd)
        return is_ended

    def _movers(self) -> list[int]:
        return [*self._crew.numbers(), *self._threads.numbers()]

    def _clear(self, flight: Flight) -> None:
        """Take a task off the board."""
        if not flight.is_taken_back:
            flight.is_taken_back = True
            self._board.set_ticket(flight.entry, NO_TICKET)
            self._free.append(flight.entry)
            self._taken[flight.board_lane] -= 1

    def _is_passed(self, fence: _Fence, flights: list[Flight]) -> bool:
        fence.remaining = {mover for mover in fence.remaining if not self._board.is_unlocked(mover)}
        if not fence.remaining:
            flights += fence.flights
            for flight in fence.flights:
                flight.is_fenced = False
        elif time.monotonic() - fence.began > _LOCK_SECONDS:
            for mover in fence.remaining:
                self._crew.kill(mover)
        return not fence.remaining

    def _is_ready(self, mover: int) -> bool:
        return self._board.current(mover).started > 0

    def _command(self, mover: int) -> tuple[str, list[int]]:
        # What the one before it said is not true of this one.
        self._board.set_current(mover, Current(0, NO_TICKET, 0.0))
        pipes = tuple(pipe.reader for pipe in self._pipes)
        told = MoverSettings(
            mover=mover,
            parent=os.getpid(),
            board=self._board_fd,
            regions=self._regions,
            row_bytes=self._rows.row_bytes,
            pipes=pipes,
            replies=self._replies.writer,
            settings=self._settings,
        )
        return told.encode(), [self._board_fd, *{region.fd for region in self._regions}, *pipes, self._replies.writer]

    def _make_thread(self, number: int) -> Mover:
        return Mover(
            number,
            board=self._board,
            rows=self._rows,
            row_bytes=self._rows.row_bytes,
            store=self._settings.open_volume(self._fs),
            pipes=[pipe.reader for pipe in self._pipes],
            replies=self._replies.writer,
            permit=lambda: Permit(self._threads.is_wanted, number - FIRST_THREAD < self._head.storing),
        )
