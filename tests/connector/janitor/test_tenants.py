# SPDX-License-Identifier: Apache-2.0
"""Tenants that clients name as they like: neither what is told of them nor what is decided grows with their number."""

from __future__ import annotations

import json
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from tier_dir import BLOCK_BYTES, Engine, Rig

from kvtier_connector.contract.usage import GenerationUsage, Usage, encode
from kvtier_connector.janitor.catalog import Catalog
from kvtier_connector.janitor.metrics import MOST_TENANTS, OTHER, JanitorReport, Tallies, exposition, report_of
from kvtier_connector.janitor.policy import Space, make_limits
from kvtier_connector.store.layout import BlockKey


def report_on(count: int) -> JanitorReport:
    """Return the report on so many tenants, of which each has a few bytes more than the one before."""
    catalog = Catalog()
    generation = catalog.generation("aa")
    for number in range(count):
        key = BlockKey(number.to_bytes(8, "big"), 0, f"t{number}")
        catalog.add(generation, key, size=4096 + number, created_ns=1, used_ns=1)
    base = JanitorReport(usage=Usage(tier="ns/llama", generations=(GenerationUsage(digest="aa", created=1.0),)))
    return report_of(catalog, Tallies(), base, last_used_ns={})


def samples_of(report: JanitorReport, name: str) -> dict[str, float]:
    text = exposition(lambda: report)().decode()
    return {
        sample.labels.get("tenant", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_the_largest_tenants_have_a_sample_each_and_the_others_one_together() -> None:
    report = report_on(3000)
    samples = samples_of(report, "kvtier_janitor_tenant_used_bytes")
    assert len(samples) == MOST_TENANTS + 1
    assert OTHER in samples
    assert {"t2999", "t2900"} <= samples.keys()
    assert sum(samples.values()) == report.usage.used_bytes
    assert samples_of(report, "kvtier_janitor_tenants") == {"": 3000}


def test_few_tenants_have_a_sample_each_and_no_other() -> None:
    samples = samples_of(report_on(3), "kvtier_janitor_tenant_used_bytes")
    assert samples.keys() == {"t0", "t1", "t2"}


def test_the_document_lists_the_largest_tenants() -> None:
    report = report_on(3000)
    document = json.loads(encode(report.usage))
    assert (len(document["tenants"]), document["tenants"][0]["tenant"]) == (1000, "t2999")
    listed_bytes = sum(each["used_bytes"] for each in document["tenants"])
    assert report.other_tenants_bytes + listed_bytes == document["used_bytes"]


def limited(rig: Rig, used: dict[int, int], default_quota_bytes: int) -> dict[int, tuple[int, int]]:
    config = rig.sweeper(default_quota_bytes=default_quota_bytes).config
    tenants = ["", *(f"t{number}" for number in used)]
    return dict(make_limits(config, Space(), tenants=tenants, used=used, other_bytes=0, now_ns=0).quotas)


def test_a_decision_looks_at_the_tenants_above_their_quotas_and_first_at_the_largest(rig: Rig) -> None:
    assert limited(rig, dict.fromkeys(range(1, 1000), 10), 100) == {}
    quotas = limited(rig, {number: number for number in range(1, 1000)}, 100)
    assert (len(quotas), min(quotas)) == (256, 744)


def test_tenants_that_went_are_forgotten_when_the_ledger_is_saved(rig: Rig, engine: Engine) -> None:
    for number in range(20):
        engine.put(number, tenant=f"t{number}")
    sweeper = rig.swept(max_bytes=20 * BLOCK_BYTES, high_watermark=0.5, low_watermark=0.2)
    sweeper.close()
    document = (rig.dir / "janitor.catalog").read_bytes()
    assert [f't{number}"'.encode() in document for number in range(20)] == [False] * 16 + [True] * 4


def test_quotas_of_very_many_tenants_hold_in_the_end(rig: Rig, engine: Engine) -> None:
    for number in range(300):
        engine.put(number, tenant=f"t{number}")
    sweeper = rig.sweeper(default_quota_bytes=BLOCK_BYTES, high_watermark=0.5, low_watermark=0.2)
    done: Callable[[], bool] = lambda: rig.sweep(sweeper).blocks == 0  # noqa: E731 - asked again and again
    assert any(done() for _ in range(5))
