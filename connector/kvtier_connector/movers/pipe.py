# SPDX-License-Identifier: Apache-2.0
"""The pipes through which an engine and its movers tell each other of tasks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Iterable

from kvtier_connector.movers.board import ENTRIES, TOKEN

_PIPE_BYTES = 1 << 20
_READ_BYTES = ENTRIES * TOKEN.size


class TokenPipe:
    """Tokens on their way; more than fit it wait here. Nothing waits, on either end.

    Not thread-safe. The movers inherit one end or the other as a descriptor.
    """

    def __init__(self) -> None:
        """Open both ends; raise OSError where the process has no room for them."""
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        with contextlib.suppress(OSError):
            # A pipe of the usual size holds fewer tokens than the board entries; then some wait here.
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._unsent: deque[bytes] = deque()

    def send(self, tokens: Iterable[bytes]) -> None:
        """Write tokens, or keep them until there is room."""
        self._unsent.extend(tokens)
        self.flush()

    def flush(self) -> None:
        """Write what there is room for now."""
        while self._unsent:
            # Small enough to be written whole or not at all.
            batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), 512))]
            try:
                os.write(self.writer, b"".join(batch))
            except BlockingIOError:
                self._unsent.extendleft(reversed(batch))
                return

    def receive(self) -> bytes:
        """Return the tokens that have arrived, one after the other."""
        try:
            return os.read(self.reader, _READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Close both ends; a mover that reads sees the end."""
        os.close(self.writer)
        os.close(self.reader)
