# SPDX-License-Identifier: Apache-2.0
"""What the operator counts is served, and its port is free again afterwards."""

from __future__ import annotations

import socket
import urllib.request

from kvtier_localcluster.ports import free_port
from kvtier_operator.metrics import OperatorMetrics


def test_passes_and_writes_are_served_until_stopped() -> None:
    port = free_port()
    metrics = OperatorMetrics()
    stop = metrics.serve(port)
    metrics.count_reconcile(outcome="ok", seconds=0.2, written_kinds=("Service", "Service"))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        text = response.read().decode()
    stop()
    assert 'kvtier_operator_reconcile_total{outcome="ok"} 1.0' in text
    assert 'kvtier_operator_reconcile_total{outcome="failed"} 0.0' in text
    assert 'kvtier_operator_writes_total{kind="Service"} 2.0' in text
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


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
