# SPDX-License-Identifier: Apache-2.0
"""What the volume refuses is stated, by what was tried, until trying it succeeds again; nothing ends because of it.

What the janitor tells of its work: one value that its thread replaces and any other may read.

The janitor's metrics as data, and what serves them: samples come from the last report when they are asked for.

Serves /metrics, /healthz and /usage on threads of their own; none of them ever waits for the volume.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtier_connector.contract.errors import ConnectorError
from kvtier_connector.contract.usage import MOST_ENTRIES, USAGE_PATH, GenerationUsage, TenantUsage, Usage, encode
from kvtier_connector.janitor.catalog import Ledger, Sum, sum_of
from kvtier_connector.janitor.evict import Eviction
from kvtier_connector.janitor.policy import Reason, Space

logger = logging.getLogger(__name__)

FULL_SECONDS = 60.0
"""For how long a volume that refused a write for want of room counts as full."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Problems:
    """Owned by one thread; `messages` may be copied by any."""

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
        """Say whether this failed when it was last tried."""
        return what in self.messages

    def state(self, what: str, message: str) -> None:
        """State a problem, or with an empty message that there is none."""
        if not message:
            self.messages.pop(what, None)
            return
        if self.messages.get(what) != message:
            logger.warning("%s: %s", self._tier, message)
        self.messages[what] = message

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """State what the volume refuses, and go on without."""
        try:
            yield
        except (OSError, ConnectorError) as error:
            cause = error.__cause__ if isinstance(error, ConnectorError) else error
            if isinstance(cause, OSError) and cause.errno in _FULL:
                self._full_until = self._now() + FULL_SECONDS
            self.state(what, f"{what}: {error}")
        else:
            self.state(what, "")


_NOTHING = Sum()


@dataclass(slots=True)
class Tallies:
    """What was done since the process began. Owned by the janitor's thread."""

    evicted_blocks: Counter[Reason] = field(default_factory=Counter)
    evicted_bytes: Counter[Reason] = field(default_factory=Counter)
    spared_blocks: int = 0
    removed_leftovers: Counter[str] = field(default_factory=Counter)
    """By kind: partial, quarantined, journal, generation."""
    sweeps: int = 0
    sweep_seconds: float = 0.0
    """Of the last decision, until all of it was carried out."""
    last_sweep: float = 0.0
    """When that was: seconds since 1970."""

    def add_sweep(self, eviction: Eviction, *, seconds: float, ended: float) -> None:
        """Add what a decision came to: how long it took, and when it ended."""
        self.evicted_blocks += eviction.removed
        self.evicted_bytes += eviction.freed_bytes
        self.spared_blocks += eviction.spared
        self.sweeps += 1
        self.sweep_seconds, self.last_sweep = seconds, ended


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of the janitor at one moment."""

    usage: Usage
    evicted_blocks: Mapping[str, int] = field(default_factory=dict)
    evicted_bytes: Mapping[str, int] = field(default_factory=dict)
    spared_blocks: int = 0
    removed_leftovers: Mapping[str, int] = field(default_factory=dict)
    quarantined_bytes: int = 0
    damaged_records: int = 0
    tenants: int = 0
    """How many have blocks; `usage` lists the largest."""
    other_tenants: Sum = _NOTHING
    """Blocks of those that are not listed."""
    max_bytes: int = 0
    sweeps: int = 0
    sweep_seconds: float = 0.0
    last_sweep: float = 0.0
    problems: Mapping[str, str] = field(default_factory=dict)
    """By what was tried."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is needed to report besides the ledger."""

    tier: str
    is_counted: bool
    space: Space
    brake: str
    quarantined: Sum
    damaged_records: int
    created: Mapping[str, int]
    """Nanoseconds since 1970 by generation."""
    problems: Mapping[str, str]
    max_bytes: int
    oldest_ns: int | None
    last_used_ns: Mapping[int, int]
    """By generation, as a number of the ledger."""


def make_report(ledger: Ledger, look: Look, tallies: Tallies) -> Report:
    """Return the state as it is now."""
    sums = ledger.sums()
    total = ledger.total
    by_generation, by_tenant = _fold(sums, 0), _fold(sums, 1)
    numbers = {digest: number for number, digest in enumerate(ledger.generations)}
    generations = []
    for digest, created_ns in sorted(look.created.items()):
        number = numbers.get(digest, -1)
        each = by_generation.get(number, Sum())
        generations.append(
            GenerationUsage(
                digest=digest,
                used_bytes=each.bytes,
                blocks=each.blocks,
                created=created_ns / 1e9,
                last_used=look.last_used_ns.get(number, 0) / 1e9,
            )
        )
    # Clients may name as many tenants as they like.
    largest = heapq.nlargest(MOST_ENTRIES, by_tenant.items(), key=lambda item: (item[1].bytes, -item[0]))
    listed = sum_of(each for _, each in largest)
    usage = Usage(
        tier=look.tier,
        is_active=True,
        is_counted=look.is_counted,
        used_bytes=total.bytes,
        blocks=total.blocks,
        volume_bytes=look.space.total_bytes,
        volume_free_bytes=look.space.free_bytes,
        oldest=(look.oldest_ns or 0) / 1e9,
        evicted_blocks=sum(count for reason, count in tallies.evicted_blocks.items() if reason is not Reason.TTL),
        brake=look.brake,
        quarantined=look.quarantined.blocks,
        generations=tuple(generations),
        tenants=tuple(
            TenantUsage(tenant=ledger.tenants[number], used_bytes=each.bytes, blocks=each.blocks)
            for number, each in largest
        ),
        problems=tuple(look.problems.values()),
    )
    return Report(
        usage=usage,
        evicted_blocks={reason.value: tallies.evicted_blocks[reason] for reason in Reason},
        evicted_bytes={reason.value: tallies.evicted_bytes[reason] for reason in Reason},
        spared_blocks=tallies.spared_blocks,
        removed_leftovers=dict(tallies.removed_leftovers),
        quarantined_bytes=look.quarantined.bytes,
        damaged_records=look.damaged_records,
        tenants=len(by_tenant),
        other_tenants=Sum(total.blocks - listed.blocks, total.bytes - listed.bytes),
        max_bytes=look.max_bytes,
        sweeps=tallies.sweeps,
        sweep_seconds=tallies.sweep_seconds,
        last_sweep=tallies.last_sweep,
        problems=dict(look.problems),
    )


def usage_document(report: Report) -> str:
    """Return the answer of /usage: what the operator reads, and under ``janitor`` what only people ask for."""
    document = json.loads(encode(report.usage))
    document["janitor"] = {
        "max_bytes": report.max_bytes,
        "evicted_blocks": dict(report.evicted_blocks),
        "evicted_bytes": dict(report.evicted_bytes),
        "spared_blocks": report.spared_blocks,
        "removed_leftovers": dict(report.removed_leftovers),
        "quarantined_bytes": report.quarantined_bytes,
        "tenants": report.tenants,
        "other_tenants": report.other_tenants._asdict(),
        "last_sweep": report.last_sweep,
        "last_sweep_seconds": report.sweep_seconds,
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _fold(sums: Mapping[tuple[int, int], Sum], which: int) -> dict[int, Sum]:
    folded: dict[int, Sum] = {}
    for place, each in sums.items():
        folded[place[which]] = folded.get(place[which], Sum()).plus(each)
    return folded


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


_REQUEST_SECONDS = 10.0


class Answer(NamedTuple):
    """Of one path."""

    status: int
    content_type: str
    body: bytes


Pages = dict[str, Callable[[], Answer]]

METRICS_PATH = "/metrics"
HEALTH_PATH = "/healthz"


def make_pages(*, metrics: Callable[[], bytes], usage: Callable[[], str], health: Callable[[], str]) -> Pages:
    """Return what is served.

    Args:
        metrics: The exposition of Prometheus.
        usage: The document of /usage.
        health: Why this process should be started anew; empty if it should not.
    """

    def answer_health() -> Answer:
        sickness = health()
        return Answer(503 if sickness else 200, "text/plain; charset=utf-8", f"{sickness or 'ok'}\n".encode())

    return {
        METRICS_PATH: lambda: Answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics()),
        USAGE_PATH: lambda: Answer(200, "application/json", usage().encode()),
        HEALTH_PATH: answer_health,
    }


class Server:
    """Serves until it is closed."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Listen; raises OSError if the port is taken."""
        self._server = _HttpServer(host, port, _handler(pages))
        self.port: int = self._server.server_address[1]

    def start(self) -> None:
        """Start to answer."""
        threading.Thread(target=self._server.serve_forever, name="kvtier-http", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _HttpServer(ThreadingHTTPServer):
    """Listens on IPv6 where the address is one; on `::`, on IPv4 as well."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _handler(pages: Pages) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            answer = Answer(404, "text/plain", b"not here\n") if page is None else page()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's word
            """Say nothing: probes ask every few seconds."""

    return Handler
