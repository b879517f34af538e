# SPDX-License-Identifier: Apache-2.0
"""Processes that are measured: the time that they take of processors, and their memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_END_SECONDS = 120


def until(condition: Callable[[], object], *, seconds: float, pause: float = 0.2) -> float:
    """Wait until the condition holds and return the seconds that took; raise TimeoutError if they are not enough."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{getattr(condition, '__name__', condition)} does not hold after {seconds:.0f} s")
        time.sleep(pause)
    return time.monotonic() - began


@dataclass
class MeasuredProcess:
    """A process, and the file that it prints to."""

    process: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> float:
        """Return the processor time that it used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_bytes(self, which: str = "VmRSS") -> int:
        """Return the memory that it holds now, or with `VmHWM` the most that it held."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(f"{which}:")).split()[1])


@contextmanager
def running(log: Path, module: str, *arguments: str, **environment: str) -> Iterator[MeasuredProcess]:
    """Run a module in the folder of its log, and end it gracefully unless it has ended."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment},
            cwd=log.parent,
            stdout=file,
            stderr=file,
        )
    try:
        yield MeasuredProcess(process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()
