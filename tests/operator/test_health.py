# SPDX-License-Identifier: Apache-2.0
"""What the operator serves: probes, from which the kubelet learns of a dead watch, and metrics, over IPv4 and IPv6."""

from __future__ import annotations

import errno
import functools
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from plain_http import has_ipv6

from kvtier_localcluster.ports import free_port
from kvtier_operator.kube.http_server import Health
from kvtier_operator.metrics import OperatorMetrics


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def port() -> int:
    return free_port()


def test_probes_are_answered_with_the_reasons(port: int) -> None:
    health = Health()
    wrong: dict[str, str | None] = {"queue": None, "lease": "not yet"}
    health.alive_if("queue", lambda: wrong["queue"])
    health.ready_if("lease", lambda: wrong["lease"])
    stop = health.serve(port, host="127.0.0.1")
    try:
        assert ask(port, "/healthz") == (200, {"ok": True, "problems": {}})
        assert ask(port, "/readyz") == (503, {"ok": False, "problems": {"lease": "not yet"}})
        wrong.update(queue="stuck", lease=None)
        assert ask(port, "/healthz?verbose") == (503, {"ok": False, "problems": {"queue": "stuck"}})
        assert ask(port, "/readyz")[0] == 503
        assert ask(port, "/")[0] == 404
    finally:
        stop()


def test_a_check_that_breaks_is_a_problem_and_no_crash() -> None:
    health = Health()
    health.alive_if("broken", lambda: str(1 // 0))
    assert "ZeroDivisionError" in health.problems("/healthz")["broken"]


Serve = Callable[[int], Callable[[], None]]


@contextmanager
def serving(serve: Serve) -> Iterator[int]:
    port = free_port()
    stop = serve(port)
    try:
        yield port
    finally:
        stop()


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
    assert not is_answered("127.0.0.1", port, path)


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


def tier(name: str, ready: str, reason: str, *, engines: int) -> dict[str, object]:
    condition = {"type": "Ready", "status": ready, "reason": reason}
    return {
        "metadata": {"namespace": "team-a", "name": name},
        "spec": {"replicas": 2},
        "status": {"conditions": [condition], "readyReplicas": engines},
    }


def test_each_tier_shows_its_conditions_and_engines_by_namespace_and_name_for_as_long_as_it_is_there() -> None:
    metrics = OperatorMetrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    llama = {"namespace": "team-a", "tier": "llama"}
    starting = {"condition": "Ready", "status": "False", "reason": "EnginesStarting"}
    metrics.count_tiers(
        [tier("llama", "False", "EnginesStarting", engines=1), tier("qwen", "True", "Ready", engines=2)]
    )
    assert value("kvtier_tier_condition", **llama, **starting) == 1
    assert value("kvtier_tier_engines", **llama, state="ready") == 1
    assert value("kvtier_tier_engines", **llama, state="wanted") == 2
    assert value("kvtier_operator_tiers", **starting) == 1
    metrics.count_tiers([{"metadata": llama | {"name": "llama"}}])
    assert value("kvtier_tier_condition", **llama, **starting) is None
    assert value("kvtier_operator_tiers", **starting) is None
    assert value("kvtier_tier_engines", **llama, state="ready") == 0
    assert value("kvtier_tier_engines", namespace="team-a", tier="qwen", state="ready") is None


def test_passes_and_writes_are_counted() -> None:
    metrics = OperatorMetrics()
    metrics.count_reconcile(outcome="ok", seconds=0.2, written_kinds=("Service", "Service"))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    assert found["kvtier_operator_reconcile_total", "ok"] == 1
    assert found["kvtier_operator_reconcile_total", "failed"] == 0
    assert found["kvtier_operator_writes_total", "Service"] == 2
