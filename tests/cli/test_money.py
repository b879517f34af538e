# SPDX-License-Identifier: Apache-2.0
"""What a tier saved: hours of accelerators by what engines measured, less the volume."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kvtier_cli import money, redaction, standing, status_page
from kvtier_cli.money import Prices

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
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
        "accelerators": 4,
        "engines": [{**engine, "started": "2026-11-22T02:00:00Z"}],
        "conditions": [],
        "sizing": None,
        "generations": [],
        "tiers": [{"name": "disk", "usedBytes": 73 << 30, "capacityBytes": 1 << 40}],
        "hits": standing.hits([METRICS]),
        **changes,
    }


def test_tokens_from_the_volume_are_time_that_accelerators_did_not_spend() -> None:
    hits = standing.hits([METRICS])
    assert hits["bySource"] == {"disk": 72000, "device": 8000}
    assert hits["prefillSecondsNotSpent"] == 3600
    assert standing.hits([METRICS, METRICS])["prefillSecondsNotSpent"] == 7200
    assert standing.hits([]) == {}


def test_it_costs_what_they_cost_less_the_volume() -> None:
    found = money.saved(document(), Prices(accelerator_hour=3.0, gib_month=0.5), now=NOW)
    assert found is not None
    assert found["acceleratorHoursNotSpent"] == 4
    assert found["acceleratorsCost"] == 12
    # 73 GiB for 10 of the 730 hours of a month
    assert found["storageCost"] == pytest.approx(0.5)
    assert found["saved"] == pytest.approx(11.5)


COUNTED = (
    METRICS
    + 'vllm:kvtier_disk_saved_seconds_total{engine="0",tenant="acme"} 1800\n'
    + 'vllm:kvtier_disk_saved_seconds_total{engine="0",tenant=""} 900\n'
)


def test_an_engine_that_counts_seconds_is_believed_and_tells_them_by_tenant() -> None:
    hits = standing.hits([COUNTED])
    assert hits["prefillSecondsNotSpent"] == 2700
    found = money.saved(document(hits=hits), Prices(accelerator_hour=2.0, currency="EUR"), now=NOW)
    assert found is not None
    assert (found["saved"], found["byTenant"]) == (6, {"acme": 4, "": 2})
    page = status_page.one(document(hits=hits, money=found))
    assert "EUR" in page
    assert "tenant acme   4.00" in page


def test_prices_are_those_of_the_tier_unless_others_are_given() -> None:
    spec = {"cost": {"gpuHour": "2.50", "storageGibMonth": "0.1", "currency": "EUR"}}
    assert money.prices_of({}, gpu_hour=None, gib_month=None) is None
    found = money.prices_of(spec, gpu_hour=None, gib_month=None)
    assert found == Prices(accelerator_hour=2.5, gib_month=0.1, currency="EUR")
    assert money.prices_of(spec, gpu_hour=3.0, gib_month=0.0) == Prices(accelerator_hour=3.0, currency="EUR")


def test_names_of_tenants_are_taken_out_of_a_report() -> None:
    shown = redaction.manifest({"money": {"byTenant": {"acme": 4, "": 2}}, "savedSecondsByTenant": {"acme": 1}})
    assert "acme" not in str(shown)
    assert shown["money"]["byTenant"][""] == 2


def test_without_a_measurement_nothing_is_claimed() -> None:
    quiet = document(hits=standing.hits(["vllm:prompt_tokens_total 5"]))
    assert money.saved(quiet, Prices(accelerator_hour=3.0), now=NOW) is None
    assert "nothing is known yet" in status_page.one({**quiet, "money": None})


def test_the_page_shows_hits_by_tier_and_the_sum() -> None:
    standing_now = document()
    standing_now["money"] = money.saved(standing_now, Prices(accelerator_hour=3.0, gib_month=0.5), now=NOW)
    page = status_page.one(standing_now)
    assert "disk      72,000 tokens  72.0%" in page
    assert "computed  20,000 tokens  20.0%" in page
    assert "the disk saved 1.0 h of prefill" in page
    assert "saved         11.50" in page
