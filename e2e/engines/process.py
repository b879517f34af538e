# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own: the parent calls its methods through a pipe, the process answers each.

A new process proves that only the volume carried the blocks over.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from kvtier_connector.pod_tools.shm import clear_stale_regions

END_SECONDS = 40.0
LOG_LINES_SHOWN = 30


class EngineEnded(Exception):
    """The engine's process ended, or did not answer in time; the message ends with its log."""


class EngineProcess:
    """One engine; a context manager that ends the process and all that it started. Use it from one thread."""

    def __init__(self, make: Callable[..., Any], *arguments: Any, method: str, log: Path, limit_seconds: float) -> None:
        """Start the process and wait until the engine serves.

        Args:
            make: returns the engine, in its process; it has methods to call, and `facts`.
            arguments: of `make`.
            method: `fork` or `spawn`.
            log: file for what the engine prints.
            limit_seconds: for the start, and for each call without a limit of its own.

        Raises:
            EngineEnded: it does not start.
        """
        clear_stale_regions()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._limit_seconds = limit_seconds
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, log, make, arguments))
        began = time.monotonic()
        self._process.start()
        theirs.close()
        try:
            self.facts: dict[str, Any] = self._receive(limit_seconds)
        except BaseException:
            self.kill()
            raise
        self.start_seconds = time.monotonic() - began

    def call(self, name: str, *args: Any, limit_seconds: float | None = None) -> Any:
        """Return what a method of the engine returns; raise EngineEnded."""
        with contextlib.suppress(OSError):  # the answer says how it ended
            self._pipe.send((name, args))
        return self._receive(limit_seconds or self._limit_seconds)

    def kill(self) -> None:
        """End the engine and all that it started at once, as a node that is gone would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()
        # Freeing pinned and GPU memory takes its children a while, and the next engine needs it.
        deadline = time.monotonic() + END_SECONDS
        while _is_group_alive(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        clear_stale_regions()

    def _receive(self, limit_seconds: float) -> Any:
        deadline = time.monotonic() + limit_seconds
        # A child may hold the pipe open after the process itself is gone, so its end alone says nothing.
        while not self._pipe.poll(min(1.0, max(0.0, deadline - time.monotonic()))) and self._process.is_alive():
            if time.monotonic() >= deadline:
                raise EngineEnded(f"no answer within {limit_seconds:.0f} s\n{self._tail()}")
        try:
            found = self._pipe.recv() if self._pipe.poll() else self._ended()
        except (EOFError, OSError):
            found = self._ended()
        if isinstance(found, EngineEnded):
            raise found
        return found

    def _ended(self) -> EngineEnded:
        self._process.join(1.0)
        return EngineEnded(f"the engine's process ended with {self._process.exitcode}\n{self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-LOG_LINES_SHOWN:])

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine, unless it was killed before."""
        if not self._pipe.closed:
            self.kill()


def _serve(pipe: Any, log: Path, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    engine = None
    try:
        engine = make(*arguments)
        pipe.send(engine.facts)
        while True:
            name, args = pipe.recv()
            pipe.send(getattr(engine, name)(*args))
    except (EOFError, ConnectionError):
        if engine is not None:
            engine.shut_down()
    except BaseException as error:  # noqa: BLE001  whatever ended it is the result
        traceback.print_exc()
        pipe.send(EngineEnded(f"{type(error).__name__}: {error}"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and of the engine would keep the process, and servers that it started outlive it.
    os.killpg(0, signal.SIGKILL)


def _is_group_alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold spaces; after it come state, parent and process group.
            state, _, found = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False
