# SPDX-License-Identifier: Apache-2.0
"""kubectl exec: one WebSocket carries a command's input and output and, in the end, how it ended, as kubectl 1.31 asks.

Each message begins with the number of its channel. In the fifth version of the protocol, a client ends the command's
input and still hears what the command says; in the fourth the input ends when the client goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from aiohttp import web

from kvtier_localcluster.apiserver.api_errors import bad_request
from kvtier_localcluster.apiserver.objects import Json

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
    # Whoever goes away ends the command.
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
