# SPDX-License-Identifier: Apache-2.0
"""Asks the volume which blocks of a prompt it has, in a worker process that does nothing else.

A lookup touches no buffer, so it needs no task table: questions and answers go through two pipes. The worker makes up
to `MOST_CALLS` calls at once, since a network volume answers each after a while. A volume that hangs makes the engine
give the worker up: its questions end without an answer, and another worker is started after a while.

Run as ``python -m kvtier_connector.io_workers.lookups <settings as JSON>``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import marshal
import math
import os
import queue
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import NamedTuple, Protocol

from kvtier_connector.io_workers.worker import PoolSettings, die_with, file_system, lower_priority, start_process
from kvtier_connector.store.blockstore import BlockStore
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
_START_SECONDS = 20.0
"""A host that is busy needs up to this long to start a process."""
_READY = 0
"""Number of the message by which a worker says that it is ready; questions have other numbers."""
_QUESTIONS = 8
"""Questions that a worker works at at once."""
_LENGTH = struct.Struct("=I")
_READ_BYTES = 1 << 16
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 1.0, 60.0
_MOST_HANGING = 2
"""Workers that hang in the volume and cannot be killed; no other one is started beside so many."""

Look = Callable[[BlockKey], bool | Fault]
"""Says whether the volume has a block; `BlockStore.look_up`."""


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


def find(
    question: BlockQuery,
    look_at: Callable[[Sequence[BlockKey]], Sequence[bool | Fault]],
    *,
    now: Callable[[], float] = time.monotonic,
) -> Found | Fault:
    """Look blocks up with few calls; `look_at` looks at several at once.

    A prefix costs one call where its first block is absent. Else the last block and some between are looked at, and
    then those around the end: two rounds for a thousand blocks.
    """
    return _Search(question, look_at, now).run()


class _FaultError(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault


class _Search:
    def __init__(
        self,
        question: BlockQuery,
        look_at: Callable[[Sequence[BlockKey]], Sequence[bool | Fault]],
        now: Callable[[], float],
    ) -> None:
        self._question = question
        self._now = now
        self._look_at = look_at
        self._present: dict[int, bool] = {}

    def run(self) -> Found | Fault:
        keys = self._question.keys
        try:
            present = self._find_prefix(len(keys)) if self._question.is_prefix else sum(self._ask(range(len(keys))))
        except _FaultError as error:
            return error.fault
        seen = tuple(number for number, is_there in self._present.items() if is_there)
        return Found(present, seen, len(self._present))

    def _find_prefix(self, count: int) -> int:
        began = self._now()
        if not count or not self._ask([0])[0]:
            return 0
        is_quick = self._now() - began < _QUICK_SECONDS
        low, high = 0, count
        """The last block that is known to be there, and the first that is known not to be."""
        points = _spread(low, high, 1 if is_quick else MOST_CALLS - 1)
        points = sorted({*points, count - 1} - {0})
        while points:
            for number, is_there in zip(points, self._ask(points), strict=True):
                if not is_there:
                    high = min(high, number)
                    break
                low = number
            points = _spread(low, high, 1 if is_quick else MOST_CALLS)
        if self._question.is_exact:
            rest = [number for number in range(low) if number not in self._present]
            return next((number for number, is_there in zip(rest, self._ask(rest), strict=True) if not is_there), high)
        return high

    def _ask(self, numbers: Iterable[int]) -> list[bool]:
        numbers = list(numbers)
        keys = self._question.keys
        answers = []
        for number, found in zip(numbers, self._look_at([keys[number] for number in numbers]), strict=True):
            if isinstance(found, Fault):
                raise _FaultError(found)
            self._present[number] = found
            answers.append(found)
        return answers


def _spread(low: int, high: int, most: int) -> list[int]:
    """Return at most so many numbers between two others, evenly."""
    gap = high - low - 1
    if gap <= most:
        return list(range(low + 1, high))
    return [low + (high - low) * place // (most + 1) for place in range(1, most + 1)]


def serve(
    look: Look, receive: Callable[[], tuple[int, BlockQuery] | None], send: Callable[[int, Found | Fault], None]
) -> None:
    """Answer questions until `receive` returns None: the loop of a worker."""
    send(_READY, Found(0, ()))
    with (
        ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="kvtier-look") as calls,
        ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="kvtier-find") as questions,
    ):

        def look_at(keys: Sequence[BlockKey]) -> Sequence[bool | Fault]:
            return [look(keys[0])] if len(keys) == 1 else list(calls.map(look, keys))

        def answer(number: int, question: BlockQuery) -> None:
            try:
                found = find(question, look_at)
            except Exception:
                # The edge of the thread: a store reports what it expects by itself, so this is a defect of ours.
                logger.exception("A lookup failed")
                found = Fault.IO
            send(number, found)

        while (received := receive()) is not None:
            questions.submit(answer, *received)


class _Worker(Protocol):
    """A worker as the engine sees it. Nothing waits."""

    def send(self, number: int, question: BlockQuery) -> None:
        """Hand a question over."""

    def receive(self) -> list[tuple[int, Found | Fault]]:
        """Return the answers that have come."""

    def wait(self, seconds: float) -> bool:
        """Wait for an answer; say whether one has come."""

    def is_alive(self) -> bool:
        """Say whether it can answer."""

    def end(self) -> None:
        """Have it end; one that hangs is left behind."""

    def is_gone(self) -> bool:
        """Say whether one that was to end has ended."""


class LookupWorker:
    """The lookups of one engine. Scheduler's thread only; nothing here waits for the volume."""

    def __init__(
        self,
        settings: PoolSettings,
        *,
        fs: FileSystem = LOCAL,
        lookup_seconds: float = LOOKUP_SECONDS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; call `start`.

        Args:
            settings: The volume.
            fs: The system calls; with others than the real ones a thread of this process does the lookups, for tests.
            lookup_seconds: A question that is open for longer is given up together with the worker.
            now: Seconds that never go back.
        """
        self._make: Callable[[], _Worker] = lambda: (
            _Process(settings) if fs is LOCAL else _Thread(settings.open_volume(fs))
        )
        self._lookup_seconds = lookup_seconds
        self._now = now
        self._worker: _Worker | None = None
        self._hanging: list[_Worker] = []
        self._open: dict[int, float] = {}
        """By number of the question, when it is given up."""
        self._is_ready = False
        self._started_at = self._answered_at = -math.inf
        self._done: list[Answer] = []
        self._backoff = _FIRST_BACKOFF_SECONDS
        self._retry_at = -math.inf
        self._is_closed = False
        self.calls = 0
        """Calls to the volume that lookups made."""

    def start(self) -> None:
        """Start the worker."""
        self._retry_at = -math.inf
        self._try_to_start()

    @property
    def is_stuck(self) -> bool:
        """Whether a question would not be answered now: the last worker hung or died, and none was started since."""
        return self._worker is None and not self._is_closed

    @property
    def is_ready(self) -> bool:
        """Whether the worker has begun to work."""
        return self._worker is not None and self._is_ready

    def submit(self, number: int, question: BlockQuery) -> None:
        """Ask; `collect` returns the answer under the same number, which is more than 0."""
        self._try_to_start()
        if self._worker is None:
            self._done.append(Answer(number, None))
            return
        self._open[number] = self._now() + self._lookup_seconds
        self._worker.send(number, question)

    def wait(self, seconds: float) -> bool:
        """Wait for an answer; say whether one can be collected. A worker on a thread is not waited for."""
        return self._worker is not None and bool(self._open) and self._worker.wait(seconds)

    def collect(self) -> list[Answer]:
        """Return the questions that have ended since the last call."""
        if (worker := self._worker) is not None:
            for number, found in worker.receive():
                if number == _READY:
                    self._is_ready = True
                    self._open = dict.fromkeys(self._open, self._now() + self._lookup_seconds)
                elif self._open.pop(number, None) is not None:
                    self._answered_at = self._now()
                    self._backoff = _FIRST_BACKOFF_SECONDS
                    self.calls += 0 if isinstance(found, Fault) else found.calls
                    self._done.append(Answer(number, found))
            # A burst of questions waits in line: a worker that still answers does not hang.
            quiet_until = self._answered_at + self._lookup_seconds
            is_late = bool(self._open) and max(min(self._open.values()), quiet_until) < self._now()
            if not self._is_ready:
                is_late = self._now() - self._started_at > _START_SECONDS
            if is_late or not worker.is_alive():
                self._give_up(worker)
        else:
            self._try_to_start()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the worker; questions that are open end without an answer."""
        self._is_closed = True
        if self._worker is not None:
            self._give_up(self._worker)

    def _give_up(self, worker: _Worker) -> None:
        worker.end()
        self._hanging.append(worker)
        self._worker = None
        self._done += [Answer(number, None) for number in self._open]
        self._open.clear()
        self._retry_at = self._now() + self._backoff
        self._backoff = min(2 * self._backoff, _LONGEST_BACKOFF_SECONDS)

    def _try_to_start(self) -> None:
        if self._worker is not None or self._is_closed or self._now() < self._retry_at:
            return
        self._hanging = [each for each in self._hanging if not each.is_gone()]
        if len(self._hanging) >= _MOST_HANGING:
            return
        try:
            self._worker, self._is_ready, self._started_at = self._make(), False, self._now()
        except OSError as error:
            logger.warning("No worker for lookups can be started: %s", error)
            self._retry_at = self._now() + self._backoff


class _Process:
    """A worker in a process of its own."""

    def __init__(self, settings: PoolSettings) -> None:
        reader, self._writer = os.pipe()
        self._reader, writer = os.pipe()
        arguments = json.dumps([os.getpid(), reader, writer, asdict(settings)])
        try:
            self._process = start_process("kvtier_connector.io_workers.lookups", arguments, [reader, writer])
        except OSError:
            os.close(self._writer)
            os.close(self._reader)
            raise
        finally:
            os.close(reader)
            os.close(writer)
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)
        self._unsent = bytearray()
        self._received = bytearray()

    def send(self, number: int, question: BlockQuery) -> None:
        keys = [tuple(key) for key in question.keys]
        data = marshal.dumps((number, keys, question.is_prefix, question.is_exact))
        self._unsent += _LENGTH.pack(len(data)) + data
        self._flush()

    def receive(self) -> list[tuple[int, Found | Fault]]:
        self._flush()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._reader, _READ_BYTES):
                self._received += data
        answers = []
        while (message := _cut(self._received)) is not None:
            number, present, seen, calls, fault = marshal.loads(message)  # noqa: S302 - our own process
            answers.append((number, Fault(fault) if fault else Found(present, seen, calls)))
        return answers

    def wait(self, seconds: float) -> bool:
        self._flush()
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        os.close(self._writer)
        os.close(self._reader)
        # One that hangs in the volume ends when the call returns.
        threading.Thread(target=self._process.wait, name="kvtier-lookups-end", daemon=True).start()

    def is_gone(self) -> bool:
        return self._process.poll() is not None

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = os.write(self._writer, self._unsent)
            except (BlockingIOError, BrokenPipeError):
                return
            del self._unsent[:sent]


def _cut(received: bytearray) -> bytes | None:
    """Take the first whole message off what has been received."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    message = bytes(received[_LENGTH.size : end])
    del received[:end]
    return message


class _Thread:
    """A worker on threads of this process, for tests with file systems of their own."""

    def __init__(self, store: BlockStore) -> None:
        self._questions: queue.SimpleQueue[tuple[int, BlockQuery] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Found | Fault]] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=serve,
            args=(store.look_up, self._questions.get, lambda *answer: self._answers.put(answer)),
            name="kvtier-lookups",
            daemon=True,
        )
        self._thread.start()

    def send(self, number: int, question: BlockQuery) -> None:
        self._questions.put((number, question))

    def receive(self) -> list[tuple[int, Found | Fault]]:
        return [self._answers.get() for _ in range(self._answers.qsize())]

    def wait(self, seconds: float) -> bool:  # noqa: ARG002 - tests decide when an answer comes
        return False

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._questions.put(None)

    def is_gone(self) -> bool:
        return not self._thread.is_alive()


def main(parent: int, reader: int, writer: int, settings: PoolSettings) -> None:
    """Run a worker for lookups; it ends when its engine closes the pipe, or ends."""
    die_with(parent)
    lower_priority()
    received = bytearray()
    sending = threading.Lock()

    def receive() -> tuple[int, BlockQuery] | None:
        while (message := _cut(received)) is None:
            data = os.read(reader, _READ_BYTES)
            if not data:
                return None
            received.extend(data)
        number, keys, is_prefix, is_exact = marshal.loads(message)  # noqa: S302 - our own engine
        return number, BlockQuery(tuple(BlockKey(*key) for key in keys), is_prefix, is_exact)

    def send(number: int, found: Found | Fault) -> None:
        fields = (0, (), 0, found.value) if isinstance(found, Fault) else (*found, "")
        data = marshal.dumps((number, *fields))
        with sending, contextlib.suppress(BrokenPipeError):
            view = memoryview(_LENGTH.pack(len(data)) + data)
            while view:
                view = view[os.write(writer, view) :]

    serve(settings.open_volume(file_system(settings.file_system)).look_up, receive, send)
    # A thread that hangs in the volume must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    _parent, _reader, _writer, _fields = json.loads(sys.argv[1])
    main(_parent, _reader, _writer, PoolSettings(**_fields))
