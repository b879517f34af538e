# SPDX-License-Identifier: Apache-2.0
"""Movers on threads of the engine's process, for a host that has no room for other processes.

They wait for the engine's interpreter lock. A thread cannot be killed: one that hangs in the volume is left behind, and
touches no row that was given away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvtier_connector.movers.board import FIRST_THREAD
from kvtier_connector.movers.mover import Mover

logger = logging.getLogger("vllm.kvtier.movers")


class Threads:
    """Starts and ends the threads. Scheduler's thread only; `is_wanted` is read by the movers."""

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
