# SPDX-License-Identifier: Apache-2.0
"""Commands and connections into pods over a WebSocket, as kubectl 1.31 and later ask.

kubectl exec: each message begins with the number of its channel. In the fifth version of the protocol a client ends the
command's input and still receives its output; in the fourth the input ends when the client leaves.

kubectl port-forward: each connection has two streams, named by a request id, one for data and one for errors. They come
as SPDY 3.1 through the WebSocket. The `Session` here has streams that a client opens and data both ways. It has no flow
control, as kubectl's SPDY ignores windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.resources
import json
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

from aiohttp import WSMsgType, web

from kvtier_localcluster.apiserver.store.api_errors import bad_request
from kvtier_localcluster.apiserver.store.objects import Json, field_at

_LENGTH: Final = struct.Struct(">I")
_HEADER: Final = struct.Struct(">II")
_CONTROL: Final = 0x80030000
_IS_CONTROL: Final = 0x80000000
_STREAM: Final = 0x7FFFFFFF
_SIZE: Final = 0xFFFFFF
_REPLY, _PING = 2, 6
_OPENING_BYTES: Final = 10
_FIN: Final = 1


def _sized(text: str) -> bytes:
    return _LENGTH.pack(len(text)) + text.encode()


@functools.cache
def dictionary() -> bytes:
    """Return the texts that both sides know before the first header."""
    names, rest = (importlib.resources.files(__package__) / "spdy_dictionary.txt").read_text().splitlines()
    return b"".join(_sized(name.replace("|", " ")) for name in names.split()) + rest.encode()


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Something that the client sent about one stream."""

    stream: int
    headers: dict[str, str] = field(default_factory=dict)
    """Of a stream that opens; empty for any other frame."""
    data: bytes = b""
    is_end: bool = False
    """The client will send nothing more on the stream."""


class Session:
    """One connection: turns bytes into frames, and what is to be said into bytes."""

    def __init__(self) -> None:
        """Start with nothing received."""
        self._received = b""
        self._inflate = zlib.decompressobj(zdict=dictionary())
        self._deflate = zlib.compressobj()

    def receive(self, data: bytes) -> Iterator[Frame | bytes]:
        """Yield the frames that are complete now, and bytes that are to be sent back as they are."""
        self._received += data
        while len(self._received) >= _HEADER.size:
            first, second = _HEADER.unpack_from(self._received)
            end = _HEADER.size + (second & _SIZE)
            if len(self._received) < end:
                return
            body, self._received = self._received[_HEADER.size : end], self._received[end:]
            is_end = bool(second >> 24 & _FIN)
            if not first & _IS_CONTROL:
                yield Frame(stream=first & _STREAM, data=body, is_end=is_end)
                continue
            stream = _LENGTH.unpack_from(body)[0] & _STREAM if len(body) >= _LENGTH.size else 0
            match first & ~_CONTROL:
                case 1:
                    yield Frame(stream=stream, headers=self._headers(body[_OPENING_BYTES:]), is_end=is_end)
                case 3:
                    yield Frame(stream=stream, is_end=True)
                case 6:
                    yield _HEADER.pack(_CONTROL | _PING, len(body)) + body

    def _headers(self, block: bytes) -> dict[str, str]:
        plain = self._inflate.decompress(block)
        texts: list[str] = []
        place = _LENGTH.size
        while place < len(plain):
            size = _LENGTH.unpack_from(plain, place)[0]
            place += _LENGTH.size
            texts.append(plain[place : place + size].decode())
            place += size
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def accept(self, stream: int) -> bytes:
        """Return the answer to a stream that was opened: it carries no headers."""
        block = self._deflate.compress(_LENGTH.pack(0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _HEADER.pack(_CONTROL | _REPLY, _LENGTH.size + len(block)) + _LENGTH.pack(stream) + block


def data_frame(stream: int, content: bytes, *, is_end: bool = False) -> bytes:
    """Return content as a frame of a stream."""
    return _HEADER.pack(stream, (_FIN if is_end else 0) << 24 | len(content)) + content


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
        self._session = Session()
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

    async def _open(self, frame: Frame) -> None:
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
                await self._socket.send_bytes(data_frame(stream, chunk))
            sending.cancel()
            writer.close()
        except OSError as error:
            problem = f"cannot reach port {port} of the pod at {self._address}: {error}".encode()
        finally:
            self._incoming.pop(stream, None)
        with contextlib.suppress(ConnectionError):
            await self._socket.send_bytes(data_frame(errors, problem, is_end=True))
            await self._socket.send_bytes(data_frame(stream, b"", is_end=True))

    async def _send(self, stream: int, writer: asyncio.StreamWriter) -> None:
        incoming = self._incoming[stream]
        while content := await incoming.get():
            writer.write(content)
            await writer.drain()
        writer.write_eof()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(_CHUNK_BYTES):
        yield chunk


CLOSES_CHANNELS: Final = "v5.channel.k8s.io"
PROTOCOLS: Final = (CLOSES_CHANNELS, "v4.channel.k8s.io")
INPUT, OUTPUT, ERRORS, OUTCOME, CLOSE = 0, 1, 2, 3, 255
_WAITING_MESSAGES: Final = 16
"""Of input that the command has not read yet: after these the client waits."""

Send = Callable[[int, bytes], Awaitable[None]]
PodExec = Callable[[str, str, str, list[str], Send, AsyncIterator[bytes] | None], Awaitable[int]]
"""Runs a command: namespace, pod, container, command, who is told what it says, and what it reads; returns its exit
code."""


async def execute(request: web.Request, pod: Json, source: PodExec | None) -> web.WebSocketResponse:
    """Serve one kubectl exec until the command ends, or the client goes.

    Raises:
        ApiError: the pod has no such container or does not run, or the client speaks no WebSocket.
    """
    containers = [each["name"] for each in pod["spec"]["containers"]]
    container = request.query.get("container") or containers[0]
    if container not in containers:
        raise bad_request(f"container {container} is not valid for pod {pod['metadata']['name']}")
    socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=0)
    if source is None or not socket.can_prepare(request):
        raise bad_request("exec takes pods that run as processes, and a WebSocket: use kubectl 1.31 or later")
    await socket.prepare(request)

    async def send(channel: int, content: bytes) -> None:
        await socket.send_bytes(bytes([channel]) + content)

    queue: asyncio.Queue[bytes | None] | None = None
    if request.query.get("stdin") in ("true", "1"):
        queue = asyncio.Queue(_WAITING_MESSAGES)
    names = pod["metadata"]["namespace"], pod["metadata"]["name"]
    command = asyncio.ensure_future(
        source(*names, container, request.query.getall("command"), send, None if queue is None else _pieces(queue))
    )
    # A client that leaves ends the command.
    listening = asyncio.ensure_future(_listen(socket, queue))
    await asyncio.wait((command, listening), return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ConnectionError):
        if command.done():
            await send(OUTCOME, json.dumps(_outcome(command.result())).encode())
    for each in (command, listening):
        each.cancel()
    await asyncio.gather(command, listening, return_exceptions=True)
    await socket.close()
    return socket


async def _listen(socket: web.WebSocketResponse, queue: asyncio.Queue[bytes | None] | None) -> None:
    async for message in socket:
        content = message.data.encode() if isinstance(message.data, str) else bytes(message.data)
        if queue is None or not content:
            continue
        if content[0] == INPUT and len(content) > 1:
            await queue.put(content[1:])
        elif content == bytes([CLOSE, INPUT]) and socket.ws_protocol == CLOSES_CHANNELS:
            await queue.put(None)


async def _pieces(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (piece := await queue.get()) is not None:
        yield piece


def _outcome(code: int) -> Json:
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code)}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [cause]},
    }
