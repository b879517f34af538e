# SPDX-License-Identifier: Apache-2.0
"""Asks the volume which blocks of a prompt it has, in a worker process that does nothing else.

A lookup touches no buffer, so it needs no task table: questions and answers go through two pipes. The worker makes up
to `MOST_CALLS` calls at once, since a network volume answers each after a while. A volume that hangs makes the engine
give the worker up: its questions end without an answer, and another worker is started after a while.

Run as ``python -m kvtier_connector.io_workers.lookups <settings as JSON>``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import marshal
import math
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

from kvtier_connector.io_workers import short_calls
from kvtier_connector.io_workers.supervisor import START_SECONDS, Supervisor, WorkerProcess, WorkerThread
from kvtier_connector.io_workers.worker import PoolSettings, die_with, file_system, lower_priority, start_process
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import BlockKey

logger = logging.getLogger("vllm.kvtier.io_workers")

MOST_CALLS = 32
"""Calls to the volume at once; a prefix of so many blocks squared is found in two rounds after its first block."""
LOOKUP_SECONDS = 2.0
"""A volume that has not answered a lookup for so long hangs: computing is quicker."""
_QUICK_SECONDS = 0.0003
"""A volume that answers sooner is asked by halving, one call after the other: fewer calls, and no thread waits."""
_READY = 0
"""Number of the message by which a worker says that it is ready; questions have other numbers."""
_QUESTIONS = 8
"""Questions that a worker works at at once."""
_LENGTH = struct.Struct("=I")
_READ_BYTES = 1 << 16
_BACKOFF_SECONDS = 1.0

Look = Callable[[BlockKey], bool | Fault]
"""Says whether the volume has a block; `BlockStore.look_up`."""
LookAt = Callable[[Sequence[BlockKey]], Sequence[bool | Fault]]


class BlockQuery(NamedTuple):
    """Blocks of one KV group that a request would load."""

    keys: tuple[BlockKey, ...]
    is_prefix: bool
    """Whether they are in the order of the prompt, and none is of use behind one that is absent."""
    is_exact: bool = False
    """Of a prefix: look at each of its blocks, and not at some of them."""


class Found(NamedTuple):
    """Result of a lookup."""

    present: int
    """Of a prefix, how many blocks from the first on are there; else how many of the blocks."""
    seen: tuple[int, ...]
    """Numbers of the blocks that are there and were looked at."""
    calls: int = 0


class Answer(NamedTuple):
    """The end of one question."""

    number: int
    found: Found | Fault | None
    """None: the volume did not answer in time."""


def find(question: BlockQuery, look_at: LookAt, *, now: Callable[[], float] = time.monotonic) -> Found | Fault:
    """Look blocks up with few calls; `look_at` looks at several at once.

    A prefix costs one call where its first block is absent. Else the last block and some between are looked at, and
    then those around the end: two rounds for a thousand blocks.
    """
    present: dict[int, bool] = {}
    faults: list[Fault] = []

    def ask(numbers: Sequence[int]) -> list[bool]:
        answers = look_at([question.keys[number] for number in numbers])
        faults.extend(answer for answer in answers if isinstance(answer, Fault))
        found = [answer is True for answer in answers]
        present.update(zip(numbers, found, strict=True))
        return found

    began, end = now(), len(question.keys)
    if not question.is_prefix:
        end = sum(ask(range(end)))
    elif not any(ask(range(min(end, 1)))):
        end = 0
    else:
        most = 1 if now() - began < _QUICK_SECONDS else MOST_CALLS
        # The last block that is known to be there; `end` is the first that is known not to be.
        low = 0
        points = sorted({*_spread(low, end, max(1, most - 1)), end - 1} - {0})
        while points and not faults:
            for number, is_there in zip(points, ask(points), strict=True):
                if not is_there:
                    end = number
                    break
                low = number
            points = _spread(low, end, most)
        if question.is_exact and not faults:
            rest = [number for number in range(low) if number not in present]
            end = next((number for number, found in zip(rest, ask(rest), strict=True) if not found), end)
    seen = tuple(number for number, is_there in present.items() if is_there)
    return faults[-1] if faults else Found(end, seen, len(present))


def _spread(low: int, high: int, most: int) -> list[int]:
    """Return at most so many numbers between two others, evenly."""
    gap = high - low - 1
    if gap <= most:
        return list(range(low + 1, high))
    return [low + (high - low) * place // (most + 1) for place in range(1, most + 1)]


class LookupWorker:
    """The lookups of one engine. Scheduler's thread only; nothing here waits for the volume."""

    def __init__(
        self, settings: PoolSettings, *, fs: FileSystem = LOCAL, lookup_seconds: float = LOOKUP_SECONDS
    ) -> None:
        """Store the settings; call `start`.

        With other system calls than the real ones a thread of this process does the lookups, for tests. A question that
        is open for longer than `lookup_seconds` is given up together with the worker.
        """
        self._settings, self._fs = settings, fs
        self._lookup_seconds = lookup_seconds
        self._supervisor = Supervisor(
            1, self._launch, what="Lookups", first_backoff_seconds=_BACKOFF_SECONDS, spare_deaths=-1
        )
        self._pipe: _Pipe | None = None
        """To the last worker; None after it was given up."""
        self._open: dict[int, float] = {}
        """By number of the question, when it is given up."""
        self._is_closed = False
        self._started_at = self._answered_at = -math.inf
        self.is_ready = False
        """Whether the worker has begun to work."""
        self._done: list[Answer] = []

    def start(self) -> None:
        """Start the worker."""
        self._supervisor.start()

    @property
    def is_stuck(self) -> bool:
        """Whether a question would not be answered now: the last worker hung or died, and none was started since."""
        return not self._is_closed and (self._pipe is None or not self._supervisor.is_usable)

    def submit(self, number: int, question: BlockQuery) -> None:
        """Ask; `collect` returns the answer under the same number, which is more than 0."""
        if self._pipe is None or not self._supervisor.is_usable:
            self._done.append(Answer(number, None))
            return
        self._open[number] = time.monotonic() + self._lookup_seconds
        keys = [tuple(key) for key in question.keys]
        self._pipe.send((number, keys, question.is_prefix, question.is_exact))

    def wait(self, seconds: float) -> bool:
        """Wait for an answer; say whether one can be collected."""
        return self._pipe is not None and bool(self._open) and self._pipe.wait(seconds)

    def collect(self) -> list[Answer]:
        """Return the questions that have ended since the last call."""
        for number, present, seen, calls, fault in self._pipe.receive() if self._pipe else ():
            if number == _READY:
                self.is_ready = True
                self._open = dict.fromkeys(self._open, time.monotonic() + self._lookup_seconds)
            elif self._open.pop(number, None) is not None:
                self._answered_at = time.monotonic()
                self._supervisor.note_work()
                self._done.append(Answer(number, Fault[fault] if fault else Found(present, seen, calls)))
        if self._pipe is not None and self._is_late():
            self._give_up()
            # Now, since a process that hangs in the kernel dies only when the volume answers.
            self._supervisor.give_up("the volume does not answer them")
        if not self._is_closed:
            for worker in self._supervisor.reap():
                self._give_up()
                self._supervisor.replace(worker)
            self._supervisor.tick(lambda _: self.is_ready)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the worker; questions that are open end without an answer."""
        self._is_closed = True
        self._give_up()
        self._supervisor.close(0.0)

    def _is_late(self) -> bool:
        if not self.is_ready:
            return time.monotonic() - self._started_at > START_SECONDS
        # A burst of questions waits in line: a worker that still answers does not hang.
        quiet_until = self._answered_at + self._lookup_seconds
        return bool(self._open) and max(min(self._open.values()), quiet_until) < time.monotonic()

    def _give_up(self) -> None:
        """Expect nothing more of the last worker."""
        if self._pipe is not None:
            self._pipe.close()
        self._pipe, self.is_ready = None, False
        self._done += [Answer(number, None) for number in self._open]
        self._open.clear()

    def _launch(self, _number: int) -> WorkerProcess:
        ends: list[int] = []
        try:
            ends += os.pipe()
            ends += os.pipe()
            reader, its_writer, its_reader, writer = ends
            if self._fs is not LOCAL:
                server = _Server(self._settings.open_volume(self._fs).look_up, its_reader, its_writer)
                worker: WorkerProcess = WorkerThread(server.run_and_close)
            else:
                arguments = json.dumps([os.getpid(), its_reader, its_writer, asdict(self._settings)])
                worker = start_process("kvtier_connector.io_workers.lookups", arguments, [its_reader, its_writer])
                os.close(its_reader)
                os.close(its_writer)
        except OSError:
            for end in ends:
                os.close(end)
            raise
        self._pipe, self.is_ready, self._started_at = _Pipe(reader, writer), False, time.monotonic()
        return worker


class _Pipe:
    """Both ways between engine and worker, at the engine's end. Nothing waits but `wait`."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._unsent = bytearray()
        self._received = bytearray()
        self._buffer = ctypes.create_string_buffer(_READ_BYTES)

    def send(self, message: tuple[Any, ...]) -> None:
        self._unsent += _framed(message)
        self._flush()

    def receive(self) -> Iterator[tuple[Any, ...]]:
        self._flush()
        with contextlib.suppress(BlockingIOError):
            while data := short_calls.read(self._reader, self._buffer):
                self._received += data
        while (message := _cut(self._received)) is not None:
            yield message

    def wait(self, seconds: float) -> bool:
        self._flush()
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._reader)

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                del self._unsent[: short_calls.write(self._writer, bytes(self._unsent[:_READ_BYTES]))]


def _framed(message: tuple[Any, ...]) -> bytes:
    data = marshal.dumps(message)
    return _LENGTH.pack(len(data)) + data


def _cut(received: bytearray) -> tuple[Any, ...] | None:
    """Take the first whole message off the bytes that were received."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    message: tuple[Any, ...] = marshal.loads(received[_LENGTH.size : end])  # noqa: S302 - our own process
    del received[:end]
    return message


class _Server:
    """Answers questions: the worker's side. `run` belongs to one thread; several send answers."""

    def __init__(self, look: Look, reader: int, writer: int) -> None:
        self._look = look
        self._reader, self._writer = reader, writer
        self._sending = threading.Lock()
        self._calls = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="kvtier-look")
        self._questions = ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="kvtier-find")

    def run(self) -> None:
        """Work until the engine closes its end of the pipe."""
        self._send(_READY, Found(0, ()))
        received = bytearray()
        while data := os.read(self._reader, _READ_BYTES):
            received += data
            while (message := _cut(received)) is not None:
                self._questions.submit(self._answer, *message)

    def run_and_close(self) -> None:
        """The same on a thread of the engine; calls that hang are waited for."""
        self.run()
        self._questions.shutdown()
        self._calls.shutdown()
        os.close(self._reader)
        os.close(self._writer)

    def _answer(self, number: int, keys: Iterable[tuple[Any, ...]], is_prefix: bool, is_exact: bool) -> None:
        try:
            found = find(BlockQuery(tuple(BlockKey(*key) for key in keys), is_prefix, is_exact), self._look_at)
        except Exception:
            # The edge of the thread: a store reports what it expects by itself, so this is a defect of ours.
            logger.exception("A lookup failed")
            found = Fault.IO
        self._send(number, found)

    def _look_at(self, keys: Sequence[BlockKey]) -> Sequence[bool | Fault]:
        return [self._look(keys[0])] if len(keys) == 1 else list(self._calls.map(self._look, keys))

    def _send(self, number: int, found: Found | Fault) -> None:
        fields = (0, (), 0, found.name) if isinstance(found, Fault) else (*found, "")
        view = memoryview(_framed((number, *fields)))
        with self._sending, contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(self._writer, view) :]


def main(parent: int, reader: int, writer: int, settings: PoolSettings) -> None:
    """Run a worker for lookups; it ends when its engine closes the pipe, or ends."""
    die_with(parent)
    lower_priority()
    _Server(settings.open_volume(file_system(settings.file_system)).look_up, reader, writer).run()
    # A thread that hangs in the volume must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    _parent, _reader, _writer, _fields = json.loads(sys.argv[1])
    main(_parent, _reader, _writer, PoolSettings(**_fields))
