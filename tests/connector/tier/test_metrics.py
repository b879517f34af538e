# SPDX-License-Identifier: Apache-2.0
"""The metrics of the tier as vLLM takes them: copies, first tokens by source of the prompt, and seconds saved."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_fleet import LATER, PROMPT, Engines, finish, restart
from engine_parts import PAGE_BYTES, Shape
from engine_rig import SimulatedEngine
from rig import TOKENS_PER_BLOCK, Rig, Rigs, keys
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.metrics import DISK, MEMORY, NOTHING, FirstTokens, Stats

COPIES = {f"vllm:kv_offload_{way}_{what}" for way in ("load", "store") for what in ("bytes", "time")}


def test_vllm_counts_bytes_and_seconds_of_copies_by_direction(engines: Engines) -> None:
    for way, other in (("store", "load"), ("load", "store")):
        engine = restart(engines, Shape(log_stats=True))
        engine.ask(way, PROMPT)
        finish(engine)
        counted: Counter[str] = Counter()
        for told in engine.told:
            if told.scheduler_stats and (stats := told.scheduler_stats.kv_connector_stats):
                values = stats["data"].items()
                counted.update({name: of[()] for name, of in values if name in COPIES})
        assert counted[f"vllm:kv_offload_{way}_bytes"] >= 20 * PAGE_BYTES
        assert counted[f"vllm:kv_offload_{way}_time"] > 0
        assert f"vllm:kv_offload_{other}_bytes" not in counted
        engine.close()


def counted(engine: SimulatedEngine, found: str) -> tuple[float, float]:
    requests = engine.metric(metrics.FIRST_TOKENS.name, found)
    return requests, engine.metric(metrics.FIRST_TOKEN_PROMPTS.name, found)


def test_a_first_token_counts_with_what_was_computed_read_or_kept(engines: Engines, writer: SimulatedEngine) -> None:
    assert counted(writer, NOTHING) == (1, len(PROMPT))
    reader = restart(engines)
    reader.ask("reads", PROMPT, answer=40)
    finish(reader)
    assert counted(reader, DISK) == (1, len(PROMPT))
    reader.ask("keeps", PROMPT)
    reader.ask("computes", LATER)
    finish(reader)
    assert counted(reader, MEMORY) == (1, len(PROMPT))
    assert counted(reader, NOTHING) == (1, len(LATER))
    assert reader.metric(metrics.FIRST_TOKEN_SECONDS.name, DISK) > 0


def test_what_was_found_first_stays_when_blocks_are_given_again() -> None:
    stats = Stats()
    waiting = FirstTokens(stats, clock=lambda: 12.5)
    aborted, request = (Request(name, [1], SamplingParams(max_tokens=4), None, arrival_time=10) for name in "ab")
    waiting.begin(aborted, NOTHING)
    waiting.end("a")
    waiting.begin(request, DISK)
    waiting.begin(request, MEMORY)
    waiting.look()
    request.append_output_token_ids(7)
    waiting.look()
    waiting.look()
    assert {key: value for key, value in stats.take().reduce().items() if "seconds" in key} == {
        f"{metrics.FIRST_TOKEN_SECONDS.name}:('{DISK}',)": 2.5
    }


SAVED = "vllm:kvtier_disk_saved_seconds"
SECONDS_EACH = 0.25


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    rigs.write(keys(8))
    made = rigs.make(tenant_from="Parameter")
    made.tier.rates.prefill.observe(TOKENS_PER_BLOCK, SECONDS_EACH)
    return made


def test_a_hit_counts_for_what_computing_it_takes(rig: Rig) -> None:
    for name in ("volume", "CPU tier, which is no merit of the volume"):
        assert rig.serve(keys(8), name).hit_blocks == 8
        assert rig.metric(SAVED, "") == pytest.approx(8 * SECONDS_EACH)


def test_what_could_not_be_read_was_not_saved(rigs: Rigs, rig: Rig) -> None:
    path = rigs.block_file(keys(8)[3])
    path.write_bytes(path.read_bytes()[:-1])
    assert rig.serve(keys(8)).hit_blocks == 3
    assert rig.metric(SAVED, "") == pytest.approx(3 * SECONDS_EACH)


def test_each_tenant_has_its_own(rigs: Rigs, rig: Rig) -> None:
    rig.params = {"kvtier_tenant": "acme"}
    rig.offload(keys(2, first=50))
    reader = rigs.make(tenant_from="Parameter")
    reader.tier.rates.prefill.observe(TOKENS_PER_BLOCK, SECONDS_EACH)
    reader.params = {"kvtier_tenant": "acme"}
    assert reader.serve(keys(2, first=50)).hit_blocks == 2
    assert reader.metric(SAVED, "acme") == pytest.approx(2 * SECONDS_EACH)
    assert reader.metric(SAVED, "") == 0


def test_tenants_without_end_make_no_labels_without_end() -> None:
    stats = metrics.Stats()
    for number in range(metrics.MOST_TENANTS + 50):
        stats.count_saved(f"tenant-{number}", 2.0)
    stats.count_saved("tenant-0", 1.0)
    values = stats.take().data["data"][SAVED]
    assert len(values) == metrics.MOST_TENANTS + 1
    assert values["tenant-0",] == 3.0
    assert values[metrics.OTHERS,] == 100.0


def test_an_undeclared_metric_cannot_be_observed() -> None:
    with pytest.raises(ValueError, match="declare it in METRICS"):
        metrics.Stats().count(metrics.Metric("vllm:kvtier_new", "New."))
    with pytest.raises(ValueError, match="with the labels"):
        metrics.Stats().count(metrics.MISSES)
