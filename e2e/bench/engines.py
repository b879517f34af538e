# SPDX-License-Identifier: Apache-2.0
"""The parent's side of `engine_worker`: start an engine in a process, ask it, end it whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e.bench import models

from kvtier_connector.shm import clear_stale_regions

WORKER = Path(__file__).with_name("engine_worker.py")
START_LIMIT_SECONDS = 300.0
CLOSE_LIMIT_SECONDS = 40.0
LOG_LINES_SHOWN = 30


class EngineFailed(Exception):
    """The engine's process ended, or did not answer in time; the message ends with its log."""


class Engine:
    """One engine; a context manager that ends the process and those it started. One thread."""

    def __init__(self, name: str, settings: Mapping[str, Any], environment: Mapping[str, str], directory: Path) -> None:
        """Start the process and wait until the engine serves.

        Args:
            name: For messages and the names of its files.
            settings: What `engine_worker` reads.
            environment: Of the process.
            directory: For the settings and the log.

        Raises:
            EngineFailed: it does not start.
        """
        self.name = name
        clear_stale_regions()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        plugin = directory / "plugin"
        models.offer_plugin(plugin)
        made = {**environment, "PYTHONPATH": os.pathsep.join([str(plugin), environment["PYTHONPATH"]])}
        if settings["seeds_weights"]:
            made[models.SEEDS_WEIGHTS] = "1"
        self._log = directory / f"{name}.log"
        self._unread = b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(WORKER), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=made,
                # So that it and its children can be ended together.
                start_new_session=True,
            )
        try:
            self.facts: dict[str, Any] = self._answer(START_LIMIT_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        output_tokens: int = 1,
        at_a_time: int = 0,
        limit_seconds: float = 300.0,
    ) -> dict[str, Any]:
        """Submit requests; all at once unless told how many at a time.

        Each has a `seed` and a length in `tokens`, or the `parts` of its prompt. It may also say how many
        `output_tokens` it wants, at which second to `start`, and the number of the one it comes `after`.
        """
        return dict(
            self._ask(
                {
                    "do": "run",
                    "name": f"r{time.monotonic_ns()}",
                    "requests": list(requests),
                    "output_tokens": output_tokens,
                    "at_a_time": at_a_time,
                },
                limit_seconds,
            )
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine's worker, as `models.equip_worker` added it; return its answer."""
        return self._ask({"do": "call", "method": method, "arguments": arguments}, 60.0)[0]

    def forget(self, *, cpu_tier: bool = False) -> None:
        """Empty the engine's own prefix cache, and the CPU tier too if asked; the volume keeps what it has."""
        if not self._ask({"do": "reset", "connector": cpu_tier}, 60.0):
            raise EngineFailed(f"{self.name}: the prefix cache cannot be emptied: blocks are still in use")

    def close(self) -> None:
        """End the engine at once, as a crash would: what the volume has by now is all that the next one finds."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        # Freeing pinned and GPU memory takes its children a while, and the next engine needs it.
        deadline = time.monotonic() + CLOSE_LIMIT_SECONDS
        while _is_group_alive(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        clear_stale_regions()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the engine."""
        self.close()

    def _ask(self, command: Mapping[str, Any], limit_seconds: float) -> Any:
        self._send(command)
        return self._answer(limit_seconds)

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineFailed(f"{self.name}: ended\n{self._tail()}") from error

    def _answer(self, limit_seconds: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(min(1.0, max(0.0, deadline - time.monotonic()))):
                    # A child may hold the pipe open after the process itself is gone, so its end alone says nothing.
                    if self._process.poll() is not None:
                        raise EngineFailed(f"{self.name}: ended with {self._process.returncode}\n{self._tail()}")
                    if time.monotonic() >= deadline:
                        raise EngineFailed(f"{self.name}: no answer in {limit_seconds:.0f} s\n{self._tail()}")
                    continue
                data = os.read(self._process.stdout.fileno(), 1 << 20)
                if not data:
                    raise EngineFailed(f"{self.name}: ended\n{self._tail()}")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


def _is_group_alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in brackets may hold spaces; after it come state, parent and process group.
            state, _, found = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False
