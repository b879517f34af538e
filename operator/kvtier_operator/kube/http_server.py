# SPDX-License-Identifier: Apache-2.0
"""The small HTTP servers of the operator: over IPv4 and IPv6, whichever the cluster's pods have, in JSON, unlogged."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

EVERYWHERE: Final = "::"
"""All addresses of this machine; those of IPv4 alone where it has no IPv6."""

_NO_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


class HttpServer(ThreadingHTTPServer):
    """Listens from the start; each connection has a thread of its own."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen on a port of an address.

        Args:
            host: an IP address or a name; `EVERYWHERE` for all addresses.
            port: 0 for any that is free.
            handler: answers requests.

        Raises:
            OSError: the address cannot be listened on.
        """
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            if host != EVERYWHERE or error.errno not in _NO_IPV6:
                raise
            self.address_family = socket.AF_INET
            super().__init__(("0.0.0.0", port), handler)  # noqa: S104  who asks is outside the pod

    def serve_on_thread(self, name: str) -> Callable[[], None]:
        """Answer on a thread of this name, and return what stops that."""
        thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        thread.start()

        def stop() -> None:
            self.shutdown()
            self.server_close()
            thread.join()

        return stop

    def server_bind(self) -> None:
        """Take IPv4 as well, whatever the machine's default is."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


SLOWEST_CLIENT_SECONDS: Final = 10.0


class JsonHandler(BaseHTTPRequestHandler):
    """One connection; who derives from it says what is answered."""

    protocol_version = "HTTP/1.1"
    timeout = SLOWEST_CLIENT_SECONDS

    def answer(self, status: int, document: object) -> None:
        """Send the whole answer."""
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: probes come all the time, and the API server has an audit log."""
