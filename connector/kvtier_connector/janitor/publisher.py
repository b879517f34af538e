# SPDX-License-Identifier: Apache-2.0
"""Publishes messages over ZeroMQ as vLLM's engines do: topic, number, payload; and repeats them to who asks.

Whoever subscribes late missed what was published before. Each new subscription is therefore noticed, and everything is
told anew; whoever finds a gap in the numbers asks the second port for the messages from a number on, as of an engine.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

BUFFERED = 1000
"""Messages that can be repeated."""
_QUEUED = 256
_FULL_SECONDS = 5.0
_POLL_MS = 50
_LINGER_MS = 1000
_END = (-1).to_bytes(8, "big", signed=True)
"""Number of the message that ends a repetition."""
_SUBSCRIBED = 1
_AGAIN_SECONDS = 10.0
"""Everything is told anew no more often than this, however many come and go."""


class Publisher:
    """A socket for subscribers and one for who missed something.

    One thread owns the sockets and `_buffer`; `send` hands messages over through a queue, and `_has_missed` is an
    event that one sets and the other takes back.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        replay_port: int,
        topic: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind; raises OSError (zmq.ZMQError) where a port is taken. Port 0 takes any that is free."""
        self._topic = topic.encode()
        self._now = now
        self._context = zmq.Context()
        self._subscribers = self._context.socket(zmq.XPUB)
        # Also of a topic that another one has subscribed to already.
        self._subscribers.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = self._context.socket(zmq.ROUTER)
        self.port, self.replay_port = (
            _bind(socket, host, number) for socket, number in ((self._subscribers, port), (self._replay, replay_port))
        )
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED)
        self._number = 0
        self._has_missed = threading.Event()
        self._told_at = -_AGAIN_SECONDS
        self._thread = threading.Thread(target=self._run, name="kvtier-kv-events", daemon=True)

    def start(self) -> None:
        """Start to publish."""
        self._thread.start()

    def close(self) -> None:
        """Publish what is queued, and stop."""
        self._queue.put(None)
        self._thread.join(_FULL_SECONDS)
        self._context.destroy(linger=_LINGER_MS)

    def send(self, payload: bytes) -> bool:
        """Queue a message; say whether it will be published."""
        try:
            self._queue.put(payload, timeout=_FULL_SECONDS)
        except queue.Full:
            logger.warning("events of the volume are not taken; everything is told anew later")
            self._has_missed.set()
            return False
        return True

    def wants_all(self) -> bool:
        """Say, once, whether somebody has missed what was told before."""
        if not self._has_missed.is_set() or self._now() - self._told_at < _AGAIN_SECONDS:
            return False
        self._has_missed.clear()
        self._told_at = self._now()
        return True

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._subscribers, self._replay):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(0 if self._queue.qsize() else _POLL_MS))
            if self._subscribers in ready:
                self._meet()
            if self._replay in ready:
                self._repeat()
            with contextlib.suppress(queue.Empty):
                payload = self._queue.get_nowait()
                if payload is None:
                    return
                self._publish(payload)

    def _publish(self, payload: bytes) -> None:
        self._subscribers.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._buffer.append((self._number, payload))
        self._number += 1

    def _meet(self) -> None:
        wish = self._subscribers.recv()
        if wish[:1] == bytes([_SUBSCRIBED]) and self._topic.startswith(wish[1:]):
            self._has_missed.set()

    def _repeat(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3:  # noqa: PLR2004 - who, nothing, from which number on
            return
        who, _, asked = frames
        first = int.from_bytes(asked, "big")
        if first < self._number and (not self._buffer or first < self._buffer[0][0]):
            self._has_missed.set()
        for number, payload in self._buffer:
            if number >= first:
                self._replay.send_multipart((who, b"", self._topic, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((who, b"", b"", _END, b""))


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    address = f"[{host}]" if ":" in host else host or "*"
    socket.bind(f"tcp://{address}:{port or '*'}")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
