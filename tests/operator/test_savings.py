# SPDX-License-Identifier: Apache-2.0
"""What a tier saves, from what engines count and what the spec says that it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_tier import NOON, USAGE, VIEW, changed
from tiers import tier

from kvtier_operator import status
from kvtier_operator.api import parse
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.plan import decide, pin, sizing_of
from kvtier_operator.proof import effect, exposition
from kvtier_operator.proof.effect import Sample
from kvtier_operator.proof.exposition import Reading
from kvtier_operator.proof.findings import Findings
from kvtier_operator.snapshot import Janitor

COST = {"gpuHour": "2.50", "storageGibMonth": "0.73"}
FOUR_GPUS = {"tensorParallel": 4, "accelerator": {"perPod": 4}}


def priced(saved: float | None, *, used_bytes: int = 100 << 30, **spec: Any) -> status.View:
    parsed = parse(tier(**{"cost": COST, "engine": FOUR_GPUS, **spec}))
    decisions = decide(parsed, VIEW.tier, None)
    view = changed(janitor=Janitor(usage=replace(USAGE, used_bytes=used_bytes)))
    found = None if saved is None else Findings(saved_per_second=saved)
    return replace(view, spec=parsed, sizing=sizing_of(parsed, decisions), findings=found)


def report(view: status.View, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(status.report(view, previous or {}, now=NOON))


def test_accelerators_that_would_have_been_busy_cost_what_they_cost_less_the_volume() -> None:
    assert report(priced(0.5))["savings"] == {
        "currency": "USD",
        "enginePerHour": "10",
        "gpus": "2",
        "gpusPerHour": "5",
        "storagePerHour": "0.1",
        "netPerHour": "4.9",
        "netPerMonth": "3600",
    }


def test_a_volume_that_costs_more_than_it_saves_is_told_of() -> None:
    assert report(priced(0.0))["savings"]["netPerHour"] == "-0.1"


def test_an_engine_without_accelerators_counts_as_one() -> None:
    found = report(priced(0.5, engine={"accelerator": {"resource": "none"}}))
    assert (found["savings"]["gpus"], found["savings"]["gpusPerHour"]) == ("0.5", "1.2")


def test_engine_cores_of_one_pod_share_its_accelerators() -> None:
    found = report(
        priced(0.5, engine={"accelerator": {"perPod": 8}, "args": ["--data-parallel-size=4"], "tensorParallel": 2})
    )
    assert found["savings"]["gpus"] == "1"


def test_without_prices_nothing_is_said_and_what_was_said_stays_while_nobody_has_asked() -> None:
    assert "savings" not in report(priced(0.5, cost=None))
    before = report(priced(0.5))
    assert report(priced(None), before)["savings"] == before["savings"]
    assert report(priced(None))["savings"] == {"currency": "USD", "enginePerHour": "10"}


def test_a_volume_that_nobody_has_counted_costs_nobody_knows_what() -> None:
    view = replace(priced(0.5), snapshot=changed(janitor=Janitor()).snapshot)
    found = report(view)["savings"]
    assert found == {"currency": "USD", "enginePerHour": "10", "gpus": "2", "gpusPerHour": "5"}
    # Where it costs nothing, that is known.
    free = replace(priced(0.5, cost={"gpuHour": "2.50"}), snapshot=view.snapshot)
    assert report(free)["savings"]["netPerHour"] == "5"


def test_what_was_measured_before_is_told_at_the_prices_of_today() -> None:
    before = report(priced(0.5))
    found = report(priced(None, cost={"gpuHour": "5", "currency": "EUR"}), before)["savings"]
    assert found == {
        "currency": "EUR",
        "enginePerHour": "20",
        "gpus": "2",
        "gpusPerHour": "10",
        "storagePerHour": "0",
        "netPerHour": "10",
        "netPerMonth": "7300",
    }


@pytest.mark.parametrize("saved", [None, 0.5])
def test_engines_that_do_not_serve_save_nothing(saved: float | None) -> None:
    view, before = priced(saved), report(priced(0.5))
    assert view.snapshot is not None
    gone = replace(view.snapshot, engines=replace(view.snapshot.engines, replicas=0, updated=0, ready=0))
    found = report(replace(view, snapshot=gone), before)["savings"]
    assert found == {"currency": "USD", "enginePerHour": "10"}


@pytest.mark.parametrize("price", ["-1", "1e3", "2,50", "$2", "", "1.0000000"])
def test_what_is_no_price_is_refused_with_the_field(price: str) -> None:
    with pytest.raises(SpecInvalid, match=r"spec\.cost\.gpuHour"):
        parse(tier(cost={"gpuHour": price}))


def test_a_number_is_asked_for_in_quotes() -> None:
    with pytest.raises(SpecInvalid, match=r"spec\.cost\.gpuHour"):
        parse(tier(cost={"gpuHour": 2.5}))


def test_prices_replace_no_pod() -> None:
    made = pin.make_pin(parse(tier()), restart="", config="", template={"metadata": {}, "spec": {}})
    assert made.holds(parse(tier(cost=COST)), "")


def test_seconds_of_all_engines_are_counted_through_restarts() -> None:
    text = (
        'vllm:kvtier_disk_saved_seconds_total{engine="0",tenant=""} 4\n'
        'vllm:kvtier_disk_saved_seconds_total{engine="1",tenant="acme"} 2.5\n'
    )
    assert exposition.read(text).saved_seconds == 6.5
    looks = [
        {"a": Reading(saved_seconds=100), "b": Reading(saved_seconds=10)},
        {"a": Reading(saved_seconds=400), "b": Reading(saved_seconds=30)},
        {"a": Reading(saved_seconds=50), "b": Reading(saved_seconds=40)},
    ]
    samples = [Sample(at=600.0 * number, readings=each) for number, each in enumerate(looks)]
    assert effect.saved_per_second(samples) == pytest.approx(380 / 1200, rel=0.02)
    assert effect.saved_per_second(samples[:1]) is None


def test_metrics_have_prices_and_savings_for_as_long_as_the_tier_has_them() -> None:
    metrics = OperatorMetrics()
    labels = {"namespace": "ns", "tier": "llama", "currency": "USD"}
    body = {
        "metadata": {"namespace": "ns", "name": "llama"},
        "spec": {"cost": COST},
        "status": {"savings": report(priced(0.5))["savings"]},
    }
    metrics.count_tiers([body])

    def value(name: str, of: str) -> float | None:
        return metrics.registry.get_sample_value(name, {**labels, "of": of})

    assert value("kvtier_tier_price", "engine_hour") == 10
    assert value("kvtier_tier_price", "gib_month") == 0.73
    assert value("kvtier_tier_savings_per_hour", "gpus") == 5
    assert value("kvtier_tier_savings_per_hour", "net") == 4.9
    metrics.count_tiers([{**body, "spec": {}, "status": {}}])
    assert value("kvtier_tier_price", "engine_hour") is None
    assert value("kvtier_tier_savings_per_hour", "net") is None
