# SPDX-License-Identifier: Apache-2.0
"""The listening socket of a Service, closed while clients connect."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from typing import Any

import pytest

from kvtier_localcluster.controllers.service_proxy import PortForwarder


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_arrives_while_the_socket_closes_is_closed_too(turns: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def connect_and_stop() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        forwarder = PortForwarder()
        await forwarder.start(address)
        with socket.create_connection(address) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await forwarder.stop()
            client.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""

    asyncio.run(connect_and_stop())
    gc.collect()  # what was left open complains now, and a warning is an error
    assert complaints == []
