# SPDX-License-Identifier: Apache-2.0
"""The janitor is reached over the family of addresses that its pod has."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from kvtier_connector.janitor.metrics import Server, make_pages


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def is_answered(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "over_4", "over_6"),
    [("", True, False), ("0.0.0.0", True, False), ("::", True, True), ("::1", False, True)],
)
def test_it_serves_the_addresses_that_it_is_told(host: str, over_4: bool, over_6: bool) -> None:
    server = Server(host, 0, make_pages(metrics=bytes, usage=str, health=str))
    server.start()
    try:
        assert is_answered(f"http://127.0.0.1:{server.port}") is over_4
        assert is_answered(f"http://[::1]:{server.port}") is over_6
    finally:
        server.close()
