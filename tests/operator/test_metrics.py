# SPDX-License-Identifier: Apache-2.0
"""What the operator counts is served, and its port is free again afterwards."""

from __future__ import annotations

import socket
import urllib.request

from kvtier_operator.metrics import OperatorMetrics


def test_passes_and_writes_are_served_until_stopped() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metrics = OperatorMetrics()
    stop = metrics.serve(port)
    metrics.count_pass(outcome="ok", seconds=0.2, written_kinds=("Service", "Service"))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    stop()
    assert 'kvtier_operator_reconcile_total{outcome="ok"} 1.0' in text
    assert 'kvtier_operator_reconcile_total{outcome="failed"} 0.0' in text
    assert 'kvtier_operator_writes_total{kind="Service"} 2.0' in text
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
