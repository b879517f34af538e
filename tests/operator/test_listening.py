# SPDX-License-Identifier: Apache-2.0
"""What the operator serves is reached over IPv4 and IPv6, and over IPv4 alone where there is nothing else."""

from __future__ import annotations

import errno
import functools
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvtier_localcluster.ports import free_port
from kvtier_operator.kube.http_server import Health
from kvtier_operator.metrics import OperatorMetrics

Serve = Callable[[int], Callable[[], None]]


@contextmanager
def serving(serve: Serve) -> Iterator[int]:
    port = free_port()
    stop = serve(port)
    try:
        yield port
    finally:
        stop()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


with_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def is_answered(host: str, port: int, path: str = "/healthz") -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@with_ipv6
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "[::1]"), ("::1", "127.0.0.1")])
def test_one_address_is_served_alone(host: str, other: str) -> None:
    with serving(functools.partial(Health().serve, host=host)) as port:
        assert is_answered(f"[{host}]" if ":" in host else host, port)
        assert not is_answered(other, port)


@with_ipv6
@pytest.mark.parametrize(("serve", "path"), [(Health().serve, "/healthz"), (OperatorMetrics().serve, "/metrics")])
def test_probes_and_metrics_are_answered_over_both(serve: Serve, path: str) -> None:
    with serving(serve) as port:
        assert is_answered("127.0.0.1", port, path)
        assert is_answered("[::1]", port, path)


class WithoutIpv6(socket.socket):
    """A socket of a kernel that was started with ipv6.disable=1."""

    def __init__(self, family: int = -1, kind: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, kind, proto, fileno)


def test_a_machine_without_ipv6_serves_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", WithoutIpv6)
    with serving(Health().serve) as port:
        assert is_answered("127.0.0.1", port)


def test_a_port_that_is_taken_is_an_error_and_not_a_reason_to_serve_ipv4_alone() -> None:
    with serving(Health().serve) as port, pytest.raises(OSError, match="in use"):
        Health().serve(port)
