# SPDX-License-Identifier: Apache-2.0
"""A command in a pod that reads or writes more than fits into memory, over one WebSocket: `kubectl exec -i`.

The Kubernetes package keeps all that has come before it gives anything away, and reads for as long as more comes. Here
one message is read at a time, so that whoever is slow makes the other side wait.
"""

from __future__ import annotations

import json
import select
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Final

from websocket import ABNF

_INPUT: Final = 0
_OUTPUT: Final = 1
_ERRORS: Final = 2
_OUTCOME: Final = 3


class Piping:
    """One command, from its start to its end. One thread only."""

    def __init__(self, socket: Any, *, on_line: Callable[[str], None], take: Callable[[bytes], object]) -> None:
        """Store.

        Args:
            socket: the WebSocket, open.
            on_line: told each line of standard error.
            take: given standard output.
        """
        self._socket = socket
        self._on_line = on_line
        self._take = take
        self._rest = b""
        self._code: int | None = None

    def run(self, give: Iterator[bytes] | None) -> int:
        """Give the command its input, take what it says, and return its exit code.

        Raises:
            ConnectionError: the other side went before it said how the command ended.
            WebSocketException: the connection broke.
        """
        pieces = iter(()) if give is None else give
        is_giving = give is not None
        while self._code is None:
            if not is_giving or self._has_message():
                self._listen()
            elif (piece := next(pieces, None)) is None:
                is_giving = False
            else:
                self._socket.send(bytes([_INPUT]) + piece, opcode=ABNF.OPCODE_BINARY)
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
        return self._code

    def _has_message(self) -> bool:
        raw = self._socket.sock
        # What a TLS record brought along is nowhere to be seen on the socket below it.
        if isinstance(raw, ssl.SSLSocket) and raw.pending():
            return True
        poll = select.poll()
        poll.register(raw, select.POLLIN)
        return bool(poll.poll(0))

    def _listen(self) -> None:
        code, frame = self._socket.recv_data_frame(control_frame=True)
        if code == ABNF.OPCODE_CLOSE:
            raise ConnectionError("the other side closed it before the command had ended")
        if code not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame.data:
            return
        channel, content = frame.data[0], bytes(frame.data[1:])
        if channel == _OUTPUT and content:
            self._take(content)
        elif channel == _ERRORS:
            *lines, self._rest = (self._rest + content).split(b"\n")
            for line in lines:
                self._on_line(line.decode(errors="replace"))
        elif channel == _OUTCOME:
            self._code = _exit_code(json.loads(content))


def _exit_code(outcome: dict[str, Any]) -> int:
    """Return the exit code that the API server tells of; what is no exit code is a ValueError with its message."""
    if outcome.get("status") == "Success":
        return 0
    for cause in (outcome.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise ValueError(outcome.get("message") or "it ended without an exit code")
