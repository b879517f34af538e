# SPDX-License-Identifier: Apache-2.0
"""What the operator counts about itself, declared once and served at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from kvtier_operator import __version__


class OperatorMetrics:
    """Counters of one operator, in a registry of its own. Safe to use from several threads."""

    def __init__(self) -> None:
        """Declare the metrics; nothing is served yet."""
        self.registry = CollectorRegistry()
        self._passes = Counter(
            "kvtier_operator_reconcile",
            "Passes over a tier, by how they ended: ok, failed, gone.",
            ["outcome"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvtier_operator_reconcile_duration_seconds",
            "How long a pass over a tier took.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
            registry=self.registry,
        )
        self._writes = Counter(
            "kvtier_operator_writes",
            "Child objects created, changed or deleted, by kind. It stands still when nothing is changed.",
            ["kind"],
            registry=self.registry,
        )
        self._last_success = Gauge(
            "kvtier_operator_last_success_timestamp_seconds",
            "When a pass last ended without a failure.",
            registry=self.registry,
        )
        Gauge(
            "kvtier_operator_build_info",
            "Always 1; the label says which version runs.",
            ["version"],
            registry=self.registry,
        ).labels(version=__version__).set(1)
        for outcome in ("ok", "failed", "gone"):
            self._passes.labels(outcome=outcome)

    def count_pass(self, *, outcome: str, seconds: float, written_kinds: tuple[str, ...]) -> None:
        """Count one pass over a tier."""
        self._passes.labels(outcome=outcome).inc()
        self._seconds.observe(seconds)
        for kind in written_kinds:
            self._writes.labels(kind=kind).inc()
        if outcome != "failed":
            self._last_success.set_to_current_time()

    def serve(self, port: int) -> Callable[[], None]:
        """Serve the metrics on a thread and return what stops it."""
        server, thread = start_http_server(port, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
