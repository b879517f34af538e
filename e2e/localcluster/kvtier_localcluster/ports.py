# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that are told theirs before they listen."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 15_000, 30_000
"""Below those that the kernel gives to connections: until somebody listens, one of these may take what was free."""


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
