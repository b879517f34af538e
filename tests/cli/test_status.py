# SPDX-License-Identifier: Apache-2.0
"""``kvtier status``: hits by tier and the computing time that the volume saved; problems first."""

from __future__ import annotations

from typing import Any

import click

from kvtier_cli import status

METRICS = """
vllm:prompt_tokens_total{engine="0"} 100000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 72000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 8000
vllm:kvtier_disk_compute_tokens_per_second{engine="0"} 20
vllm:kvtier_disk_load_tokens_per_second{engine="0"} 200
vllm:kvtier_disk_saved_seconds_total{engine="0",tenant="acme"} 2400
vllm:kvtier_disk_saved_seconds_total{engine="0",tenant=""} 1200
"""


def document(**changes: Any) -> dict[str, Any]:
    engine = {"pod": "a", "node": "n", "phase": "Running", "ready": True, "restarts": 0}
    return {
        "tier": "ns/llama",
        "model": "m",
        "mode": "ReadWrite",
        "wanted": 1,
        "engines": [{**engine, "started": "2026-11-22T02:00:00Z"}],
        "conditions": [],
        "sizing": None,
        "generations": [],
        "tiers": [{"name": "disk", "usedBytes": 73 << 30, "capacityBytes": 1 << 40}],
        "hits": status.hits([METRICS]),
        **changes,
    }


def test_tokens_from_the_volume_are_time_that_accelerators_did_not_spend() -> None:
    hits = status.hits([METRICS])
    assert hits["bySource"] == {"disk": 72000, "device": 8000}
    assert hits["prefillSecondsNotSpent"] == 3600
    assert status.hits([METRICS, METRICS])["prefillSecondsNotSpent"] == 7200
    assert status.hits([]) == {}


def test_the_page_shows_hits_by_tier_and_the_time_saved() -> None:
    page = status.one(document())
    assert "disk      72,000 tokens  72.0%" in page
    assert "computed  20,000 tokens  20.0%" in page
    assert "the disk saved 1.0 h of prefill" in page


def condition(kind: str, status: str, reason: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": f"about {kind}"}


CONDITIONS = [
    condition("Ready", "False", "NotReady"),
    condition("VolumeBound", "True", "Bound"),
    condition("DiskHealthy", "Unknown", "NotApplicable"),
    condition("DiskEffective", "Unknown", "NoDiskHits"),
    condition("Stalled", "False", "Idle"),
    condition("EnginesReady", "False", "EngineCrashed"),
]


def test_problems_come_first_and_conditions_without_one_are_only_counted() -> None:
    page = click.unstyle(status.one(document(conditions=CONDITIONS)))
    conditions, steps = page.partition("ENGINES")[0], page.partition("NEXT")[2]
    assert [line.split()[0] for line in conditions.splitlines()[3:6]] == ["Ready", "EnginesReady", "DiskEffective"]
    assert "3 without a problem: -v shows them" in conditions
    assert steps.split() == ["EnginesReady:", "about", "EnginesReady", "DiskEffective:", "about", "DiskEffective"]
    everything = click.unstyle(status.one(document(conditions=CONDITIONS), is_verbose=True))
    assert all(each["type"] in everything for each in CONDITIONS)


def test_a_problem_is_red_and_a_good_condition_green() -> None:
    page = status.one(document(conditions=CONDITIONS), is_verbose=True)
    assert click.style("False", fg="red") in next(line for line in page.splitlines() if "EngineCrashed" in line)
    assert click.style("False", fg="green") in next(line for line in page.splitlines() if "Idle" in line)
    assert click.style("True", fg="green") in next(line for line in page.splitlines() if "Bound" in line)
