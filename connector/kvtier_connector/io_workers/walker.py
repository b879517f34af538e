# SPDX-License-Identifier: Apache-2.0
"""Walks the root of a tier in a process of its own: a million names read by the engine's would slow each of its steps.

Run as ``python -m kvtier_connector.io_workers.walker <settings as JSON>``; its findings go to its output in batches. It
ends with its engine, or when its output is closed.
"""

from __future__ import annotations

import json
import marshal
import os
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.io_workers.worker import die_with, lower_priority, start_process
from kvtier_connector.store.walks import Batch, WalkLostError, walk_here

_LENGTH = struct.Struct("=Q")
_ASK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class WalkerSettings:
    """What the process is told."""

    parent: int
    root: str
    may_write: bool
    threads: int


class WalkProcess:
    """A `Walk` that another process does; the thread that asks waits for it without the interpreter's lock."""

    def __init__(self, threads: int) -> None:
        """Store how many directories are read at once."""
        self._threads = threads

    def __call__(self, root: Path, *, may_write: bool, is_stopped: Callable[[], bool]) -> Iterator[Batch]:
        """Walk, as `Walk` promises."""
        settings = WalkerSettings(parent=os.getpid(), root=str(root), may_write=may_write, threads=self._threads)
        reader, writer = os.pipe()
        try:
            process = start_process("kvtier_connector.io_workers.walker", json.dumps(asdict(settings)), stdout=writer)
        except OSError as error:
            os.close(reader)
            raise WalkLostError(f"no process can be started: {error}") from error
        finally:
            os.close(writer)
        try:
            with os.fdopen(reader, "rb", buffering=0) as pipe:
                while (data := _receive(pipe.fileno(), is_stopped)) is not None:
                    if not data:
                        return
                    # Each is the other end's of the same release.
                    message, sizes = marshal.loads(data)  # noqa: S302 - our own process
                    if isinstance(message, str):
                        raise StoreUnavailable(message)
                    yield Batch(message, sizes)
            if not is_stopped():
                raise WalkLostError(f"the process ended with {process.wait()}")
        finally:
            # One that hangs in the volume ends when the call returns.
            process.kill()
            try:
                process.wait(_ASK_SECONDS)
            except subprocess.TimeoutExpired:
                # Somebody is to take its end, however late that comes.
                threading.Thread(target=process.wait, name="kvtier-walker-end", daemon=True).start()


def _receive(pipe: int, is_stopped: Callable[[], bool]) -> bytes | None:
    """Return the next message, empty for the end of the walk; None where there is no more of either."""
    head = _read(pipe, _LENGTH.size, is_stopped)
    if head is None:
        return None
    return _read(pipe, _LENGTH.unpack(head)[0], is_stopped)


def _read(pipe: int, count: int, is_stopped: Callable[[], bool]) -> bytes | None:
    data = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(data) < count:
        while not poll.poll(_ASK_SECONDS * 1000):
            if is_stopped():
                return None
        piece = os.read(pipe, count - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def main(settings: WalkerSettings) -> None:
    """Walk, and say what is there."""
    die_with(settings.parent)
    lower_priority()
    output = sys.stdout.buffer

    def send(data: bytes) -> None:
        output.write(_LENGTH.pack(len(data)) + data)
        output.flush()

    try:
        for batch in walk_here(Path(settings.root), may_write=settings.may_write, threads=settings.threads):
            send(marshal.dumps((batch.names, batch.sizes)))
    except StoreUnavailable as error:
        send(marshal.dumps((str(error), {})))
    else:
        send(b"")


if __name__ == "__main__":
    main(WalkerSettings(**json.loads(sys.argv[1])))
