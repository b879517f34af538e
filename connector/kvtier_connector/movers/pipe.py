# SPDX-License-Identifier: Apache-2.0
"""The pipes through which an engine and its movers tell each other of tasks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from collections import deque
from collections.abc import Iterable

_PIPE_BYTES = 1 << 20
_ATOMIC_BYTES = select.PIPE_BUF
"""The system writes so much whole or not at all."""


class MessagePipe:
    """Messages of one length on their way; more than fit wait here. Nothing waits, on either end.

    Not thread-safe. The movers inherit one end or the other as a descriptor.
    """

    def __init__(self, message_bytes: int) -> None:
        """Open both ends; raise OSError where the process has no room for them."""
        self._batch = _ATOMIC_BYTES // message_bytes
        self._read_bytes = _PIPE_BYTES - _PIPE_BYTES % message_bytes
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        with contextlib.suppress(OSError):
            # A pipe of the usual size holds fewer messages than the board entries; then some wait here.
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._unsent: deque[bytes] = deque()

    @property
    def is_full(self) -> bool:
        """Whether messages wait here for room."""
        return bool(self._unsent)

    def send(self, messages: Iterable[bytes]) -> None:
        """Write messages, or keep them until there is room."""
        self._unsent.extend(messages)
        self.flush()

    def flush(self) -> None:
        """Write what there is room for now."""
        while self._unsent:
            batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), self._batch))]
            try:
                os.write(self.writer, b"".join(batch))
            except BlockingIOError:
                self._unsent.extendleft(reversed(batch))
                return

    def receive(self) -> bytes:
        """Return the messages that have arrived, one after the other."""
        try:
            return os.read(self.reader, self._read_bytes)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Close both ends; a mover that reads sees the end."""
        os.close(self.writer)
        os.close(self.reader)
