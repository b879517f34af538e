# SPDX-License-Identifier: Apache-2.0
"""Ask a Redis once whether it answers, and say so: ``python3 -m kvtier_connector.pod_tools.redis_check --url redis://HOST:PORT``.

Runs in an init container before an engine that shares its cache there. It never fails: an engine without its Redis
serves, and computes what it could have read. A problem goes to the file that the kubelet reports, for the status.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from kvtier_connector.contract.engine import REDIS_PASSWORD_VARIABLE

PATIENCE_SECONDS = 10.0
"""For a Redis that starts together with the engines; they take much longer to start themselves."""
_EACH_SECONDS = 3.0


def why_not(url: str, password: str = "", *, patience: float = PATIENCE_SECONDS) -> str:
    """Return why a Redis cannot be used; empty if it can."""
    ends = time.monotonic() + patience
    while True:
        problem = _try(url, password)
        if not problem or time.monotonic() >= ends:
            return problem
        time.sleep(0.5)


def _try(url: str, password: str) -> str:
    try:
        address = urlsplit(url)
        host, port = address.hostname or "", address.port or 6379
        with socket.create_connection((host, port), timeout=_EACH_SECONDS) as plain:
            if address.scheme == "rediss":
                with ssl.create_default_context().wrap_socket(plain, server_hostname=host) as wrapped:
                    return _talk(wrapped, password)
            return _talk(plain, password)
    except OSError as error:
        return str(error.strerror or error)
    except ValueError as error:
        # No such port, or a name that cannot be written for a look-up.
        return str(error) or "the address cannot be read"


def _talk(connection: socket.socket, password: str) -> str:
    """Give the password, ask for a sign of life, and return what the server has against it."""
    for words in ([["AUTH", password]] if password else []) + [["PING"]]:
        parts = (f"${len(word.encode())}\r\n{word}\r\n" for word in words)
        connection.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
        answer = b""
        while not answer.endswith(b"\r\n"):
            piece = connection.recv(4096)
            if not piece:
                return "it closed the connection"
            answer += piece
        if not answer.startswith(b"+"):
            # A server quotes no password.
            return answer[1:200].decode(errors="replace").strip()
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; always returns 0."""
    parser = argparse.ArgumentParser(prog="python3 -m kvtier_connector.pod_tools.redis_check")
    parser.add_argument("--url", required=True, help="redis://HOST:PORT, or rediss:// for TLS")
    parser.add_argument("--result", type=Path, required=True, help="file for what was found")
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds until it is given up")
    options = parser.parse_args(arguments)
    problem = why_not(options.url, os.environ.get(REDIS_PASSWORD_VARIABLE, ""), patience=options.patience)
    options.result.write_text(json.dumps({"problem": problem}), encoding="utf-8")
    sys.stdout.write(f"{options.url}: {problem or 'it answers'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
