# SPDX-License-Identifier: Apache-2.0
"""What the janitor tells of its work: one value that its thread replaces and any other may read."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier_connector.contract_usage import MOST_ENTRIES, GenerationUsage, TenantUsage, Usage, encode
from kvtier_connector.janitor.budget import Space
from kvtier_connector.janitor.eviction import Eviction
from kvtier_connector.janitor.ledger import Ledger, Sum, sum_of
from kvtier_connector.janitor.policy import Reason

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
