# SPDX-License-Identifier: Apache-2.0
"""Tokens get through pipes of any size, however seldom the engine reads them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
from pathlib import Path

from crews import ROW_BYTES, wait_until

from kvtier_connector.movers.board import TOKEN, create_board
from kvtier_connector.movers.pipe import TokenPipe
from kvtier_connector.movers.process import MoverSettings

FEWEST_BYTES = 4096
"""A page: the system makes no smaller pipe."""


def unread(pipe: TokenPipe) -> int:
    """Return how many bytes wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe.reader, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_more_tokens_than_a_pipe_holds_all_arrive_in_order() -> None:
    pipe = TokenPipe()
    held = fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, FEWEST_BYTES) // TOKEN.size
    tokens = [TOKEN.pack(number, 1) for number in range(3 * held)]
    pipe.send(tokens)
    arrived = b""
    while piece := pipe.receive():
        arrived += piece
        pipe.flush()
    assert arrived == b"".join(tokens)
    pipe.close()


def test_a_mover_waits_where_the_engine_has_not_read_what_it_said(tmp_path: Path) -> None:
    tasks, done = TokenPipe(), TokenPipe()
    held = fcntl.fcntl(done.writer, fcntl.F_SETPIPE_SZ, FEWEST_BYTES) // TOKEN.size
    board_fd, region = create_board(), os.memfd_create("cpu-tier")
    os.ftruncate(region, ROW_BYTES)
    settings = MoverSettings(
        mover=0,
        parent=os.getpid(),
        board=board_fd,
        region=region,
        region_offset=0,
        region_bytes=ROW_BYTES,
        row_bytes=ROW_BYTES,
        pipes=(tasks.reader,),
        done=done.writer,
        rows=(0, 1, 1),
        root=str(tmp_path),
        direct=None,
    )
    mover = subprocess.Popen(
        [sys.executable, "-m", "kvtier_connector.movers.process", settings.encode()],
        pass_fds=[tasks.reader, done.writer, board_fd, region],
    )
    # Of tasks that were taken back, whose tokens it returns at once.
    tokens = [TOKEN.pack(0, ticket) for ticket in range(1, held + 9)]
    for token in tokens:
        os.write(tasks.writer, token)
    wait_until(lambda: mover.poll() is not None or unread(done) == held * TOKEN.size, "no more fits")
    arrived = b""

    def has_all() -> bool:
        nonlocal arrived
        assert mover.poll() is None, "the mover has ended"
        arrived += done.receive()
        return len(arrived) == len(tokens) * TOKEN.size

    wait_until(has_all, "all tokens are back")
    assert arrived == b"".join(tokens)
    tasks.close()
    assert mover.wait(60) == 0
    done.close()
    os.close(board_fd)
    os.close(region)
