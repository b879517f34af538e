# SPDX-License-Identifier: Apache-2.0
"""What the operator counts about itself, declared once as data and served at ``/metrics``.

``python -m kvtier_operator.metrics --write`` writes the list for the user's documentation.
"""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, MetricsHandler

from kvtier_operator import __version__, reference
from kvtier_operator.listening import EVERYWHERE, HttpServer

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "operator-metrics.md"

_HEAD = """\
# Metrics of the operator

Served at `/metrics` on the port that `KVTIER_METRICS_PORT` or `--metrics-port` names (9090 with the Helm chart). An
operator that waits for the lead serves them, too. Written by `make generate`; do not edit.

At rest the operator looks at each tier once in 600 s (`settings.resyncSeconds` of the chart): ten reads of the API
server, about 10 ms of a core, and no write. A thousand tiers take 2 % of a core, 17 reads a second and 180 MB.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: its name as served, less the ``_total`` of a counter."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


RECONCILES: Final = Metric(
    name="kvtier_operator_reconcile",
    kind="counter",
    help="Passes over a tier, by how they ended: ok, failed, gone.",
    labels=("outcome",),
)
SECONDS: Final = Metric(
    name="kvtier_operator_reconcile_duration_seconds", kind="histogram", help="How long a pass over a tier took."
)
WRITES: Final = Metric(
    name="kvtier_operator_writes",
    kind="counter",
    help="Child objects created, changed or deleted, by kind. It stands still when nothing is changed.",
    labels=("kind",),
)
LAST_SUCCESS: Final = Metric(
    name="kvtier_operator_last_success_timestamp_seconds",
    kind="gauge",
    help="When a pass last ended without a failure.",
)
QUEUE_DEPTH: Final = Metric(
    name="kvtier_operator_queue_depth", kind="gauge", help="Tiers that are due and wait for a worker."
)
QUEUE_AGE: Final = Metric(
    name="kvtier_operator_queue_age_seconds",
    kind="gauge",
    help="How long the tier that waits longest has been due.",
)
REQUESTS: Final = Metric(
    name="kvtier_operator_api_requests",
    kind="counter",
    help="Requests to the API server, less the watches, by method and HTTP status; code 0 is no answer at all.",
    labels=("method", "code"),
)
TIERS: Final = Metric(
    name="kvtier_operator_tiers",
    kind="gauge",
    help="KVCacheTier resources by condition, its status and its reason, as of the last list (every minute).",
    labels=("condition", "status", "reason"),
)
LEADER: Final = Metric(
    name="kvtier_operator_leader", kind="gauge", help="1 while this operator acts, 0 while it waits for the Lease."
)
BUILD: Final = Metric(
    name="kvtier_operator_build_info",
    kind="gauge",
    help="Always 1; the label says which version runs.",
    labels=("version",),
)
METRICS: Final = (
    RECONCILES,
    SECONDS,
    WRITES,
    LAST_SUCCESS,
    QUEUE_DEPTH,
    QUEUE_AGE,
    REQUESTS,
    TIERS,
    LEADER,
    BUILD,
)


class OperatorMetrics:
    """Counters of one operator, in a registry of its own. Safe to use from several threads."""

    def __init__(self) -> None:
        """Declare the metrics; nothing is served yet."""
        self.registry = CollectorRegistry()
        self._passes = self._counter(RECONCILES)
        self._seconds = Histogram(
            SECONDS.name, SECONDS.help, buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100), registry=self.registry
        )
        self._writes = self._counter(WRITES)
        self._last_success = self._gauge(LAST_SUCCESS)
        self._depth = self._gauge(QUEUE_DEPTH)
        self._age = self._gauge(QUEUE_AGE)
        self._requests = self._counter(REQUESTS)
        self._tiers = self._gauge(TIERS)
        self._leader = self._gauge(LEADER)
        self._gauge(BUILD).labels(version=__version__).set(1)
        for outcome in ("ok", "failed", "gone"):
            self._passes.labels(outcome=outcome)
        self._shown: frozenset[tuple[str, str, str]] = frozenset()

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def count_pass(self, *, outcome: str, seconds: float, written_kinds: tuple[str, ...]) -> None:
        """Count one pass over a tier."""
        self._passes.labels(outcome=outcome).inc()
        self._seconds.observe(seconds)
        for kind in written_kinds:
            self._writes.labels(kind=kind).inc()
        if outcome != "failed":
            self._last_success.set_to_current_time()

    def count_request(self, method: str, status: int) -> None:
        """Count one request to the API server; 0 is no answer."""
        self._requests.labels(method=method, code=str(status)).inc()

    def count_conditions(self, tiers: Iterable[dict[str, Any]]) -> None:
        """Show how many tiers are in which condition. One thread at a time."""
        found = Tally(
            (condition["type"], condition["status"], condition["reason"])
            for tier in tiers
            for condition in (tier.get("status") or {}).get("conditions", ())
        )
        for gone in self._shown - found.keys():
            self._tiers.remove(*gone)
        for labels, count in found.items():
            self._tiers.labels(*labels).set(count)
        self._shown = frozenset(found)

    def watch_queue(self, *, depth: Callable[[], int], overdue_seconds: Callable[[], float]) -> None:
        """Ask these whenever the metrics are read."""
        self._depth.set_function(depth)
        self._age.set_function(overdue_seconds)

    def set_leader(self, *, is_leader: bool) -> None:
        """Show whether this operator acts."""
        self._leader.set(is_leader)

    def serve(self, port: int) -> Callable[[], None]:
        """Serve the metrics on a thread and return what stops it."""
        return HttpServer(EVERYWHERE, port, MetricsHandler.factory(self.registry)).serve_on_thread("metrics")


def render() -> str:
    """Return the list of metrics as a document."""
    return _HEAD + "".join(map(_row, METRICS))


def main(arguments: list[str] | None = None) -> int:
    """Write the document, or say whether it is up to date."""
    return reference.run(arguments, prog="kvtier_operator.metrics", file=REFERENCE, render=render)


def _row(metric: Metric) -> str:
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {metric.help} |\n"


if __name__ == "__main__":
    sys.exit(main())
