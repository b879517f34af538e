# SPDX-License-Identifier: Apache-2.0
"""Moves and looks for block files for one engine: tasks in, the end of each out, one chunk a task.

Nothing here waits for the volume, and nothing of this process touches it where processes of their own can. Every task
ends once, with an outcome of which breaker and store have heard, and from then on no mover touches its row. Tasks wait
in lanes; the more urgent goes first, and loads go before what is stored.

Hands tasks to the movers and takes their answers: the engine's end of the board.

Nothing here waits, and nothing makes a system call on the volume. One token through a pipe tells the movers of a task,
one message back tells of its end. What the tasks are for is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from kvtier_connector.io_workers.buffers import OwnRows, Region
from kvtier_connector.io_workers.supervisor import Crew, Sizing, Threads, enough
from kvtier_connector.io_workers.task_table import (
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
from kvtier_connector.io_workers.tasks import (
    REPLY,
    Answer,
    Done,
    Ending,
    Lane,
    Looked,
    Refused,
    Task,
    decode_answer,
    encode_task,
)
from kvtier_connector.io_workers.worker import Mover, MoverSettings, MoversSettings, Permit
from kvtier_connector.store.blockstore import Outcome, StoreFault, StoreOutcome
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import Fault
from kvtier_connector.store.health import Breaker, Direction
from kvtier_connector.store.shared import SharedStore

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


BREAKER, STUCK, CLOSED = Refused("breaker"), Refused("stuck"), Refused("closed")

_TEND_SECONDS = 0.05
_IDLE_TEND_SECONDS = 1.0
_START_SECONDS = 20.0
"""A host that is busy needs up to this long to start a process."""
_STORING_SHARE, _YIELDING_SHARE = 0.75, 0.125
"""Of the movers, so many store, for a load is to find one that is free; and so many while something is read."""
_DIRECTIONS = {Lane.LOAD: Direction.LOAD, Lane.PREFETCH: Direction.LOAD, Lane.STORE: Direction.STORE}


class Counts(NamedTuple):
    """What a gauge shows."""

    processes: int
    """That move blocks; 0 while threads do."""
    stuck: int
    """Movers of either kind that the volume holds up."""


class Movers:
    """The movers of one engine. Scheduler's thread only; `submit` and `collect` in each step, `close` at the end."""

    def __init__(  # noqa: PLR0913 - keywords but for the first
        self,
        settings: MoversSettings,
        *,
        store: SharedStore,
        breaker: Breaker,
        rows: memoryview,
        regions: Sequence[Region] = (),
        fs: FileSystem = LOCAL,
    ) -> None:
        """Make what the movers need; call `start`.

        Args:
            settings: What they work on.
            store: Hears what became of each block; nothing of it that waits is called.
            breaker: Is asked before a block is moved, and hears what the volume did.
            rows: The CPU tier as this process has it: a table of one row a chunk. No hold of it is kept.
            regions: The files behind the rows, which stay open as long as this; without, threads move the blocks.
            fs: The system calls of threads; others than the real ones keep processes from being used.

        Raises:
            OSError: the host or this process has no room for the pipes.
            ValueError: the rows are no table.
        """
        self._settings = settings
        self._store = store
        self._breaker = breaker
        self._row_bytes = rows.strides[0] if rows.strides else 0
        self._dispatcher = Dispatcher(settings, OwnRows(rows), regions, fs=fs)
        self._queues: dict[Lane, deque[Flight]] = {lane: deque() for lane in Lane}
        self._open: dict[int, Flight] = {}
        self._done: list[Done] = []
        self.storing_share = _STORING_SHARE
        """Of the movers, so many store at most."""
        self._reads = self._stores = 0
        """How many tasks are open."""
        self._ended = 0
        self._read_at = self._moved_at = 0.0
        """When a mover last ended a read, and anything."""
        self._tended = 0.0
        self._is_ready = False
        self._is_closed = False

    def start(self) -> None:
        """Start the movers."""
        self._dispatcher.start()

    def submit(self, tasks: Iterable[tuple[int, Task]]) -> None:
        """Queue tasks, each with a number that no open task has; those of one lane begin in this order."""
        self._free_stuck()
        now = time.monotonic()
        for number, task in tasks:
            lane = task.lane
            if self._is_closed or self._dispatcher.is_stuck(lane):
                self._done.append(Done(number, CLOSED if self._is_closed else STUCK, 0.0))
                continue
            # Whoever waits, waits from the first one on.
            if lane is Lane.STORE:
                self._stores += 1
                if self._stores == 1:
                    self._moved_at = now
            else:
                self._reads += 1
                if self._reads == 1:
                    self._read_at = now
            flight = self._open[number] = Flight(number, task, lane)
            self._queues[lane].append(flight)
        self._feed()

    def hasten(self, tasks: Iterable[int]) -> None:
        """Make loads of prefetches that nobody has taken up yet: a request waits for them now."""
        working: set[int] | None = None
        back = []
        for number in tasks:
            flight = self._open.get(number)
            if flight is None or flight.lane is not Lane.PREFETCH:
                continue
            if not flight.ticket:
                flight.lane = Lane.LOAD
                self._queues[Lane.LOAD].append(flight)
                continue
            if working is None:
                working = self._dispatcher.working()
            if flight.ticket not in working:
                flight.lane = Lane.LOAD
                back.append(flight)
        self._dispatcher.take_back(back)
        self._settle_returned()
        self._feed()

    def withdraw(self, tasks: Iterable[int]) -> None:
        """Give tasks up; each still ends, with `Ending.WITHDRAWN` or its outcome, when its row is safe."""
        back = []
        for number in tasks:
            flight = self._open.get(number)
            if flight is None or flight.ending is not None:
                continue
            flight.ending = Ending.WITHDRAWN
            if flight.ticket:
                back.append(flight)
            else:
                self._tell(flight, Ending.WITHDRAWN)
        self._dispatcher.take_back(back)
        self._settle_returned()

    def collect(self) -> list[Done]:
        """Return what ended since the last call."""
        now = time.monotonic()
        if self._open and not self._is_closed:
            self._take_answers()
            if now - self._tended >= _TEND_SECONDS:
                self._tend(now)
            self._settle_returned()
            self._feed()
        else:
            self._look_after(_IDLE_TEND_SECONDS)
        done, self._done = self._done, []
        return done

    def is_stuck(self, lane: Lane) -> bool:
        """Say whether a new task of the lane would be refused, because every mover that could take it hangs."""
        return self._dispatcher.is_stuck(lane)

    def counts(self) -> Counts:
        """Return what gauges show."""
        self._free_stuck()
        return Counts(self._dispatcher.count_processes(), self._dispatcher.count_stuck())

    def close(self, timeout_seconds: float) -> bool:
        """End the movers, whatever is open; False if some hang and are left behind. No row is touched afterwards."""
        if self._is_closed:
            return True
        self._is_closed = True
        is_ended = self._dispatcher.close(timeout_seconds)
        for flight in list(self._open.values()):
            if flight.ticket:
                self._cancel(flight)
            self._tell(flight, flight.ending or Ending.WITHDRAWN)
        return is_ended

    def _feed(self) -> None:
        """Put on the board what has room there and is let through."""
        if self._is_closed:
            return
        keyring = self._store.blocks.keyring
        active_key = "" if keyring is None else keyring.active_name
        for lane, queue in self._queues.items():
            while queue and self._dispatcher.has_room(lane):
                flight = queue.popleft()
                # It may have been withdrawn or hastened since; what is fenced is queued when it is returned.
                is_due = flight.lane is lane and not flight.ticket and not flight.is_told and not flight.is_fenced
                if is_due and self._admit(flight):
                    self._dispatcher.place(flight, active_key)
        self._dispatcher.share(1.0 if not self._stores else _YIELDING_SHARE if self._reads else self.storing_share)
        self._dispatcher.send()

    def _admit(self, flight: Flight) -> bool:
        """Ask the breaker, and for room; a task that is not let through has ended."""
        direction = _DIRECTIONS.get(flight.lane)
        if direction is None:
            return True
        if not self._breaker.admit(direction):
            self._tell(flight, BREAKER)
            return False
        flight.is_excused = False
        if direction is Direction.STORE:
            outcome = self._store.begin_put(flight.task.keys[0], self._row_bytes)
            if outcome is not None:
                self._breaker.record_store(outcome)
                self._tell(flight, outcome)
                return False
        return True

    def _take_answers(self) -> None:
        answers = self._dispatcher.drain()
        if answers:
            self._moved_at = time.monotonic()
            self._ended += len(answers)
        for flight, answer, seconds in answers:
            if flight.lane is not Lane.STORE:
                self._read_at = self._moved_at
            if answer is None:
                # Its ticket was cleared, and the row is settled with the others of its fence.
                self._cancel(flight)
            else:
                self._end(flight, answer, seconds)
            flight.ticket = 0

    def _end(self, flight: Flight, answer: Answer, seconds: float, *, is_telling: bool = True) -> None:
        """Take in how a task ended; `is_telling` is whether that says something of the volume."""
        task = flight.task
        if flight.lane is Lane.PROBE:
            if isinstance(answer, Looked):
                for key, is_there in zip(task.keys, answer.present, strict=False):
                    self._store.record_look_up(key, is_there=is_there)
        elif flight.lane is Lane.STORE:
            stored = cast("StoreOutcome", answer)
            self._store.end_put(task.keys[0], self._row_bytes, stored, task.lineage)
            if is_telling and not flight.is_excused:
                self._breaker.record_store(stored)
        else:
            loaded = cast("Outcome", answer)
            self._store.record_get(task.keys[0], loaded)
            if is_telling and not flight.is_excused:
                self._breaker.record_load(loaded)
        if not is_telling:
            self._excuse(flight)
        self._tell(flight, answer, seconds)

    def _tell(self, flight: Flight, outcome: Answer | Refused | Ending, seconds: float = 0.0) -> None:
        if not flight.is_told:
            flight.is_told = True
            del self._open[flight.number]
            if flight.lane is Lane.STORE:
                self._stores -= 1
            else:
                self._reads -= 1
            self._done.append(Done(flight.number, outcome, seconds))

    def _cancel(self, flight: Flight) -> None:
        """Undo what was noted when a task was let through."""
        if flight.lane is Lane.STORE:
            self._store.cancel_put(flight.task.keys[0], self._row_bytes)
        self._excuse(flight)

    def _excuse(self, flight: Flight) -> None:
        direction = _DIRECTIONS.get(flight.lane)
        if direction is not None and not flight.is_excused:
            self._breaker.record_nothing(direction)
        flight.is_excused = True

    def _settle_returned(self) -> None:
        """Tell of the tasks whose rows are safe, and queue those anew that are still wanted."""
        returned = self._dispatcher.returned()
        if not returned:
            return
        working = self._dispatcher.working()
        for flight in reversed(returned):
            is_waited_for = flight.ticket in working and flight.ending is not None
            if flight.ticket and not is_waited_for:
                self._dispatcher.forget(flight)
                self._cancel(flight)
            if flight.ending is not None:
                self._tell(flight, flight.ending)
            elif not flight.is_told:
                self._queues[flight.lane].appendleft(flight)

    def _tend(self, now: float) -> None:
        """Look after the movers, and give up on what is late."""
        self._tended = now
        self._dispatcher.tend()
        self._dispatcher.resize(
            now, reads=self._reads, ended=self._ended, round_trip_seconds=self._store.round_trip_seconds
        )
        self._bury()
        hanging = [flight for flight in self._dispatcher.end_hanging(now) if flight.ending is None]
        for flight in hanging:
            flight.ending = Ending.LATE
            direction = _DIRECTIONS.get(flight.lane)
            if direction is not None:
                self._breaker.record_timeout(direction)
                flight.is_excused = True
            if direction is Direction.LOAD:
                self._store.forget(flight.task.keys[0])
        self._dispatcher.take_back(hanging)
        self._end_late(now)

    def _look_after(self, every_seconds: float) -> None:
        """Tend the movers while nothing is open."""
        now = time.monotonic()
        if now - self._tended >= every_seconds and not self._is_closed:
            self._take_answers()
            self._tend(now)
            self._settle_returned()

    def _free_stuck(self) -> None:
        """See whether those that hung still do: an engine at rest takes no step that would."""
        if self._dispatcher.count_stuck():
            self._look_after(_TEND_SECONDS)

    def _bury(self) -> None:
        """Settle what dead movers had in hand, and replace them."""
        dead = self._dispatcher.bury()
        if not dead:
            return
        # Their last answers are in the pipe.
        self._take_answers()
        for _, flight in dead:
            if flight is None:
                continue
            flight.ticket = 0
            if flight.ending is None and not flight.is_told:
                fault = StoreFault.IO if flight.lane is Lane.STORE else Fault.IO
                self._end(flight, fault, 0.0, is_telling=False)
            else:
                self._cancel(flight)
        # A token may have died with the mover that had just read it.
        working = self._dispatcher.working()
        self._dispatcher.take_back(flight for flight in self._dispatcher.on_board() if flight.ticket not in working)
        for mover, _ in dead:
            self._dispatcher.replace(mover)

    def _end_late(self, now: float) -> None:
        """Give up on what waits in line while no mover gets on; what is stored waits for what is read, too."""
        was_ready, self._is_ready = self._is_ready, self._dispatcher.is_ready()
        if self._is_ready and not was_ready:
            # They begin just now.
            self._read_at = self._moved_at = now
        slow, quick = self._settings.deadline_seconds, self._settings.probe_seconds
        if not self._is_ready:
            slow = quick = max(slow, _START_SECONDS)
        is_waiting = {
            Lane.PROBE: now - self._read_at > quick,
            Lane.LOAD: now - self._read_at > slow,
            Lane.PREFETCH: now - self._read_at > slow,
            Lane.STORE: now - self._moved_at > slow,
        }
        if not any(is_waiting.values()):
            return
        working = self._dispatcher.working()
        late = [
            flight
            for flight in self._open.values()
            if is_waiting[flight.lane] and flight.ending is None and flight.ticket not in working
        ]
        for flight in late:
            flight.ending = Ending.LATE
        self._dispatcher.take_back(flight for flight in late if flight.ticket)
        for flight in late:
            if not flight.ticket:
                self._tell(flight, Ending.LATE)
        if late and not working:
            # They do nothing, although there is something to do.
            self._dispatcher.end_all()
