# SPDX-License-Identifier: Apache-2.0
"""A volume that hangs or fails at chosen calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from os import stat_result

from kvtier_connector.store.fs import FileSystem


class GatedFs(FileSystem):
    """Calls for which `gate(call, path)` is true wait until `open_gate` is called, as on a dead network mount."""

    def __init__(self, gate: Callable[[str, str], bool]) -> None:
        self._gate = gate
        self._opened = threading.Event()
        self._changed = threading.Condition()
        self._paths: dict[int, str] = {}
        self.waiting = 0
        self.calls: list[tuple[str, str]] = []

    def open_gate(self) -> None:
        self._opened.set()

    def open(self, path: str, flags: int) -> int:
        self._pass("open", path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass("preadv", self._paths.get(fd, ""))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass("pwritev", self._paths.get(fd, ""))
        return super().pwritev(fd, buffers, offset)

    def stat(self, path: str) -> stat_result:
        self._pass("stat", path)
        return super().stat(path)

    def _pass(self, call: str, path: str) -> None:
        with self._changed:
            self.calls.append((call, path))
        if not self._opened.is_set() and self._gate(call, path):
            with self._changed:
                self.waiting += 1
            self._opened.wait(60)
            with self._changed:
                self.waiting -= 1


class FailingFs(FileSystem):
    """Raises `error` at calls for which `when(call, path)` is true, as long as `is_failing`."""

    def __init__(self, error: OSError, when: Callable[[str, str], bool]) -> None:
        self._error = error
        self._when = when
        self.is_failing = True

    def open(self, path: str, flags: int) -> int:
        self._maybe_fail("open", path)
        return super().open(path, flags)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("pwritev", "")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail("preadv", "")
        return super().preadv(fd, buffers, offset)

    def mkdir(self, path: str) -> None:
        self._maybe_fail("mkdir", path)
        super().mkdir(path)

    def _maybe_fail(self, call: str, path: str) -> None:
        if self.is_failing and self._when(call, path):
            raise self._error
