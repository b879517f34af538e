# SPDX-License-Identifier: Apache-2.0
"""What engines say of prompt tokens, and the computing time that the volume saved."""

from __future__ import annotations

from typing import Any

from kvtier_cli import status

METRICS = """
vllm:prompt_tokens_total{engine="0"} 100000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 72000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 8000
vllm:kvtier_disk_compute_tokens_per_second{engine="0"} 20
vllm:kvtier_disk_load_tokens_per_second{engine="0"} 200
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


COUNTED = (
    METRICS
    + 'vllm:kvtier_disk_saved_seconds_total{engine="0",tenant="acme"} 1800\n'
    + 'vllm:kvtier_disk_saved_seconds_total{engine="0",tenant=""} 900\n'
)


def test_an_engine_that_counts_seconds_is_believed() -> None:
    assert status.hits([COUNTED])["prefillSecondsNotSpent"] == 2700


def test_the_page_shows_hits_by_tier_and_the_time_saved() -> None:
    page = status.one(document())
    assert "disk      72,000 tokens  72.0%" in page
    assert "computed  20,000 tokens  20.0%" in page
    assert "the disk saved 1.0 h of prefill" in page
