# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own, for code that has none."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

Result = TypeVar("Result")


class LoopThread(ABC):
    """An event loop in a thread.

    The thread owns the loop and whatever runs in it; `call` is how other threads reach in.
    """

    def __init__(self, name: str, *, limit_seconds: float) -> None:
        """Store; `start` starts, or entering the context. Each call from outside takes no longer than the limit."""
        self._limit_seconds = limit_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    async def _begin(self) -> None:
        """Start what lives in the loop; after a failure nothing of it is left."""

    @abstractmethod
    async def _end(self) -> None:
        """Stop it."""

    def start(self) -> Self:
        """Start the thread and wait until what lives in it is there."""
        self._thread.start()
        try:
            self.call(self._begin)
        except BaseException:  # such as a port that is taken: leave no thread behind
            self._end_thread()
            raise
        return self

    def close(self) -> None:
        """Stop what lives in the loop, and join the thread."""
        if not self._thread.is_alive():
            return
        try:
            self.call(self._end)
        finally:
            self._end_thread()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.close()

    def call(self, action: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Run a coroutine function in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(action(), self._loop).result(self._limit_seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
