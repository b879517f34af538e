# SPDX-License-Identifier: Apache-2.0
"""Supervisors of I/O workers: start them, replace those that die, kill those that hang, and choose how many there are.

A process that hangs in an uninterruptible system call cannot be killed: it stays until the call returns. Where
processes die again and again, or none can be started, the supervisor gives up for a while and tries again, as a circuit
breaker does. The cause, such as a limit of the pod or a node without memory, may pass.
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

from kvtier_connector.io_workers.worker import UNWANTED, start_process

logger = logging.getLogger("vllm.kvtier.io_workers")

_DEATH_WINDOW_SECONDS = 60.0
_SPARE_DEATHS = 8
_KILLED_SECONDS = 1.0
"""How long `close` waits for killed processes. One that hangs in the volume ends when its call returns."""
LONGEST_BACKOFF_SECONDS = 600.0
"""Each failed attempt doubles the back-off, up to this."""

FEWEST = 3
"""Fewest workers on any host: two can store and one is free for a load, even where writes hang."""
_LOOK_SECONDS = 0.25
_TRIAL_SECONDS = 1.0
"""Time until added processes have begun to work and their effect shows."""
_HOLD_SECONDS = 30.0
"""Time without growth after added processes had no effect."""
_IDLE_SECONDS = 60.0
_GAIN = 1.1
_MOST_WAIT_SHARE = 0.2
_TRIPS = 3
"""Round trips for one chunk: open, read, close."""
_CORE_BYTES_PER_SECOND = 2.5e9
"""Rate at which one core verifies and copies."""


def workers_for(processors: int, *, round_trip_seconds: float, chunk_bytes: int) -> int:
    """Return the number of workers that keeps every processor busy while other workers wait for the volume."""
    moving_seconds = max(1, chunk_bytes) / _CORE_BYTES_PER_SECOND
    return round(processors * (1 + _TRIPS * round_trip_seconds / moving_seconds))


class PoolSize:
    """Chooses the number of workers: few at first, more while more help, few again when idle.

    A volume that answers slowly leaves cores idle, so more workers help. There are enough once workers wait for a core,
    or added workers raised the rate no further. Scheduler's thread only; the caller passes time and measurements.
    """

    def __init__(self, least: int, most: int) -> None:
        """Store the limits."""
        self._least = least
        self._most = most
        self._size = least
        self._looked = self._busy_at = self._hold_until = 0.0
        self._ended = 0
        self._trial: tuple[int, float] | None = None
        """Size before the last growth, and tasks a second at that size."""

    def expect(self, size: int) -> None:
        """Raise the least size: the volume was found to answer slowly."""
        self._least = max(self._least, min(size, self._most))
        self._size = max(self._size, self._least)

    def decide(self, now: float, *, reads: int, ended: int, wait_share: Callable[[], float]) -> int:
        """Return the number of workers to have.

        Args:
            now: Monotonic seconds.
            reads: Open tasks that a request waits for, or may soon wait for.
            ended: Number of tasks that have ended so far.
            wait_share: Measures the share of runnable time that workers spend waiting for a core.
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
            # Workers were idle at times, so the rate shows nothing.
            return self._size
        if trial is not None and rate < _GAIN * trial[1]:
            self._size, self._hold_until = trial[0], now + _HOLD_SECONDS
        elif self._size < self._most and now >= self._hold_until and wait_share() <= _MOST_WAIT_SHARE:
            self._trial = self._size, rate
            self._size = min(self._most, self._size + max(1, self._size // 2))
        return self._size


class Supervisor:
    """The workers of one engine, by number. Scheduler's thread only; no method but `close` waits.

    The methods with a body do what suits workers that neither die nor change in number.
    """

    size: int
    """Number of workers to have."""

    @property
    def is_usable(self) -> bool:
        """Whether tasks can be given to workers now."""
        return True

    def start(self) -> None:
        """Start the workers; returns before they are ready."""
        raise NotImplementedError

    def numbers(self) -> list[int]:
        """Return the numbers of the workers, dead ones included until they are replaced."""
        raise NotImplementedError

    def count(self) -> int:
        """Return the number of usable processes."""
        return 0

    def wait_share(self) -> float:
        """Return the share of runnable time that workers waited for a core since the last call."""
        return 0.0

    def resize(self, size: int) -> None:
        """Start missing workers. The task table orders those with a number from `size` on to end."""

    def reap(self) -> list[int]:
        """Return the numbers of dead workers; the caller ends their tasks and calls `replace`."""
        return []

    def replace(self, worker: int) -> None:
        """Start a worker in the place of a dead one."""

    def note_work(self) -> None:
        """Note that a worker finished a task."""

    def tick(self, is_ready: Callable[[int], bool]) -> None:
        """Start missing workers when it is time to."""

    def kill(self, worker: int) -> None:
        """Kill a worker that hangs, if it can be killed; `reap` returns it when it is gone."""

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the workers, whose pipes must be closed; return False if some stay behind."""
        raise NotImplementedError


class _State(enum.Enum):
    USABLE = "usable"
    GIVEN_UP = "given up"
    """No process is started before the back-off is over."""
    STARTING = "starting"
    """Processes are started again, and some are not ready. Tasks are given to none of them."""


class ProcessSupervisor(Supervisor):
    """Workers that are processes."""

    def __init__(
        self, size: int, command: Callable[[int], tuple[str, list[int]]], *, first_backoff_seconds: float
    ) -> None:
        """Store the settings.

        Args:
            size: Number of workers at first.
            command: Returns settings and inherited descriptors of a worker.
            first_backoff_seconds: Delay before the first new attempt.
        """
        self.size = size
        self._command = command
        self._first_backoff_seconds = first_backoff_seconds
        self._backoff_seconds = first_backoff_seconds
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._killed: set[int] = set()
        self._deaths: deque[float] = deque()
        self._deaths_in_vain = 0
        """Deaths since a worker last finished a task."""
        self._times: dict[int, list[int]] = {}
        """Nanoseconds that a process had run and waited at the last measurement."""
        self._state = _State.USABLE
        self._retry_at = math.inf
        self._trial_ends: float | None = None
        """After a new attempt, a single death before this time ends it."""

    @property
    def is_usable(self) -> bool:
        """Whether tasks can be given to workers now."""
        return self._state is _State.USABLE

    def start(self) -> None:
        """Start the processes."""
        self._start_missing()

    def numbers(self) -> list[int]:
        """Return the numbers of the processes."""
        return list(self._processes)

    def count(self) -> int:
        """Return the number of usable processes."""
        return len(self._processes) if self.is_usable else 0

    def wait_share(self) -> float:
        """Return the share of runnable time that the first and the last process waited for a core."""
        ran = waited = 0
        for worker in {min(self._processes, default=0), max(self._processes, default=0)}:
            with contextlib.suppress(OSError, ValueError, KeyError):
                schedstat = Path(f"/proc/{self._processes[worker].pid}/schedstat").read_text(encoding="ascii")
                times = [int(part) for part in schedstat.split()[:2]]
                before = self._times.get(worker, [0, 0])
                ran, waited = ran + times[0] - before[0], waited + times[1] - before[1]
                self._times[worker] = times
        return max(0, waited) / max(1, ran + waited)

    def resize(self, size: int) -> None:
        """Start missing processes."""
        self.size = size
        self._start_missing()

    def reap(self) -> list[int]:
        """Return the numbers of dead processes."""
        return [worker for worker, process in self._processes.items() if process.poll() is not None]

    def replace(self, worker: int) -> None:
        """Start a process in the place of a dead one, unless too many have died."""
        process = self._processes.pop(worker)
        was_killed = worker in self._killed
        self._killed.discard(worker)
        if worker >= self.size or self._state is _State.GIVEN_UP:
            return
        if process.returncode == UNWANTED:
            # It ended just before the pool grew again.
            self._start_missing()
            return
        now = time.monotonic()
        if not was_killed:
            # A killed one shows that the volume hangs, not that processes cannot live here.
            self._deaths.append(now)
            self._deaths_in_vain += 1
        while self._deaths and self._deaths[0] < now - _DEATH_WINDOW_SECONDS:
            self._deaths.popleft()
        if self._are_too_many():
            self._give_up(now, f"they die again and again, the last with status {process.returncode}")
        else:
            logger.warning("I/O worker %d ended with status %s and is started again", worker, process.returncode)
            self._start_missing()

    def note_work(self) -> None:
        """Note that a process finished a task."""
        self._deaths_in_vain = 0

    def tick(self, is_ready: Callable[[int], bool]) -> None:
        """Start missing processes once the back-off is over; after giving up, use them when all are ready."""
        now = time.monotonic()
        if self._state is _State.GIVEN_UP and now >= self._retry_at:
            self._state = _State.STARTING
            self._deaths.clear()
            self._deaths_in_vain = 0
            self._start_missing()
        elif self._state is _State.STARTING and all(is_ready(worker) for worker in self._processes):
            self._state = _State.USABLE
            self._trial_ends = now + _DEATH_WINDOW_SECONDS
            logger.info("I/O workers are running again")
        elif self._state is _State.USABLE:
            if self._trial_ends is not None and now >= self._trial_ends:
                self._trial_ends = None
            if now >= self._retry_at:
                self._start_missing()

    def kill(self, worker: int) -> None:
        """Kill a process."""
        process = self._processes.get(worker)
        if process is not None:
            self._killed.add(worker)
            process.kill()

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the processes, and kill those that are late."""
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
                # Its exit status must be read, however late it comes.
                threading.Thread(target=process.wait, name="kvtier-worker-end", daemon=True).start()
        return all(process.returncode is not None for process in self._processes.values())

    def _are_too_many(self) -> bool:
        if self._state is _State.STARTING or self._trial_ends is not None:
            return bool(self._deaths)
        return len(self._deaths) > 2 * self.size + _SPARE_DEATHS or self._deaths_in_vain > self.size + _SPARE_DEATHS

    def _start_missing(self) -> None:
        """Start missing processes. Where some can be started, the others are tried again after the back-off."""
        self._retry_at = math.inf
        for worker in range(self.size):
            if worker in self._processes:
                continue
            settings, descriptors = self._command(worker)
            try:
                self._processes[worker] = start_process("kvtier_connector.io_workers.worker", settings, descriptors)
            except OSError as error:
                now = time.monotonic()
                if not self._processes:
                    self._give_up(now, f"none can be started: {error}")
                    return
                logger.warning(
                    "Only %d of %d I/O workers can be started (%s): raise the container's limit of processes",
                    len(self._processes),
                    self.size,
                    error,
                )
                self._retry_at = now + self._first_backoff_seconds
                return

    def _give_up(self, now: float, reason: str) -> None:
        if self._state is _State.GIVEN_UP:
            return
        if self._state is _State.STARTING or self._trial_ends is not None:
            self._backoff_seconds = min(2 * self._backoff_seconds, LONGEST_BACKOFF_SECONDS)
        else:
            self._backoff_seconds = self._first_backoff_seconds
            # Logged once: failed attempts until processes run again are no news.
            logger.error(
                "I/O workers are given up (%s); the engine serves without its disk tier, and they are started again "
                "after %.0f s",
                reason,
                self._backoff_seconds,
            )
        self._state = _State.GIVEN_UP
        self._trial_ends = None
        self._retry_at = now + self._backoff_seconds
        for worker in self._processes:
            self.kill(worker)


class ThreadSupervisor(Supervisor):
    """Workers on threads of this process: for tests, which inject file systems.

    A thread cannot be killed: one that hangs in the volume stays, and touches no row that was given away.
    """

    def __init__(self, size: int, run: Callable[[int], None]) -> None:
        """Store the number of workers, and the function that runs the worker of a number."""
        self.size = size
        self._run = run
        self._threads: dict[int, threading.Thread] = {}

    def start(self) -> None:
        """Start the threads."""
        for number in range(self.size):
            name = f"kvtier-io-{number}"
            thread = self._threads[number] = threading.Thread(target=self._run, args=(number,), name=name, daemon=True)
            thread.start()

    def numbers(self) -> list[int]:
        """Return the numbers of the threads that run."""
        return [number for number, thread in self._threads.items() if thread.is_alive()]

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the threads."""
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not self.numbers()
