# SPDX-License-Identifier: Apache-2.0
"""A client of Redis for LMCache's cache server, which loads the class by its name where it is rendered.

The server's own, ``resp``, is lost with its connections: each lookup then waits for an answer that never comes, and
every request of the engine with it. This one answers whatever happens; a Redis that is away is a miss.

Runs in the cache server. Imports the package ``redis``, which LMCache asks for, so nothing else imports this module.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import redis

from kvtier_connector.contract.engine import REDIS_PASSWORD_VARIABLE

_THREADS: Final = 8
_CONNECT_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 10.0
_REST_SECONDS: Final = 5.0
"""For which a Redis that did not answer is not asked again."""

Completion = tuple[int, bool, str, list[bool]]


class RedisClient:
    """A native connector in LMCache's words: operations are submitted, and collected when a descriptor says so.

    Threads of a pool do the work. The lock guards `_done`; `_rests_until` is a number that any of them may write.
    """

    def __init__(self, *, host: str, port: int) -> None:
        """Connect when first asked."""
        self._redis = redis.Redis(
            host=host,
            port=port,
            password=os.environ.get(REDIS_PASSWORD_VARIABLE) or None,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=_ANSWER_SECONDS,
        )
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._rests_until = 0.0
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-redis")

    def event_fd(self) -> int:
        """Return the descriptor that becomes readable when something is done."""
        return self._descriptor

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Read values into buffers; one of another size is a miss."""
        pairs = list(zip(keys, views, strict=True))
        return self._submit(len(pairs), lambda: [self._get(key, view) for key, view in pairs])

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """Write the buffers."""
        pairs = list(zip(keys, views, strict=True))
        return self._submit(len(pairs), lambda: [bool(self._redis.set(key, view.cast("B"))) for key, view in pairs])

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Look for keys."""
        names = list(keys)
        return self._submit(len(names), lambda: self._exist(names))

    def drain_completions(self) -> list[Completion]:
        """Return what is done."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)
        self._redis.close()
        os.close(self._descriptor)

    def _get(self, key: str, view: memoryview) -> bool:
        value = self._redis.get(key)
        into = view.cast("B")
        if not isinstance(value, bytes) or len(value) != len(into):
            return False
        into[:] = value
        return True

    def _exist(self, keys: list[str]) -> list[bool]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(key)
            return [bool(found) for found in pipeline.execute()]

    def _submit(self, count: int, work: Callable[[], list[bool]]) -> int:
        number = next(self._numbers)
        self._pool.submit(self._do, number, count, work)
        return number

    def _do(self, number: int, count: int, work: Callable[[], list[bool]]) -> None:
        completion: Completion = (number, False, "the Redis did not answer lately", [False] * count)
        if time.monotonic() >= self._rests_until:
            try:
                completion = (number, True, "", work())
            except Exception as error:  # noqa: BLE001  an operation without an answer holds up its request for good
                self._rests_until = time.monotonic() + _REST_SECONDS
                completion = (number, False, str(error), [False] * count)
        with self._lock:
            self._done.append(completion)
        os.eventfd_write(self._descriptor, 1)
