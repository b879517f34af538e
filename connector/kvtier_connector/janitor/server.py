# SPDX-License-Identifier: Apache-2.0
"""Serves /metrics, /healthz and /usage on threads of their own; none of them ever waits for the volume."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from kvtier_connector.contract_usage import USAGE_PATH

_REQUEST_SECONDS = 10.0


class Answer(NamedTuple):
    """Of one path."""

    status: int
    content_type: str
    body: bytes


Pages = dict[str, Callable[[], Answer]]

METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"


def make_pages(*, metrics: Callable[[], bytes], usage: Callable[[], str], health: Callable[[], str]) -> Pages:
    """Return what is served.

    Args:
        metrics: The exposition of Prometheus.
        usage: The document of /usage.
        health: Why this process should be started anew; empty if it should not.
    """

    def answer_health() -> Answer:
        sickness = health()
        return Answer(503 if sickness else 200, "text/plain; charset=utf-8", f"{sickness or 'ok'}\n".encode())

    return {
        METRICS_PATH: lambda: Answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics()),
        USAGE_PATH: lambda: Answer(200, "application/json", usage().encode()),
        HEALTH_PATH: answer_health,
    }


class Server:
    """Serves until it is closed."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Listen; raises OSError if the port is taken."""
        self._server = _HttpServer(host, port, _handler(pages))
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        """Start to answer."""
        threading.Thread(target=self._server.serve_forever, name="kvtier-http", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _HttpServer(ThreadingHTTPServer):
    """Listens on IPv6 where the address is one; on `::`, on IPv4 as well."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _handler(pages: Pages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            answer = Answer(404, "text/plain", b"not here\n") if page is None else page()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
            """Say nothing: probes ask every few seconds."""

    return Handler
