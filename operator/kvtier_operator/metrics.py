# SPDX-License-Identifier: Apache-2.0
"""Metrics of the operator, declared once as data and served at ``/metrics``.

``python -m kvtier_operator.metrics --write`` writes the list for the user's documentation.
"""

from __future__ import annotations

import sys
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, MetricsHandler, ProcessCollector
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvtier_connector.contract import generated_page
from kvtier_operator import __version__
from kvtier_operator.kube.http_server import EVERYWHERE, HttpServer

REFERENCE: Final = Path(__file__).parents[2] / "docs" / "operator-metrics.md"

_HEAD = """\
# Metrics of the operator

Served at `/metrics` on the port that `KVTIER_METRICS_PORT` or `--metrics-port` names (9090 with the Helm chart). An
operator that waits for the lead serves them, too, and `process_*` of itself. Dashboards and alerts made of them:
[operations.md](operations.md#watch). Written by `make generate`; do not edit.

At rest the operator reconciles each tier once in 600 s (`settings.resyncSeconds` of the chart), in memory: it sends the
API server nothing but the renewals of its Lease. It learns of changes by watching.

| Metric | Kind | Labels | Meaning |
|---|---|---|---|
"""


class MetricSpec(NamedTuple):
    """One metric: its name as served, less the ``_total`` of a counter."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


_CONDITION: Final = ("condition", "status", "reason")

METRICS: Final = (
    MetricSpec(
        "kvtier_operator_reconcile",
        "counter",
        "Reconciles of a tier, by result: ok, failed, gone, left (to another operator), unchanged (as it was left).",
        ("outcome",),
    ),
    MetricSpec("kvtier_operator_reconcile_duration_seconds", "histogram", "Duration of a reconcile."),
    MetricSpec(
        "kvtier_operator_writes",
        "counter",
        "Child objects created, changed or deleted, by kind. It stands still when nothing is changed.",
        ("kind",),
    ),
    MetricSpec(
        "kvtier_operator_last_success_timestamp_seconds", "gauge", "When a reconcile last ended without a failure."
    ),
    MetricSpec("kvtier_operator_queue_depth", "gauge", "Tiers that are due and wait for a worker."),
    MetricSpec("kvtier_operator_queue_age_seconds", "gauge", "How long the tier that waits longest has been due."),
    MetricSpec(
        "kvtier_operator_api_requests",
        "counter",
        "Requests to the API server, less the watches, by method and HTTP status; code 0 is no answer at all.",
        ("method", "code"),
    ),
    MetricSpec(
        "kvtier_operator_tiers",
        "gauge",
        "KVCacheTier resources by condition, its status and its reason, as of the last count (every minute).",
        _CONDITION,
    ),
    MetricSpec(
        "kvtier_tier_condition",
        "gauge",
        "1 for each condition of each KVCacheTier, with its status and its reason, as of the last count.",
        ("namespace", "tier", *_CONDITION),
    ),
    MetricSpec(
        "kvtier_tier_engines",
        "gauge",
        "Engines of each KVCacheTier: wanted (spec.replicas), and ready, as of the last count.",
        ("namespace", "tier", "state"),
    ),
    MetricSpec("kvtier_operator_leader", "gauge", "1 while this operator acts, 0 while it waits for the Lease."),
    MetricSpec("kvtier_operator_build_info", "gauge", "Always 1; the label says which version runs.", ("version",)),
)
_BY_NAME: Final = {metric.name: metric for metric in METRICS}


class _Samples(Collector):
    """Samples of one gauge that come and go, hundreds of thousands of them: each is little more than its labels."""

    def __init__(self, metric: MetricSpec, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._values: Mapping[tuple[str, ...], float] = {}
        registry.register(self)

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Show these samples and no others."""
        self._values = values

    def collect(self) -> Iterator[Family]:
        """Return the gauge."""
        metric, values = self._metric, self._values
        found = Family(metric.name, metric.help, metric.kind)
        # Not a list, which would take more than all that is kept.
        samples: Any = (
            Sample(metric.name, dict(zip(metric.labels, labels, strict=True)), value)
            for labels, value in values.items()
        )
        found.samples = samples
        yield found


def _name(tier: Mapping[str, Any]) -> tuple[str, ...]:
    return _shared(tier["metadata"]["namespace"], tier["metadata"]["name"])


def _shared(*words: str) -> tuple[str, ...]:
    """Return words that are said of many tiers, each kept once."""
    return tuple(map(sys.intern, words))


def _conditions(tier: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for condition in (tier.get("status") or {}).get("conditions", ()):
        yield *_name(tier), *_shared(condition["type"], condition["status"], condition["reason"])


def _engines(tier: Mapping[str, Any]) -> dict[str, int]:
    wanted = (tier.get("spec") or {}).get("replicas", 1)
    return {"wanted": wanted, "ready": (tier.get("status") or {}).get("readyReplicas", 0)}


class OperatorMetrics:
    """Counters of one operator, in a registry of its own. Safe to use from several threads."""

    def __init__(self) -> None:
        """Declare the metrics; nothing is served yet."""
        self.registry = CollectorRegistry()
        self._reconciles = self._counter("kvtier_operator_reconcile")
        duration = _BY_NAME["kvtier_operator_reconcile_duration_seconds"]
        self._seconds = Histogram(
            duration.name, duration.help, buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100), registry=self.registry
        )
        self._writes = self._counter("kvtier_operator_writes")
        self._last_success = self._gauge("kvtier_operator_last_success_timestamp_seconds")
        self._depth = self._gauge("kvtier_operator_queue_depth")
        self._age = self._gauge("kvtier_operator_queue_age_seconds")
        self._requests = self._counter("kvtier_operator_api_requests")
        self._leader = self._gauge("kvtier_operator_leader")
        self._gauge("kvtier_operator_build_info").labels(version=__version__).set(1)
        for outcome in ("ok", "failed", "gone", "left"):
            self._reconciles.labels(outcome=outcome)
        self._by_reason, self._by_tier, self._engines = (
            _Samples(_BY_NAME[name], self.registry)
            for name in ("kvtier_operator_tiers", "kvtier_tier_condition", "kvtier_tier_engines")
        )
        ProcessCollector(registry=self.registry)

    def _counter(self, name: str) -> Counter:
        metric = _BY_NAME[name]
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        metric = _BY_NAME[name]
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def count_reconcile(self, *, outcome: str, seconds: float, written_kinds: tuple[str, ...]) -> None:
        """Count one reconcile of a tier."""
        self._reconciles.labels(outcome=outcome).inc()
        self._seconds.observe(seconds)
        for kind in written_kinds:
            self._writes.labels(kind=kind).inc()
        if outcome != "failed":
            self._last_success.set_to_current_time()

    def count_request(self, method: str, status: int) -> None:
        """Count one request to the API server; 0 is no answer."""
        self._requests.labels(method=method, code=str(status)).inc()

    def count_tiers(self, tiers: Iterable[dict[str, Any]]) -> None:
        """Show the conditions and the engines of these tiers, and of no others. One thread at a time."""
        conditions, engines = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
        for tier in tiers:
            name = _name(tier)
            conditions |= dict.fromkeys(_conditions(tier), 1.0)
            engines |= {(*name, state): float(count) for state, count in _engines(tier).items()}
        self._by_reason.show({key: float(count) for key, count in Tally(labels[2:] for labels in conditions).items()})
        self._by_tier.show(conditions)
        self._engines.show(engines)

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
    return generated_page.run(arguments, prog="kvtier_operator.metrics", file=REFERENCE, render=render)


def _row(metric: MetricSpec) -> str:
    name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{name}` | {metric.kind} | {labels} | {metric.help} |\n"


if __name__ == "__main__":
    sys.exit(main())
