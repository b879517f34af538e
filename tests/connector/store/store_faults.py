# SPDX-License-Identifier: Apache-2.0
"""File systems that hang or fail, what another writer of the volume could put there, and what a crashed one leaves."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.scan import Leftover, LeftoverKind, scan


class CrashError(BaseException):
    """The process is dead; nothing may catch this."""


class WatchedFs(FileSystem):
    """Calls `before(name, path or None)` ahead of every system call."""

    def before(self, call: str, path: str | None) -> None:
        """Do nothing; tests override this."""

    def before_io(self, call: str, fd: int) -> None:
        self.before(call, None)

    def open(self, path: str, flags: int) -> int:
        self.before("open", path)
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        # The system gives up the descriptor whatever it answers, and a process that dies keeps none: NFS keeps a file
        # that is removed while somebody has it open under another name.
        try:
            self.before("close", None)
        finally:
            super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.before_io("preadv", fd)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.before_io("pwritev", fd)
        return super().pwritev(fd, buffers, offset)


def _watched(name: str) -> Callable[..., Any]:
    def call(self: WatchedFs, *given: Any) -> Any:
        self.before(name, given[0] if isinstance(given[0], str) else None)
        return getattr(FileSystem, name)(self, *given)

    return call


for _name in ("fsync", "fstat", "stat", "touch", "statvfs", "rename", "link", "unlink", "mkdir", "rmdir", "scandir"):
    setattr(WatchedFs, _name, _watched(_name))


class HookedFs(WatchedFs):
    def __init__(self, hook: Callable[[str, str], object]) -> None:
        self._hook = hook

    def before(self, call: str, path: str | None) -> None:
        self._hook(call, path or "")


class NotingFs(WatchedFs):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, call: str, path: str | None) -> None:
        self.calls.append(call)


class CrashingFs(WatchedFs):
    """The process dies at the given step: that call and all later ones do nothing but raise.

    A write at that step still gets `torn_bytes` onto the volume, as a real one may.
    """

    def __init__(self, step: int, *, torn_bytes: int = 0) -> None:
        self.steps = 0
        self.calls: list[str] = []
        self._step = step
        self._torn_bytes = torn_bytes

    @property
    def has_crashed(self) -> bool:
        return self.steps > self._step

    def crash_after(self, steps: int, *, torn_bytes: int = 0) -> None:
        self._step = self.steps + steps
        self._torn_bytes = torn_bytes

    def before(self, call: str, path: str | None) -> None:
        self.steps += 1
        self.calls.append(call)
        if self.has_crashed:
            self.die(call)

    def die(self, call: str) -> None:
        raise CrashError(call)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.steps == self._step and self._torn_bytes:
            os.pwrite(fd, b"".join(bytes(buffer) for buffer in buffers)[: self._torn_bytes], offset)
        return super().pwritev(fd, buffers, offset)


class FailingFs(WatchedFs):
    """Raises `error` at calls for which `when(call, path)` is true, as long as `is_failing`."""

    def __init__(self, error: BaseException, when: Callable[[str, str], bool]) -> None:
        self._error = error
        self._when = when
        self.is_failing = True

    def before(self, call: str, path: str | None) -> None:
        if self.is_failing and self._when(call, path or ""):
            raise self._error


class GatedFs(WatchedFs):
    """Calls for which `gate(call, path)` is true wait until `open_gate` is called, as on a dead network mount."""

    def __init__(self, gate: Callable[[str, str], bool]) -> None:
        self._gate = gate
        self._opened = threading.Event()
        self._changed = threading.Condition()
        self.waiting = 0
        self.calls: list[tuple[str, str]] = []

    def open_gate(self) -> None:
        self._opened.set()

    def before_io(self, call: str, fd: int) -> None:
        self.before(call, str(Path(f"/proc/self/fd/{fd}").readlink()))

    def before(self, call: str, path: str | None) -> None:
        with self._changed:
            self.calls.append((call, path or ""))
        if not self._opened.is_set() and self._gate(call, path or ""):
            with self._changed:
                self.waiting += 1
            self._opened.wait(60)
            with self._changed:
                self.waiting -= 1


class NthCallFails(WatchedFs):
    """Raises `error` once, at the n-th call; the process lives on and cleans up."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.steps = 0
        self.failed_call = ""
        self._step = step
        self._error = error

    @property
    def has_failed(self) -> bool:
        return self.steps > self._step

    def before(self, call: str, path: str | None) -> None:
        self.steps += 1
        if self.steps == self._step + 1:
            self.failed_call = call
            raise self._error


class ShortFs(FileSystem):
    """Moves at most `limit` bytes at a time, and reports `unreported` fewer than it did, as the system may."""

    def __init__(self, limit: int, *, unreported: int = 0) -> None:
        self._limit = limit
        self._unreported = unreported

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._report(super().preadv(fd, [buffers[0][: self._limit]], offset))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._report(super().pwritev(fd, [buffers[0][: self._limit]], offset))

    def _report(self, count: int) -> int:
        return count - self._unreported if count == self._limit else count


def flip(path: Path, place: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


KINDS = ("link", "pipe", "socket", "directory")
TOO_DEEP = b"[" * 4000


def plant(kind: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        (path / "inside").mkdir(parents=True)


def clear(root: Path, *kinds: LeftoverKind) -> list[str]:
    """Remove leftovers as the janitor does once they are old; return their paths relative to the root."""
    found = [
        entry for entry in scan(root, partial_age_seconds=0) if isinstance(entry, Leftover) and entry.kind in kinds
    ]
    for entry in found:
        (root / entry.path).unlink()
    return [entry.path for entry in found]


class KubeletMount:
    """Changes as the kubelet changes a mounted Secret or ConfigMap: a new directory, then the link to it swapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = 0
        path.mkdir(exist_ok=True)

    def put(self, **keys: bytes) -> None:
        self._turn += 1
        made = self.path / f"..{self._turn}"
        made.mkdir()
        for name, content in keys.items():
            (made / name).write_bytes(content)
        link = self.path / "..data_tmp"
        link.symlink_to(made.name)
        link.replace(self.path / "..data")
        for entry in self.path.iterdir():
            if not entry.name.startswith("..") and entry.name not in keys:
                entry.unlink()
        for name in keys:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        # Each another time, also where the tests run on a volume that tells times in whole seconds.
        os.utime(self.path, (self._turn, self._turn))
