# SPDX-License-Identifier: Apache-2.0
"""HTTP servers of the operator, over IPv4 and IPv6; and the answers to the kubelet's probes.

``/healthz`` is 200 while this process does its work, and ``/readyz`` once it can. Both have a thread of their own. They
answer when the operator is stuck, and while it waits for the Lease. kopf's probes live in its event loop, which is not
there then.
"""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, Final

EVERYWHERE: Final = "::"
"""All addresses of this machine; those of IPv4 alone where it has no IPv6."""

_NO_IPV6: Final = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


class HttpServer(ThreadingHTTPServer):
    """Listens from the start; each connection has a thread of its own."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen on a port, 0 for any that is free, of an address or of `EVERYWHERE`.

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


Check = Callable[[], str | None]
"""Returns what is wrong, in words for who reads the pod's events, or None."""


class Health:
    """Named checks, asked at each request. Safe to use from several threads."""

    def __init__(self) -> None:
        """Have nothing to check yet."""
        self._alive: dict[str, Check] = {}
        self._ready: dict[str, Check] = {}

    def alive_if(self, name: str, check: Check) -> None:
        """Let the kubelet restart this process when the check finds something."""
        self._alive = {**self._alive, name: check}

    def ready_if(self, name: str, check: Check) -> None:
        """Let the pod count as not ready when the check finds something."""
        self._ready = {**self._ready, name: check}

    def problems(self, path: str) -> dict[str, str]:
        """Return what is wrong, by the name of the check; a check that fails to answer is wrong, too."""
        checks = self._alive if path == "/healthz" else {**self._alive, **self._ready}
        found: dict[str, str] = {}
        for name, check in checks.items():
            try:
                problem = check()
            except Exception as error:  # noqa: BLE001  an edge: the kubelet must get an answer
                problem = f"cannot be checked: {error!r}"
            if problem is not None:
                found[name] = problem
        return found

    def serve(self, port: int, *, host: str = EVERYWHERE) -> Callable[[], None]:
        """Serve on a thread and return what stops it.

        Raises:
            OSError: the port cannot be listened on.
        """

        class Handler(_Handler):
            health = self

        return HttpServer(host, port, Handler).serve_on_thread("health")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SLOWEST_CLIENT_SECONDS
    health: ClassVar[Health]

    def do_GET(self) -> None:
        """Answer a probe."""
        path = self.path.partition("?")[0]
        if path in {"/healthz", "/readyz"}:
            problems = self.health.problems(path)
            self._answer(503 if problems else 200, {"ok": not problems, "problems": problems})
        else:
            self._answer(404, {"error": "there are /healthz and /readyz"})

    def _answer(self, status: int, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: probes come all the time, and the API server has an audit log."""
