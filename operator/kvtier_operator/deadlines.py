# SPDX-License-Identifier: Apache-2.0
"""Ends an HTTP conversation when its time is up, however little the other side says at a time.

A time-out of a socket begins anew with each byte, so that a pod that sends one now and then would hold a thread for
ever, and a handful of such pods all of them.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def within(connection: http.client.HTTPConnection, seconds: float) -> Iterator[None]:
    """Connect, and let what follows take so many seconds at most.

    Raises:
        TimeoutError: it took longer.
        OSError: nobody answers there.
    """
    connection.connect()
    is_over = threading.Event()
    timer = threading.Timer(seconds, _end, (connection.sock, is_over))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if is_over.is_set():
            raise TimeoutError("answers too slowly") from error
        raise
    finally:
        timer.cancel()
    if is_over.is_set():
        raise TimeoutError("answers too slowly")  # headers that were cut off look like a short answer


def _end(sock: socket.socket, is_over: threading.Event) -> None:
    is_over.set()
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
