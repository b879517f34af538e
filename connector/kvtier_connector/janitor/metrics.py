# SPDX-License-Identifier: Apache-2.0
"""Reports the janitor's work: problems, the report of each step, and a server with /metrics, /usage and /healthz.

The janitor's thread replaces the report as a whole, and any other thread may read it. The server never waits for the
volume.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import heapq
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier_connector.contract.errors import ConnectorError
from kvtier_connector.contract.usage import MOST_ENTRIES, USAGE_PATH, TenantUsage, Usage, encode
from kvtier_connector.janitor.catalog import Catalog, Sum
from kvtier_connector.janitor.policy import EvictionReason

logger = logging.getLogger(__name__)

FULL_SECONDS = 60.0
"""A volume that refused a write for want of room counts as full for so long."""
METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"
MOST_TENANTS = 100
"""Samples by tenant."""
OTHER = "(other)"
"""Stands for the other tenants; no tenant can have that name."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REQUEST_SECONDS = 10.0


class Problems:
    """Failures by the action that failed, each until the action succeeds. Owned by one thread; any may copy it."""

    def __init__(self, tier: str, *, now: Callable[[], float] = time.monotonic) -> None:
        """Start without any."""
        self._tier = tier
        self._now = now
        self._full_until = now()
        self.messages: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether the volume lately refused a write for want of room."""
        return self._now() < self._full_until

    def __contains__(self, what: str) -> bool:
        """Return whether this action failed when it was last tried."""
        return what in self.messages

    def state(self, what: str, message: str) -> None:
        """Set the message of an action; an empty one ends its problem."""
        if not message:
            self.messages.pop(what, None)
            return
        if self.messages.get(what) != message:
            logger.warning("%s: %s", self._tier, message)
        self.messages[what] = message

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Turn an error of the volume into the problem of an action, and continue."""
        try:
            yield
        except (OSError, ConnectorError) as error:
            cause = error.__cause__ if isinstance(error, ConnectorError) else error
            if isinstance(cause, OSError) and cause.errno in _FULL:
                self._full_until = self._now() + FULL_SECONDS
            self.state(what, f"{what}: {error}")
        else:
            self.state(what, "")


@dataclass(slots=True)
class Tallies:
    """Counters since the process began. Owned by the janitor's thread."""

    evicted_blocks: Counter[str] = field(default_factory=Counter)
    """By reason."""
    evicted_bytes: Counter[str] = field(default_factory=Counter)
    spared_blocks: int = 0
    removed_leftovers: Counter[str] = field(default_factory=Counter)
    """By kind: partial, quarantined, journal, tenant, generation."""
    sweeps: int = 0
    sweep_seconds: float = 0.0
    """Duration of the last eviction."""
    last_sweep: float = 0.0
    """When it ended: seconds since 1970."""

    def end_sweep(self, *, seconds: float, ended: float) -> None:
        """Count an eviction that has ended."""
        self.sweeps += 1
        self.sweep_seconds, self.last_sweep = seconds, ended

    @property
    def evicted_for_room(self) -> int:
        """Blocks that were removed for another reason than their age."""
        return sum(count for reason, count in self.evicted_blocks.items() if reason in _FOR_ROOM)


_FOR_ROOM = frozenset(reason.value for reason in EvictionReason if reason is not EvictionReason.TTL)


@dataclass(frozen=True, kw_only=True)
class JanitorReport:
    """The state of the janitor at one moment."""

    usage: Usage
    tallies: Tallies = field(default_factory=Tallies)
    max_bytes: int = 0
    quarantined_bytes: int = 0
    damaged_records: int = 0
    tenants: int = 0
    """Number of tenants that have blocks; `usage` lists the largest."""
    other_tenants_bytes: int = 0
    """Of the tenants that are not listed."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Messages by action."""

    @property
    def used_bytes(self) -> dict[str, int]:
        """Bytes by generation."""
        return {each.digest: each.used_bytes for each in self.usage.generations}

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks by generation."""
        return {each.digest: each.blocks for each in self.usage.generations}

    @property
    def tenant_used_bytes(self) -> dict[str, int]:
        """Bytes of the largest tenants, and of all others together."""
        tenants = self.usage.tenants
        largest = {each.tenant: each.used_bytes for each in tenants[:MOST_TENANTS]}
        rest = sum(each.used_bytes for each in tenants[MOST_TENANTS:]) + self.other_tenants_bytes
        return {**largest, OTHER: rest} if rest else largest

    @property
    def is_paused(self) -> bool:
        """Whether engines may not store."""
        return bool(self.usage.store_pause)

    @property
    def failing(self) -> dict[str, int]:
        """1 for each action that fails."""
        return dict.fromkeys(self.problems, 1)


def report_of(
    catalog: Catalog, tallies: Tallies, base: JanitorReport, *, last_used_ns: Mapping[int, int]
) -> JanitorReport:
    """Return a report with the sums of the catalog; `base` says the rest, and which generations there are.

    `last_used_ns` are nanoseconds since 1970 by number of the generation.
    """
    by_generation, by_tenant = catalog.sums("generation"), catalog.sums("tenant")
    numbers = {digest: number for number, digest in enumerate(catalog.generations)}
    generations = []
    for known in base.usage.generations:
        number = numbers.get(known.digest, -1)
        blocks, size = by_generation.get(number, Sum())
        last_used = last_used_ns.get(number, 0) / 1e9
        generations.append(replace(known, used_bytes=size, blocks=blocks, last_used=last_used))
    # Clients may name any number of tenants.
    largest = heapq.nlargest(MOST_ENTRIES, by_tenant.items(), key=lambda item: (item[1].bytes, -item[0]))
    usage = replace(
        base.usage,
        used_bytes=catalog.total.bytes,
        blocks=catalog.total.blocks,
        evicted_blocks=tallies.evicted_for_room,
        generations=tuple(generations),
        tenants=tuple(
            TenantUsage(tenant=catalog.tenants[number], used_bytes=each.bytes, blocks=each.blocks)
            for number, each in largest
        ),
        problems=tuple(base.problems.values()),
    )
    return replace(
        base,
        usage=usage,
        tallies=copy.deepcopy(tallies),
        tenants=len(by_tenant),
        other_tenants_bytes=catalog.total.bytes - sum(each.bytes for _, each in largest),
    )


class JanitorMetric(NamedTuple):
    """One metric. Prometheus appends ``_total`` to the name of a counter."""

    name: str
    source: str
    """Attribute of `JanitorReport`: a number, or a mapping from the label's values to numbers."""
    documentation: str
    label: str = ""
    is_gauge: bool = True


_gauge = JanitorMetric
_counter = partial(JanitorMetric, is_gauge=False)

METRICS = (
    _gauge("kvtier_janitor_active", "usage.is_active", "1 while this janitor holds the Lease, else 0."),
    _gauge("kvtier_janitor_counted", "usage.is_counted", "1 once every block was seen, 0 in the first walk."),
    _gauge("kvtier_janitor_used_bytes", "used_bytes", "Bytes of the blocks of a generation.", "generation"),
    _gauge("kvtier_janitor_blocks", "blocks", "Blocks of a generation.", "generation"),
    _gauge(
        "kvtier_janitor_tenant_used_bytes",
        "tenant_used_bytes",
        "Bytes of the blocks of a tenant: one sample for each of the 100 largest, and `(other)`.",
        "tenant",
    ),
    _gauge("kvtier_janitor_tenants", "tenants", "Tenants that have blocks; all blocks without a tenant count as one."),
    _gauge("kvtier_janitor_max_bytes", "max_bytes", "The budget of the tier; 0 without one."),
    _gauge(
        "kvtier_janitor_oldest_timestamp_seconds", "usage.oldest", "When the oldest block was stored; 0 without one."
    ),
    _gauge("kvtier_janitor_volume_bytes", "usage.volume_bytes", "Size of the file system; 0 where it does not tell."),
    _gauge(
        "kvtier_janitor_volume_free_bytes", "usage.volume_free_bytes", "Free bytes of it; 0 where it does not tell."
    ),
    _gauge("kvtier_janitor_stores_paused", "is_paused", "1 while engines may not store, else 0."),
    _gauge("kvtier_janitor_quarantined_files", "usage.quarantined", "Damaged files kept for people to look at."),
    _gauge("kvtier_janitor_quarantined_bytes", "quarantined_bytes", "Bytes of these files."),
    _counter(
        "kvtier_janitor_evicted_blocks",
        "tallies.evicted_blocks",
        "Blocks removed, by reason: ttl (too old), quota (of a tenant), budget (of the tier), volume (little free).",
        "reason",
    ),
    _counter("kvtier_janitor_evicted_bytes", "tallies.evicted_bytes", "Bytes of these blocks.", "reason"),
    _counter(
        "kvtier_janitor_spared_blocks",
        "tallies.spared_blocks",
        "Blocks chosen for removal and then used or written anew, so that they stayed.",
    ),
    _counter(
        "kvtier_janitor_removed_leftovers",
        "tallies.removed_leftovers",
        "Removed things that are no block, by kind: partial, quarantined, journal, tenant (an empty tree), generation.",
        "kind",
    ),
    _counter("kvtier_janitor_damaged_records", "damaged_records", "Records of journals that could not be read."),
    _counter("kvtier_janitor_sweeps", "tallies.sweeps", "Decisions to remove blocks that were carried out."),
    _gauge("kvtier_janitor_sweep_seconds", "tallies.sweep_seconds", "Duration of the last of them."),
    _gauge("kvtier_janitor_last_sweep_timestamp_seconds", "tallies.last_sweep", "Its end; 0 before the first."),
    _gauge("kvtier_janitor_problem", "failing", "1 for each action that fails now.", "what"),
)


class ReportCollector:
    """Answers Prometheus from the last report."""

    def __init__(self, report: Callable[[], JanitorReport]) -> None:
        """Store the source of the reports, which any thread may call."""
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their samples."""
        report = self._report()
        namespace, _, name = report.usage.tier.partition("/")
        for metric in METRICS:
            labels = ["namespace", "tier", *([metric.label] if metric.label else [])]
            family = (GaugeMetricFamily if metric.is_gauge else CounterMetricFamily)(
                metric.name, metric.documentation, labels=labels
            )
            found = attrgetter(metric.source)(report)
            for label, value in found.items() if isinstance(found, Mapping) else [("", float(found))]:
                family.add_metric([namespace, name, *([label] if metric.label else [])], value)
            yield family


Pages = Mapping[str, Callable[[], tuple[int, str, bytes]]]
"""Status, content type and body at each path."""


def make_pages(report: Callable[[], JanitorReport], *, health: Callable[[], str]) -> Pages:
    """Return the served pages; `health` returns why this process should be restarted, empty if it should not."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(report))
    ProcessCollector(registry=registry)

    def show_health() -> tuple[int, str, bytes]:
        sickness = health()
        return 503 if sickness else 200, "text/plain; charset=utf-8", f"{sickness or 'ok'}\n".encode()

    return {
        METRICS_PATH: lambda: (200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(registry)),
        USAGE_PATH: lambda: (200, "application/json", encode(report().usage).encode()),
        HEALTH_PATH: show_health,
    }


class Server(ThreadingHTTPServer):
    """Serves until it is closed; on IPv6 where the address is one, and on `::` over IPv4 as well."""

    daemon_threads = True

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Listen; raises OSError if the port is taken."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        super().__init__((host, port), _Handler)
        self.port: int = self.server_address[1]

    def server_bind(self) -> None:
        """Bind the socket."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def start(self) -> None:
        """Start to answer."""
        threading.Thread(target=self.serve_forever, name="kvtier-http", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: Server

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        status, content_type, body = (404, "text/plain", b"not here\n") if page is None else page()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
        """Log nothing: probes come every few seconds."""
