# SPDX-License-Identifier: Apache-2.0
"""A mount whose faults are switched on and off, and calls that may hang in it on threads of their own."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import until

WAIT_SECONDS = 20.0
wait_for = functools.partial(until, seconds=WAIT_SECONDS)


@dataclass
class Background:
    """A call on a thread of its own, which may hang for ever and is then left behind."""

    call: Callable[[], Any]
    _result: list[Any] = field(default_factory=list)
    _error: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self.call())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever asks for the result
            self._error.append(error)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive(), "the call still hangs"
        if self._error:
            raise self._error[0]
        return self._result[0]


class FaultyVolume:
    """The mounted directory, and the switches of its faults."""

    def __init__(self, path: Path, control: Path) -> None:
        self.path = path
        self.control = control

    @contextlib.contextmanager
    def hanging(self, *calls: str) -> Iterator[None]:
        """Let these calls hang until the end of the block."""
        with self._flags({f"hang.{call}": "" for call in calls}):
            yield

    @contextlib.contextmanager
    def failing(self, number: int, *calls: str) -> Iterator[None]:
        """Let these calls fail with the error number until the end of the block."""
        with self._flags({f"fail.{call}": str(number) for call in calls}):
            yield

    def fail_once(self, number: int, call: str) -> None:
        """Let the next call fail with the error number."""
        aside = self.control.with_name("once")
        aside.write_text(str(number))
        aside.rename(self.control / f"once.{call}")

    def clear(self) -> None:
        for path in self.control.iterdir():
            path.unlink()

    @contextlib.contextmanager
    def _flags(self, flags: dict[str, str]) -> Iterator[None]:
        try:
            for name, content in flags.items():
                aside = self.control.with_name(name)
                aside.write_text(content)
                aside.rename(self.control / name)
            yield
        finally:
            self.clear()
