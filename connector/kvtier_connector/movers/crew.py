# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of the movers, replaces those that die, and kills those that hang.

A process that hangs in an uninterruptible system call cannot be killed: it stays until the call returns, and counts
against the crew meanwhile.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("vllm.kvtier.movers")

_PACKAGE = str(Path(__file__).parents[2])
_DEATH_WINDOW_SECONDS = 60.0
_SPARE_DEATHS = 8

_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""Copies into the CPU tier of 64 KiB and more bypass the processor's caches: it is the GPU that reads them next. That
saves reading each line before it is written, a third of the memory traffic. Other C libraries ignore it."""


class Crew:
    """The processes by their number. Scheduler's thread only."""

    def __init__(self, size: int, command: Callable[[int], tuple[str, list[int]]]) -> None:
        """Store the settings.

        Args:
            size: How many movers.
            command: For a mover's number, its settings and the descriptors that it inherits.
        """
        self._size = size
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._deaths: deque[float] = deque()
        self._is_given_up = False

    def start(self) -> None:
        """Start the processes; returns before they have begun to work."""
        for mover in range(self._size):
            self._try_to_spawn(mover)

    @property
    def is_usable(self) -> bool:
        """Whether the processes live; False for good once they died too often, or one could not be started."""
        return not self._is_given_up

    def bury(self) -> list[int]:
        """Return the numbers of those that died since the last call; `replace` them when their tasks are settled."""
        return [mover for mover, process in self._processes.items() if process.poll() is not None]

    def replace(self, mover: int) -> None:
        """Start another process in the place of a dead one, unless too many died."""
        process = self._processes.pop(mover)
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths and self._deaths[0] < now - _DEATH_WINDOW_SECONDS:
            self._deaths.popleft()
        if len(self._deaths) > 2 * self._size + _SPARE_DEATHS:
            if not self._is_given_up:
                logger.error("Movers of blocks die again and again (last: %s); threads take over", process.returncode)
            self._is_given_up = True
            return
        logger.warning("Mover %d of blocks ended with %s and is started again", mover, process.returncode)
        self._try_to_spawn(mover)

    def kill(self, mover: int) -> None:
        """End a process that hangs; `bury` tells when it is gone."""
        process = self._processes.get(mover)
        if process is not None:
            process.kill()

    def close(self, timeout_seconds: float) -> bool:
        """Wait for the processes, whose pipes must be closed, and kill those that are late; False if some stay."""
        deadline = time.monotonic() + timeout_seconds
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes.values():
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                continue
        return all(process.returncode is not None for process in self._processes.values())

    def _try_to_spawn(self, mover: int) -> None:
        """Start a process, or give the crew up: a host that has no room for one must not end the engine."""
        if self._is_given_up:
            return
        try:
            self._spawn(mover)
        except OSError as error:
            logger.error("A mover of blocks cannot be started (%s); threads take over", error)  # noqa: TRY400 - no defect of ours
            self._is_given_up = True

    def _spawn(self, mover: int) -> None:
        settings, descriptors = self._command(mover)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([_PACKAGE, *(path for path in sys.path if path)])
        tunables = environment.get("GLIBC_TUNABLES")
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_TUNABLES}" if tunables else _TUNABLES
        self._processes[mover] = subprocess.Popen(
            [sys.executable, "-m", "kvtier_connector.movers.process", settings],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=environment,
        )
