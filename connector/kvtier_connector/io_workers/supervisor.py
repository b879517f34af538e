# SPDX-License-Identifier: Apache-2.0
"""A supervisor of worker processes: it starts them, replaces those that die, and kills those that hang.

A process that hangs in an uninterruptible system call cannot be killed: it stays until the call returns. Where
processes die and finish no task in between, or none can be started, the supervisor gives up for a while and tries
again, as a circuit breaker does. The cause, such as a limit of the pod or a node without memory, may pass.
"""

from __future__ import annotations

import enum
import logging
import math
import subprocess
import threading
import time
from collections.abc import Callable

from kvtier_connector.io_workers import short_calls

logger = logging.getLogger("vllm.kvtier.io_workers")

START_SECONDS = 20.0
"""Longest start of a process on a busy host."""
_LONGEST_BACKOFF = 20
"""Each failed attempt doubles the back-off, up to so many times the first one."""
_KILLED_SECONDS = 1.0
"""How long `close` waits for killed processes. One that hangs in the volume ends when its call returns."""


class WorkerThread(threading.Thread):
    """A worker on a thread of this process, for tests, which inject file systems.

    It has the methods of a process, and cannot be killed: one that hangs in the volume stays, and touches no row that
    was given away.
    """

    pid = 0
    returncode = property(lambda self: self.poll())

    def __init__(self, run: Callable[[], None]) -> None:
        """Start the thread."""
        super().__init__(target=run, name="kvtier-worker", daemon=True)
        self.start()

    def poll(self) -> int | None:
        """Return 0 when the thread has ended."""
        return None if self.is_alive() else 0

    def kill(self) -> None:
        """Do nothing."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return 0


WorkerProcess = subprocess.Popen[bytes] | WorkerThread


class _State(enum.Enum):
    USABLE = "usable"
    GIVEN_UP = "given up"
    """No process is started before the back-off is over."""
    STARTING = "starting"
    """Processes are started again, and some are not ready. Tasks are given to none of them."""


class Supervisor:
    """The workers of one engine, by number. Scheduler's thread only; no method but `close` waits."""

    def __init__(
        self,
        size: int,
        launch: Callable[[int], WorkerProcess],
        *,
        what: str = "I/O workers",
        first_backoff_seconds: float,
        spare_deaths: int = 8,
    ) -> None:
        """Store the settings; `launch` starts the worker of a number, or raises OSError.

        So many more than `size` may die without one task that was done in between.
        """
        self.size, self._spare_deaths = size, spare_deaths
        self._launch = launch
        self._what = what
        self._first_backoff_seconds = self._backoff_seconds = first_backoff_seconds
        self._processes: dict[int, WorkerProcess] = {}
        self._killed: set[int] = set()
        self._deaths_in_vain = 0
        """Deaths since a worker last finished a task."""
        self._state = _State.USABLE
        self._retry_at = math.inf

    @property
    def is_usable(self) -> bool:
        """Whether tasks can be given to workers now."""
        return self._state is _State.USABLE

    def start(self) -> None:
        """Start missing workers; returns before they are ready. Those that cannot be started are tried again later."""
        self._retry_at = math.inf
        for worker in range(self.size):
            if worker in self._processes:
                continue
            try:
                self._processes[worker] = self._launch(worker)
            except OSError as error:
                if not self._processes:
                    self.give_up(f"none can be started: {error}")
                    return
                logger.warning(
                    "Only %d of %d I/O workers can be started (%s): raise the container's limit of processes",
                    len(self._processes),
                    self.size,
                    error,
                )
                self._retry_at = time.monotonic() + self._first_backoff_seconds
                return

    def numbers(self) -> list[int]:
        """Return the numbers of the workers, dead ones included until they are replaced."""
        return list(self._processes)

    def count(self) -> int:
        """Return the number of usable workers."""
        return len(self._processes) if self.is_usable else 0

    def reap(self) -> list[int]:
        """Return the numbers of dead workers; the caller ends their tasks and calls `replace`."""
        has_ended = short_calls.has_ended_child()
        found = self._processes.items()
        statuses = ((worker, each.poll() if has_ended else each.returncode) for worker, each in found)
        return [worker for worker, status in statuses if status is not None]

    def replace(self, worker: int) -> None:
        """Start a worker in the place of a dead one, unless too many have died."""
        status = self._processes.pop(worker).poll()
        # A killed one shows that the volume hangs, not that processes cannot live here.
        is_killed = worker in self._killed
        self._killed.discard(worker)
        self._deaths_in_vain += not is_killed
        if self._state is _State.GIVEN_UP:
            return
        if not is_killed and self._deaths_in_vain > self.size + self._spare_deaths:
            self.give_up(f"they die and finish no task, the last with status {status}")
        else:
            logger.warning("%s: process %d ended with status %s and is started again", self._what, worker, status)
            self.start()

    def note_work(self) -> None:
        """Note that a worker finished a task."""
        self._deaths_in_vain = 0
        self._backoff_seconds = self._first_backoff_seconds

    def tick(self, is_ready: Callable[[int], bool]) -> None:
        """Start missing workers once the back-off is over; after giving up, use them when all are ready."""
        is_due = time.monotonic() >= self._retry_at
        if self._state is _State.GIVEN_UP and is_due:
            self._state = _State.STARTING
            self.start()
        elif self._state is _State.STARTING and all(is_ready(worker) for worker in self._processes):
            self._state = _State.USABLE
            logger.info("%s are running again", self._what)
        elif self._state is _State.USABLE and is_due:
            self.start()

    def kill(self, worker: int) -> None:
        """Kill a worker that hangs, if it can be killed; `reap` returns it when it is gone."""
        process = self._processes.get(worker)
        if process is not None:
            self._killed.add(worker)
            process.kill()

    def give_up(self, reason: str) -> None:
        """Kill all workers, and start them again after the back-off."""
        if self._state is _State.GIVEN_UP:
            return
        if self._backoff_seconds == self._first_backoff_seconds:
            # Logged once: failed attempts until workers do something again are no news.
            logger.error(
                "%s are given up (%s); the engine serves without its disk tier and starts them again after %.0f s",
                self._what,
                reason,
                self._backoff_seconds,
            )
        self._state = _State.GIVEN_UP
        self._retry_at = time.monotonic() + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, _LONGEST_BACKOFF * self._first_backoff_seconds)
        for worker in self._processes:
            self.kill(worker)

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the workers, whose pipes must be closed, and kill those that are late; False if some stay behind."""
        deadline = time.monotonic() + timeout_seconds
        left = [process for process in self._processes.values() if not _ends(process, deadline)]
        for process in left:
            process.kill()
        killed_until = time.monotonic() + _KILLED_SECONDS
        left = [process for process in left if not _ends(process, killed_until)]
        for process in left:
            # Its exit status must be read, however late it comes.
            threading.Thread(target=process.wait, name="kvtier-worker-end", daemon=True).start()
        return not left


def _ends(process: WorkerProcess, deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True
