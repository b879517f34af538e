# SPDX-License-Identifier: Apache-2.0
"""Processes that stand for containers: start them below a launcher, end them, find those of an earlier run.

The environment of a container holds no mark of ours. Its processes are recognised by a TMPDIR or working directory
below the directory of the pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvtier_localcluster.errors import StartFailed
from kvtier_localcluster.node import launcher

_LEFTOVER_SECONDS = 5
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command to execute, with its environment and directories."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path

    def program(self) -> str:
        """Return the file to execute; `python3` is the interpreter that we run in.

        Raises:
            StartFailed: there is no such program.
        """
        if not self.command:
            raise StartFailed("no command specified: images are not pulled, so a container must say what it executes")
        name = self.command[0]
        if name in ("python", "python3"):
            return sys.executable
        found = shutil.which(name, path=self.environment.get("PATH", ""))
        if found is None:
            where = "no such file or directory" if "/" in name else "executable file not found in $PATH"
            raise StartFailed(f'exec: "{name}": {where}')
        return found


class ContainerProcess:
    """One running container, or a command run inside one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Use `start`."""
        self._process = process

    @classmethod
    async def start(
        cls,
        launch: Launch,
        output: int | IO[bytes],
        errors: int = asyncio.subprocess.STDOUT,
        *,
        has_input: bool = False,
    ) -> ContainerProcess:
        """Start the launcher, which starts the command; raises StartFailed where there is nothing to execute.

        A command that has input waits for `feed`.
        """
        order = {
            "parent": os.getpid(),
            "program": launch.program(),
            "command": list(launch.command),
            "environment": dict(launch.environment),
            "directory": str(launch.directory),
            "input": has_input,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", launcher.__file__),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=errors,
            env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            cwd=launch.directory,
            start_new_session=True,  # Ctrl-C in the terminal is for the cluster, which ends its pods in order
        )
        if process.stdin is not None:
            process.stdin.write(launcher.encode(order))
            with contextlib.suppress(ConnectionError):  # it died at once: its exit status says so
                await process.stdin.drain()
            if not has_input:
                process.stdin.close()
        return cls(process)

    @property
    def pid(self) -> int:
        """Return the launcher's process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Return the exit code once every process of the container has ended."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def pour(self, send: Callable[[int, bytes], Awaitable[None]]) -> None:
        """Pass on what the command says, as 1 and 2, until it ends; only for a process started with two pipes."""

        async def pump(number: int, stream: asyncio.StreamReader | None) -> None:
            while stream is not None and (chunk := await stream.read(_CHUNK_BYTES)):
                await send(number, chunk)

        await asyncio.gather(pump(1, self._process.stdout), pump(2, self._process.stderr))

    async def feed(self, pieces: AsyncIterator[bytes]) -> None:
        """Give the command what it reads, to its end; only for a process started with input.

        A command may end before it has read all; the rest is dropped.
        """
        stream = self._process.stdin
        async for piece in pieces:
            with contextlib.suppress(ConnectionError):
                if stream is not None:
                    stream.write(piece)
                    await stream.drain()
        if stream is not None:
            stream.close()

    def terminate(self) -> None:
        """Ask the main process to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End every process of the container now."""
        self._signal(launcher.END_NOW)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def end_leftovers(pods: Path) -> int:
    """Kill the processes of pods whose node was killed together with its launchers; return how many there were."""
    ended = set()
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    while (found := _processes_below(pods)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended.update(found)
        time.sleep(0.02)
    return len(ended)


def _processes_below(pods: Path) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # not ours, or it has just ended
            places = [(entry / "cwd").readlink()]
            variables = (entry / "environ").read_bytes().split(b"\0")
            places += [Path(os.fsdecode(each[7:])).resolve() for each in variables if each.startswith(b"TMPDIR=")]
            if any(place.is_relative_to(pods) for place in places):
                found.add(int(entry.name))
    return found
