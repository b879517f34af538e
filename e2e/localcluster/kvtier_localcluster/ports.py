# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that get theirs before they listen."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 15_000, 30_000
"""The range lies below the ports of connections, which could take a free port before its process listens."""


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
