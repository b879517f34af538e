# SPDX-License-Identifier: Apache-2.0
"""Messages get through pipes of any size, however seldom the engine reads them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
from pathlib import Path

from pools import ROW_BYTES, key, wait_until

from kvtier_connector.io_workers.buffers import Region
from kvtier_connector.io_workers.task_table import MessagePipe, TaskTable, create_table
from kvtier_connector.io_workers.tasks import REPLY, TASK_BYTES, Lane, Task, TaskMessage, encode_task
from kvtier_connector.io_workers.worker import PoolSettings, WorkerSettings

FEWEST_BYTES = 4096
"""A page: the system makes no smaller pipe."""


def unread(pipe: MessagePipe) -> int:
    """Return how many bytes wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe.reader, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_more_messages_than_a_pipe_holds_all_arrive_in_order() -> None:
    pipe = MessagePipe(TASK_BYTES)
    held = fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, FEWEST_BYTES) // TASK_BYTES
    messages = [number.to_bytes(TASK_BYTES, "big") for number in range(3 * held)]
    pipe.send(messages)
    arrived = b""
    while piece := pipe.receive():
        arrived += piece
        pipe.flush()
    assert arrived == b"".join(messages)
    pipe.close()


def test_a_worker_waits_where_the_engine_has_not_read_what_it_said(tmp_path: Path) -> None:
    tasks, replies = [MessagePipe(TASK_BYTES) for _ in Lane], MessagePipe(REPLY.size)
    pipe_bytes = fcntl.fcntl(replies.writer, fcntl.F_SETPIPE_SZ, FEWEST_BYTES)
    table_fd, region = create_table(), os.memfd_create("cpu-tier")
    os.ftruncate(region, ROW_BYTES)
    table = TaskTable(table_fd)
    table.storing = 1
    settings = WorkerSettings(
        worker=0,
        parent=os.getpid(),
        table=table_fd,
        regions=(Region(region, 0, 1),),
        row_bytes=ROW_BYTES,
        pipes=tuple(pipe.reader for pipe in tasks),
        replies=replies.writer,
        pool=PoolSettings(root=str(tmp_path), workers=1, deadline_seconds=60.0),
    )
    assert WorkerSettings.decode(settings.encode()) == settings
    worker = subprocess.Popen(
        [sys.executable, "-m", "kvtier_connector.io_workers.worker", settings.encode()],
        pass_fds=[*settings.pipes, replies.writer, table_fd, region],
    )
    # Of tasks that were taken back, which it answers at once.
    tickets = range(1, 2 * pipe_bytes // REPLY.size)
    for ticket in tickets:
        lane = Lane(ticket % len(Lane))
        os.write(tasks[lane].writer, encode_task(TaskMessage(0, ticket, Task(lane, key(1)))))
    wait_until(lambda: worker.poll() is not None or unread(replies) > pipe_bytes - REPLY.size, "no more fits")
    arrived = b""

    def has_all() -> bool:
        nonlocal arrived
        assert worker.poll() is None, "the worker has ended"
        arrived += replies.receive()
        return len(arrived) == len(tickets) * REPLY.size

    wait_until(has_all, "all are answered")
    assert sorted(ticket for ticket, *_ in REPLY.iter_unpack(arrived)) == list(tickets)
    for pipe in tasks:
        pipe.close()
    assert worker.wait(60) == 0
    replies.close()
    table.close()
    os.close(table_fd)
    os.close(region)
