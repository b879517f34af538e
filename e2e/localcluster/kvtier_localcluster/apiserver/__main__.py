# SPDX-License-Identifier: Apache-2.0
"""`python -m kvtier_localcluster.apiserver [PORT]`: serve until interrupted, and print the kubeconfig and requests."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from kvtier_localcluster.apiserver.server import ApiServer

_POLL_SECONDS = 0.3


async def _serve(port: int) -> None:
    server = ApiServer()
    await server.start(port)
    print(server.kubeconfig(), flush=True)
    shown = 0
    while True:
        for entry in server.audit[shown:]:
            print(entry, flush=True)
        shown = len(server.audit)
        await asyncio.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
