# SPDX-License-Identifier: Apache-2.0
"""kubectl exec: one WebSocket carries a command's output and, in the end, how it ended, as kubectl 1.31 and later ask.

Each message begins with the number of its channel. Nothing is passed to the command's standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from kvtier_localcluster.apiserver.api_errors import bad_request
from kvtier_localcluster.apiserver.objects import Json

PROTOCOLS: Final = ("v5.channel.k8s.io", "v4.channel.k8s.io")
OUTPUT, ERRORS, OUTCOME = 1, 2, 3

Send = Callable[[int, bytes], Awaitable[None]]
PodExec = Callable[[str, str, str, list[str], Send], Awaitable[int]]
"""Runs a command: namespace, pod, container, command, and who is told what it says; returns its exit code."""


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

    command = asyncio.ensure_future(
        source(pod["metadata"]["namespace"], pod["metadata"]["name"], container, request.query.getall("command"), send)
    )
    # Whoever goes away ends the command; until then nothing is expected from there.
    listening = asyncio.ensure_future(_listen(socket))
    await asyncio.wait((command, listening), return_when=asyncio.FIRST_COMPLETED)
    with contextlib.suppress(ConnectionError):
        if command.done():
            await send(OUTCOME, json.dumps(_outcome(command.result())).encode())
    for each in (command, listening):
        each.cancel()
    await asyncio.gather(command, listening, return_exceptions=True)
    await socket.close()
    return socket


async def _listen(socket: web.WebSocketResponse) -> None:
    async for _ in socket:
        continue


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
