# SPDX-License-Identifier: Apache-2.0
"""How the small HTTP servers of the operator answer: in JSON, over connections that stay open, and without a log."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Final

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
