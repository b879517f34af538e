# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of the movers, replaces those that die, kills those that hang; and threads in their stead.

A process that hangs in an uninterruptible system call cannot be killed: it stays until the call returns, and counts
against the crew meanwhile. Where processes cannot live, they are given up, and tried again after a while as a breaker
does: whatever ended them, a limit of the pod or a node without memory, may be over by then.

Decides how many processes move blocks: few at first, more while that helps, few again when nothing is to be done.

A volume that answers slowly leaves cores idle, and more movers ask it more at once. Where movers wait for a core, or
more of them moved no more, there are enough. Pure: whoever asks passes the clock and what was measured.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvtier_connector.io_workers.task_table import FIRST_THREAD
from kvtier_connector.io_workers.worker import UNWANTED, Mover, start_process

logger = logging.getLogger("vllm.kvtier.movers")

_DEATH_WINDOW_SECONDS = 60.0
_SPARE_DEATHS = 8
_KILLED_SECONDS = 1.0
"""Killed, a process is gone at once, or when the call returns in which it hangs, and no engine waits for that."""
LONGEST_BACKOFF_SECONDS = 600.0
"""Each attempt that fails doubles the back-off, up to this."""


class _State(enum.Enum):
    USABLE = "usable"
    RESTING = "resting"
    """Given up until the back-off is over."""
    STARTING = "starting"
    """Tried again, and not yet all ready; whatever goes wrong costs nobody a block."""


class Crew:
    """The processes by their number. Scheduler's thread only."""

    def __init__(
        self,
        size: int,
        command: Callable[[int], tuple[str, list[int]]],
        *,
        first_backoff_seconds: float,
    ) -> None:
        """Store the settings.

        Args:
            size: How many movers at first; none is a crew that is never usable.
            command: For a mover's number, its settings and the descriptors that it inherits.
            first_backoff_seconds: After how long a crew that was given up is tried again.
        """
        self.size = size
        """How many processes there are to be."""
        self._command = command
        self._first_backoff_seconds = first_backoff_seconds
        self._backoff_seconds = first_backoff_seconds
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._deaths: deque[float] = deque()
        self._deaths_in_vain = 0
        self._times: dict[int, list[int]] = {}
        """Nanoseconds that a process had run and waited when it was last asked."""
        self._state = _State.USABLE if size else _State.RESTING
        self._retry_at = 0.0 if size else math.inf
        self._trial_ends: float | None = None

    def start(self) -> None:
        """Start the processes; returns before they have begun to work."""
        for mover in range(self.size):
            self._try_to_spawn(mover)

    @property
    def is_usable(self) -> bool:
        """Whether the processes live; False for a while once they died too often, or one could not be started."""
        return self._state is _State.USABLE

    def numbers(self) -> list[int]:
        """Return the numbers of the processes, those that die included."""
        return list(self._processes)

    def wait_share(self) -> float:
        """Return which part of the time that the first and the last process could have run they waited for a core."""
        ran = waited = 0
        for mover in {min(self._processes, default=0), max(self._processes, default=0)}:
            with contextlib.suppress(OSError, ValueError, KeyError):
                schedstat = Path(f"/proc/{self._processes[mover].pid}/schedstat").read_text(encoding="ascii")
                times = [int(part) for part in schedstat.split()[:2]]
                before = self._times.get(mover, [0, 0])
                ran, waited = ran + times[0] - before[0], waited + times[1] - before[1]
                self._times[mover] = times
        return max(0, waited) / max(1, ran + waited)

    def count(self) -> int:
        """Return how many processes there are to use."""
        return len(self._processes) if self.is_usable else 0

    def resize(self, size: int) -> None:
        """Start as many as are missing; those with a number from `size` on are told elsewhere to end, and do."""
        self.size = size
        for mover in range(size):
            if mover not in self._processes:
                self._try_to_spawn(mover)

    def bury(self) -> list[int]:
        """Return the numbers of those that died since the last call; `replace` them when their tasks are settled."""
        return [mover for mover, process in self._processes.items() if process.poll() is not None]

    def replace(self, mover: int) -> None:
        """Start another process in the place of a dead one, unless too many died; on trial, one is too many."""
        process = self._processes.pop(mover)
        if mover >= self.size:
            return
        if process.returncode == UNWANTED:
            # It went just before it was wanted again.
            self._try_to_spawn(mover)
            return
        now = time.monotonic()
        if mover in self._killed:
            # That says something of the volume, and nothing of how processes live here.
            self._killed.discard(mover)
        else:
            self._deaths.append(now)
            self._deaths_in_vain += 1
        while self._deaths and self._deaths[0] < now - _DEATH_WINDOW_SECONDS:
            self._deaths.popleft()
        if self._are_too_many():
            self._give_up(now, f"they die again and again, the last with {process.returncode}")
            return
        if self._state is not _State.RESTING:
            logger.warning("Mover %d of blocks ended with %s and is started again", mover, process.returncode)
            self._try_to_spawn(mover)

    def note_work(self) -> None:
        """Take in that a process has done something."""
        self._deaths_in_vain = 0

    def try_again(self, is_ready: Callable[[int], bool]) -> None:
        """Start what is missing of a crew that was given up, once the back-off is over, and use it when all are ready.

        From then on it is on trial for a while, with the first death as its end.
        """
        now = time.monotonic()
        if self._state is _State.RESTING and now >= self._retry_at:
            self._state = _State.STARTING
            self._deaths.clear()
            self._deaths_in_vain = 0
            for mover in range(self.size):
                if mover not in self._processes:
                    self._try_to_spawn(mover)
        elif self._state is _State.STARTING and all(is_ready(mover) for mover in range(self.size)):
            self._state = _State.USABLE
            self._trial_ends = now + _DEATH_WINDOW_SECONDS
        elif self._state is _State.USABLE and self._trial_ends is not None and now >= self._trial_ends:
            self._trial_ends = None
            logger.info("Movers of blocks work again")

    def kill(self, mover: int) -> None:
        """End a process that hangs; `bury` tells when it is gone."""
        process = self._processes.get(mover)
        if process is not None:
            self._killed.add(mover)
            process.kill()

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the processes, whose pipes must be closed, and kill those that are late; False if some stay."""
        deadline = time.monotonic() + timeout_seconds
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        killed_until = time.monotonic() + _KILLED_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, killed_until - time.monotonic()))
            except subprocess.TimeoutExpired:
                # Somebody is to take its end, however late that comes.
                threading.Thread(target=process.wait, name="kvtier-mover-end", daemon=True).start()
        return all(process.returncode is not None for process in self._processes.values())

    def _are_too_many(self) -> bool:
        if self._state is _State.STARTING or self._trial_ends is not None:
            return bool(self._deaths)
        return len(self._deaths) > 2 * self.size + _SPARE_DEATHS or self._deaths_in_vain > self.size + _SPARE_DEATHS

    def _try_to_spawn(self, mover: int) -> None:
        """Start a process, or give the crew up: a host that has no room for one must not end the engine."""
        if self._state is _State.RESTING:
            return
        settings, descriptors = self._command(mover)
        try:
            self._processes[mover] = start_process("kvtier_connector.io_workers.worker", settings, descriptors)
        except OSError as error:
            self._give_up(time.monotonic(), f"one cannot be started: {error}")

    def _give_up(self, now: float, reason: str) -> None:
        if self._state is _State.RESTING:
            return
        if self._state is _State.STARTING or self._trial_ends is not None:
            self._backoff_seconds = min(2 * self._backoff_seconds, LONGEST_BACKOFF_SECONDS)
        else:
            self._backoff_seconds = self._first_backoff_seconds
            # Once: what follows until they work again is the same news.
            logger.error("Movers of blocks are given up (%s); threads take over, and they are tried again", reason)
        self._state = _State.RESTING
        self._retry_at = now + self._backoff_seconds


class Threads:
    """Movers on threads of the engine's process, for a host that has no room for other processes.

    They wait for the engine's interpreter lock. A thread cannot be killed: one that hangs in the volume is left behind,
    and touches no row that was given away. Scheduler's thread only; `is_wanted` is read by the movers.
    """

    def __init__(self, size: int, make: Callable[[int], Mover]) -> None:
        """Store the settings: how many, and what makes the mover of a number."""
        self._size = size
        self._make = make
        self._threads: dict[int, threading.Thread] = {}
        self.is_wanted = False
        """Whether the movers are to go on."""

    def start(self) -> None:
        """Start what does not run; fewer where the host has no room for all. A second call does nothing."""
        if self.is_wanted:
            return
        self.is_wanted = True
        for number in range(FIRST_THREAD, FIRST_THREAD + self._size):
            if number in self._threads and self._threads[number].is_alive():
                continue
            thread = threading.Thread(target=self._make(number).run, name=f"kvtier-io-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning(
                    "Only %d of %d threads for the volume can be started (%s): raise the container's limit of "
                    "processes",
                    len(self.numbers()),
                    self._size,
                    error,
                )
                return
            self._threads[number] = thread

    def stop(self) -> None:
        """Let each end when it has nothing to do."""
        self.is_wanted = False

    def numbers(self) -> list[int]:
        """Return the numbers of the movers that live."""
        return [number for number, thread in self._threads.items() if thread.is_alive()]

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the threads, whose pipes must be at their end; False if some stay behind."""
        self.is_wanted = False
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.numbers()


FEWEST = 3
"""However few processors there are: so two can store, and one is free for a load, also where writes hang."""

_LOOK_SECONDS = 0.25
_TRIAL_SECONDS = 1.0
"""After so long, processes that were added have begun to work, and it shows whether they help."""
_HOLD_SECONDS = 30.0
"""For so long after they did not help, none is added."""
_IDLE_SECONDS = 60.0
_GAIN = 1.1
_MOST_WAIT_SHARE = 0.2
_TRIPS = 3
"""To the volume for one chunk: open, read, close."""
_CORE_BYTES_PER_SECOND = 2.5e9
"""What a core verifies and copies."""


def enough(processors: int, *, round_trip_seconds: float, chunk_bytes: int) -> int:
    """Return with how many movers every processor has something to do while the others wait for the volume."""
    moving_seconds = max(1, chunk_bytes) / _CORE_BYTES_PER_SECOND
    return round(processors * (1 + _TRIPS * round_trip_seconds / moving_seconds))


class Sizing:
    """Remembers what the last change brought. Scheduler's thread only."""

    def __init__(self, least: int, most: int) -> None:
        """Store the limits."""
        self._least = least
        self._most = most
        self._size = least
        self._looked = self._busy_at = self._hold_until = 0.0
        self._ended = 0
        self._trial: tuple[int, float] | None = None
        """How many there were before the last ones were added, and how many tasks they ended in a second."""

    def expect(self, size: int) -> None:
        """Begin with so many from now on, if that is more: the volume was found to answer slowly."""
        self._least = max(self._least, min(size, self._most))
        self._size = max(self._size, self._least)

    def decide(self, now: float, *, reads: int, ended: int, wait_share: Callable[[], float]) -> int:
        """Return how many movers there are to be.

        Args:
            now: Seconds that never go back.
            reads: How many tasks are open for which a request waits, or may soon.
            ended: How many tasks have ended so far.
            wait_share: Measures, when called, which part of the time the movers could have run they waited for a core.
        """
        if reads:
            self._busy_at = now
        elif now - self._busy_at > _IDLE_SECONDS:
            self._size, self._trial = self._least, None
        seconds = now - self._looked
        if seconds < (_TRIAL_SECONDS if self._trial else _LOOK_SECONDS):
            return self._size
        rate = (ended - self._ended) / seconds
        self._looked, self._ended = now, ended
        trial, self._trial = self._trial, None
        if reads <= self._size:
            # There was not always enough to do, so the rate says nothing.
            return self._size
        if trial is not None and rate < _GAIN * trial[1]:
            self._size, self._hold_until = trial[0], now + _HOLD_SECONDS
        elif self._size < self._most and now >= self._hold_until and wait_share() <= _MOST_WAIT_SHARE:
            self._trial = self._size, rate
            self._size = min(self._most, self._size + max(1, self._size // 2))
        return self._size
