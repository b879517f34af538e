# SPDX-License-Identifier: Apache-2.0
"""Moves and looks for block files for one engine: tasks in, the end of each out, one chunk a task.

Nothing here waits for the volume, and nothing of this process touches it where processes of their own can. Every task
ends once, with an outcome of which breaker and store have heard, and from then on no mover touches its row. Tasks wait
in lanes; the more urgent goes first, and loads go before what is stored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from kvtier_connector.movers.dispatch import Dispatcher, Flight
from kvtier_connector.movers.mover import MoversSettings
from kvtier_connector.movers.rows import OwnRows, Region
from kvtier_connector.movers.tasks import Answer, Done, Ending, Lane, Looked, Refused, Task
from kvtier_connector.store.blockstore import Outcome, StoreFault, StoreOutcome
from kvtier_connector.store.breaker import Breaker, Direction
from kvtier_connector.store.format import Fault
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.shared import SharedStore

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
