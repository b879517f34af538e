# SPDX-License-Identifier: Apache-2.0
"""kubectl port-forward: streams of one WebSocket become connections to a port of a pod, as kubectl 1.31 and later ask.

Each connection has two streams, named by a request id: one for its data, one for what went wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final, Self

from aiohttp import WSMsgType, web

from kvtier_localcluster.apiserver import spdy
from kvtier_localcluster.apiserver.api_errors import bad_request
from kvtier_localcluster.apiserver.objects import Json, field_at

PROTOCOL: Final = "SPDY/3.1+portforward.k8s.io"

_CHUNK_BYTES: Final = 1 << 16


async def forward(request: web.Request, pod: Json) -> web.WebSocketResponse:
    """Serve one kubectl port-forward until it ends.

    Raises:
        ApiError: the pod has no address yet, or the client speaks no WebSocket.
    """
    address = field_at(pod, "status.podIP")
    socket = web.WebSocketResponse(protocols=(PROTOCOL,), max_msg_size=0)
    if not address or not socket.can_prepare(request):
        raise bad_request("port-forward takes a running pod and a WebSocket: use kubectl 1.31 or later")
    await socket.prepare(request)
    async with _Forwarding(socket, str(address)) as forwarding:
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await forwarding.receive(message.data)
    return socket


class _Forwarding:
    """The connections of one WebSocket. All of it belongs to the task that serves the request and to its pumps."""

    def __init__(self, socket: web.WebSocketResponse, address: str) -> None:
        self._socket = socket
        self._address = address
        self._session = spdy.Session()
        self._errors: dict[str, int] = {}
        self._incoming: dict[int, asyncio.Queue[bytes]] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def receive(self, content: bytes) -> None:
        """Take in what the client sent."""
        for frame in self._session.receive(content):
            if isinstance(frame, bytes):
                await self._socket.send_bytes(frame)
            elif frame.headers:
                await self._open(frame)
            elif frame.stream in self._incoming:
                if frame.data:
                    self._incoming[frame.stream].put_nowait(frame.data)
                if frame.is_end:
                    self._incoming[frame.stream].put_nowait(b"")

    async def _open(self, frame: spdy.Frame) -> None:
        await self._socket.send_bytes(self._session.accept(frame.stream))
        request = frame.headers.get("requestid", "")
        if frame.headers.get("streamtype") == "error":
            self._errors[request] = frame.stream
            return
        self._incoming[frame.stream] = asyncio.Queue()
        connection = self._connect(frame.stream, self._errors.pop(request, 0), int(frame.headers["port"]))
        pump = asyncio.create_task(connection)
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def _connect(self, stream: int, errors: int, port: int) -> None:
        """Carry bytes between one stream and one connection until both sides have ended."""
        problem = b""
        try:
            reader, writer = await asyncio.open_connection(self._address, port)
            sending = asyncio.create_task(self._send(stream, writer))
            async for chunk in _chunks(reader):
                await self._socket.send_bytes(spdy.data(stream, chunk))
            sending.cancel()
            writer.close()
        except OSError as error:
            problem = f"cannot reach port {port} of the pod at {self._address}: {error}".encode()
        finally:
            self._incoming.pop(stream, None)
        with contextlib.suppress(ConnectionError):
            await self._socket.send_bytes(spdy.data(errors, problem, is_end=True))
            await self._socket.send_bytes(spdy.data(stream, b"", is_end=True))

    async def _send(self, stream: int, writer: asyncio.StreamWriter) -> None:
        incoming = self._incoming[stream]
        while content := await incoming.get():
            writer.write(content)
            await writer.drain()
        writer.write_eof()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(_CHUNK_BYTES):
        yield chunk
