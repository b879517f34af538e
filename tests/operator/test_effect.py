# SPDX-License-Identifier: Apache-2.0
"""Whether loading pays is judged from what engines count and measure, and from nothing where they do not."""

from __future__ import annotations

import pytest

from kvtier_operator.observe import findings, pod_reports
from kvtier_operator.observe.findings import CounterSample, EffectOutcome
from kvtier_operator.observe.pod_reports import EngineCounters

METRICS = """\
# HELP vllm:prompt_tokens_cached_by_source_total Prefix-cache hit tokens
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 512.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 99.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="disk"} 8.0
vllm:cache_config_info{block_size="16",cache_dtype="auto"} 1.0
vllm:kvtier_disk_written_blocks_total{engine="0",model_name="a \\"quoted\\" name"} 7.0
vllm:kvtier_disk_present_blocks_total{engine="0"} 2.0
vllm:kvtier_disk_verdicts_total{engine="0",verdict="load"} 5.0
vllm:kvtier_disk_verdicts_total{engine="0",verdict="compute"} 3.0
vllm:kvtier_disk_load_tokens_per_second{engine="0"} 4000.0
vllm:kvtier_disk_compute_tokens_per_second{engine="0"} 1e3
vllm:kvtier_disk_active{engine="0"} 1.0
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:request_success_total{engine="0",finished_reason="stop"} 4.0
vllm:request_success_total{engine="0",finished_reason="length"} 6.0
vllm:kvtier_disk_queued_jobs{engine="0"} nonsense
vllm:unreadable{
"""


def test_the_numbers_that_matter_are_read_and_the_rest_is_left() -> None:
    assert pod_reports.read_counters(METRICS) == EngineCounters(
        disk_tokens=520,
        written_blocks=9,
        verdicts=8,
        computed_hits=3,
        finished_requests=10,
        unfinished_requests=3,
        load_rate=4000,
        compute_rate=1000,
        block_tokens=16,
    )
    assert pod_reports.read_counters("") == EngineCounters()


def samples(*readings: EngineCounters, step: float = 600.0) -> tuple[CounterSample, ...]:
    return tuple(CounterSample(at=number * step, readings={"a": reading}) for number, reading in enumerate(readings))


FAST = {"load_rate": 40_000.0, "compute_rate": 10_000.0}
SLOW = {"load_rate": 1_000.0, "compute_rate": 10_000.0}


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        ({"disk_tokens": 50_000, "verdicts": 40, "computed_hits": 10, **FAST}, EffectOutcome.PAYS),
        # A volume slower than the engine serves tails.
        ({"disk_tokens": 50_000, "verdicts": 40, **SLOW}, EffectOutcome.PAYS),
        ({"disk_tokens": 50_000, "verdicts": 40, "computed_hits": 30, **SLOW}, EffectOutcome.LOSES),
        ({"verdicts": 40, "computed_hits": 40}, EffectOutcome.LOSES),
        ({"disk_tokens": 50_000, "verdicts": 40}, EffectOutcome.PAYS),
    ],
)
def test_the_volume_is_of_use_where_most_hits_are_read(after: dict[str, float], outcome: EffectOutcome) -> None:
    found = findings.judge_effect(samples(EngineCounters(), EngineCounters(**after)))
    assert (found.outcome, found.loaded_tokens) == (outcome, after.get("disk_tokens", 0))
    assert (found.load_rate, found.compute_rate) == (after.get("load_rate", 0), after.get("compute_rate", 0))


def test_nothing_is_said_of_no_traffic_until_an_hour_has_passed() -> None:
    idle = EngineCounters(disk_tokens=7, **FAST)
    assert findings.judge_effect(samples(idle, idle)) is None
    found = findings.judge_effect(samples(*[idle] * 7))
    assert found.outcome is EffectOutcome.NO_HITS


def test_a_restarted_engine_counts_from_nothing() -> None:
    found = findings.judge_effect(
        samples(
            EngineCounters(disk_tokens=90_000, **FAST),
            EngineCounters(disk_tokens=2_000, **FAST),
            EngineCounters(disk_tokens=3_000, **FAST),
        )
    )
    assert found.loaded_tokens == 3_000


def test_only_the_last_hour_counts() -> None:
    kept: tuple[CounterSample, ...] = ()
    for number in range(20):
        kept = findings.keep_sample(kept, CounterSample(at=number * 600.0, readings={}))
    assert len(kept) == 7
    assert kept[-1].at - kept[0].at == 3600


def test_numbers_that_move_a_little_are_no_news() -> None:
    first = findings.judge_effect(samples(EngineCounters(**FAST), EngineCounters(disk_tokens=50_000, **FAST)))
    second = findings.judge_effect(
        samples(EngineCounters(**FAST), EngineCounters(disk_tokens=61_000, load_rate=43_000, compute_rate=9_500))
    )
    assert first.verdict == second.verdict
