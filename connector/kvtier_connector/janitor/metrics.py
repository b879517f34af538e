# SPDX-License-Identifier: Apache-2.0
"""The janitor's metrics as data, and what serves them: samples come from the last report when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier_connector.janitor.report import Report


class Declared(NamedTuple):
    """One metric. Prometheus appends ``_total`` to the name of a counter."""

    name: str
    documentation: str
    label: str = ""
    is_gauge: bool = True


ACTIVE = Declared("kvtier_janitor_active", "1 while this janitor holds the Lease and keeps the tier, else 0.")
COUNTED = Declared("kvtier_janitor_counted", "1 once every block was seen, 0 while the first walk goes on.")
USED_BYTES = Declared("kvtier_janitor_used_bytes", "What the blocks of a generation take on the volume.", "generation")
BLOCKS = Declared("kvtier_janitor_blocks", "Blocks of a generation.", "generation")
TENANT_BYTES = Declared(
    "kvtier_janitor_tenant_used_bytes",
    "What the blocks of a tenant take on the volume: of the 100 that take most, and of all others as `(other)`.",
    "tenant",
)
TENANTS = Declared("kvtier_janitor_tenants", "Tenants that have blocks; those of nobody in particular count as one.")
MAX_BYTES = Declared("kvtier_janitor_max_bytes", "The budget of the tier; 0 without one.")
OLDEST = Declared("kvtier_janitor_oldest_timestamp_seconds", "When the oldest block was stored; 0 without one.")
VOLUME_BYTES = Declared("kvtier_janitor_volume_bytes", "Size of the file system; 0 where it does not say.")
FREE_BYTES = Declared("kvtier_janitor_volume_free_bytes", "What is free of it; 0 where it does not say.")
BRAKED = Declared("kvtier_janitor_braked", "1 while engines are asked to stop storing, else 0.")
QUARANTINED = Declared("kvtier_janitor_quarantined_files", "Damaged files that wait for a person to look at them.")
QUARANTINED_BYTES = Declared("kvtier_janitor_quarantined_bytes", "What these take.")
EVICTED = Declared(
    "kvtier_janitor_evicted_blocks",
    "Blocks removed, by reason: ttl (too old), quota (of a tenant), budget (of the tier), volume (too little free).",
    "reason",
    is_gauge=False,
)
EVICTED_BYTES = Declared("kvtier_janitor_evicted_bytes", "What these took.", "reason", is_gauge=False)
SPARED = Declared(
    "kvtier_janitor_spared_blocks", "Blocks chosen and then used or written anew, so that they stayed.", is_gauge=False
)
LEFTOVERS = Declared(
    "kvtier_janitor_removed_leftovers",
    "Things removed that are no block, by kind: partial, quarantined, journal, tenant (an empty tree), generation.",
    "kind",
    is_gauge=False,
)
DAMAGED_RECORDS = Declared(
    "kvtier_janitor_damaged_records", "Records of journals that could not be read or applied.", is_gauge=False
)
SWEEPS = Declared("kvtier_janitor_sweeps", "Decisions to remove blocks that were carried out.", is_gauge=False)
SWEEP_SECONDS = Declared("kvtier_janitor_sweep_seconds", "How long the last of them took.")
LAST_SWEEP = Declared("kvtier_janitor_last_sweep_timestamp_seconds", "When the last of them ended; 0 before the first.")
PROBLEM = Declared("kvtier_janitor_problem", "1 for each thing that the janitor cannot do now.", "what")

METRICS = (
    ACTIVE,
    COUNTED,
    USED_BYTES,
    BLOCKS,
    TENANT_BYTES,
    TENANTS,
    MAX_BYTES,
    OLDEST,
    VOLUME_BYTES,
    FREE_BYTES,
    BRAKED,
    QUARANTINED,
    QUARANTINED_BYTES,
    EVICTED,
    EVICTED_BYTES,
    SPARED,
    LEFTOVERS,
    DAMAGED_RECORDS,
    SWEEPS,
    SWEEP_SECONDS,
    LAST_SWEEP,
    PROBLEM,
)

MOST_TENANTS = 100
"""Samples by tenant."""
OTHER = "(other)"
"""Stands for the other tenants; none can have that name."""

Samples = dict[str, float]
"""By the value of the label; empty for a metric without one."""


def samples(report: Report) -> dict[Declared, Samples]:
    """Return every sample of a report."""
    usage = report.usage
    return {
        ACTIVE: {"": float(usage.is_active)},
        COUNTED: {"": float(usage.is_counted)},
        USED_BYTES: {each.digest: each.used_bytes for each in usage.generations},
        BLOCKS: {each.digest: each.blocks for each in usage.generations},
        TENANT_BYTES: _by_tenant(report),
        TENANTS: {"": report.tenants},
        MAX_BYTES: {"": report.max_bytes},
        OLDEST: {"": usage.oldest},
        VOLUME_BYTES: {"": usage.volume_bytes},
        FREE_BYTES: {"": usage.volume_free_bytes},
        BRAKED: {"": float(bool(usage.brake))},
        QUARANTINED: {"": usage.quarantined},
        QUARANTINED_BYTES: {"": report.quarantined_bytes},
        EVICTED: dict(report.evicted_blocks),
        EVICTED_BYTES: dict(report.evicted_bytes),
        SPARED: {"": report.spared_blocks},
        LEFTOVERS: dict(report.removed_leftovers),
        DAMAGED_RECORDS: {"": report.damaged_records},
        SWEEPS: {"": report.sweeps},
        SWEEP_SECONDS: {"": report.sweep_seconds},
        LAST_SWEEP: {"": report.last_sweep},
        PROBLEM: dict.fromkeys(report.problems, 1.0),
    }


def _by_tenant(report: Report) -> Samples:
    """Return the bytes of the largest tenants, and of all others: clients may name as many as they like."""
    tenants = report.usage.tenants
    largest: Samples = {each.tenant: each.used_bytes for each in tenants[:MOST_TENANTS]}
    rest = sum(each.used_bytes for each in tenants[MOST_TENANTS:]) + report.other_tenants.bytes
    return {**largest, OTHER: rest} if rest else largest


class ReportCollector:
    """Answers Prometheus from the last report."""

    def __init__(self, report: Callable[[], Report]) -> None:
        """Store where the reports come from; it may be called from any thread."""
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        report = self._report()
        namespace, _, name = report.usage.tier.partition("/")
        for declared, by_label in samples(report).items():
            labels = ["namespace", "tier", *([declared.label] if declared.label else [])]
            family = (GaugeMetricFamily if declared.is_gauge else CounterMetricFamily)(
                declared.name, declared.documentation, labels=labels
            )
            for label, value in by_label.items():
                family.add_metric([namespace, name, *([label] if declared.label else [])], value)
            yield family


def exposition(report: Callable[[], Report]) -> Callable[[], bytes]:
    """Return what renders the metrics as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(report))
    ProcessCollector(registry=registry)
    return lambda: generate_latest(registry)
