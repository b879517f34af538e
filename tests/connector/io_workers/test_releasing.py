# SPDX-License-Identifier: Apache-2.0
"""Files that were read are closed behind the reader's back where a close takes long, and only there."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from waiting import until

from kvtier_connector.io_workers import worker
from kvtier_connector.io_workers.worker import WorkerFileSystem


class Closes(WorkerFileSystem):
    """Notes which thread closes what; all but the caller's wait for the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.closed: dict[int, int] = {}
        self.gate = threading.Event()
        self._caller = threading.get_ident()

    def close(self, fd: int) -> None:
        if threading.get_ident() != self._caller:
            self.gate.wait()
        self.closed[fd] = threading.get_ident()
        if fd < 0:
            raise OSError(errno.EIO, "broken")


def test_a_close_that_is_quick_is_made_at_once() -> None:
    fs, (reader, writer) = WorkerFileSystem(), os.pipe()
    fs.release(reader)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
    os.close(writer)


@pytest.mark.usefixtures("slow")
def test_after_one_that_took_long_nobody_waits_for_a_close_until_too_many_are_under_way() -> None:
    fs, caller = Closes(), threading.get_ident()
    fs.release(1)
    assert fs.closed == {1: caller}
    fs.release(2)
    until(fs._closing.empty, "the other thread closes the second")
    for fd in range(3, 3 + worker._MOST_CLOSING + 1):
        fs.release(fd)
    assert fs.closed == {1: caller, 5: caller}
    fs.gate.set()
    until(lambda: len(fs.closed) == 5, "all are closed")
    assert caller not in {fs.closed[fd] for fd in (2, 3, 4)}


@pytest.mark.usefixtures("slow")
def test_a_close_that_fails_behind_the_readers_back_is_not_the_last_one() -> None:
    fs = Closes()
    fs.gate.set()
    fs.release(1)
    fs.release(-1)
    fs.release(2)
    until(lambda: 2 in fs.closed, "the next is closed")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every close count as slow."""
    monkeypatch.setattr(worker, "_SLOW_SECONDS", -1.0)


@pytest.mark.usefixtures("slow")
def test_where_there_is_no_room_for_a_thread_the_reader_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fs = Closes()
    fs.release(1)
    fs.release(2)
    assert list(fs.closed) == [1, 2]
