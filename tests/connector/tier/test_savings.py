# SPDX-License-Identifier: Apache-2.0
"""Seconds of computing that loads made needless: by the rate of prefill, of what the volume had, by tenant."""

from __future__ import annotations

import pytest
from rig import TOKENS_PER_BLOCK, Rig, Rigs, keys

from kvtier_connector.vllm_adapter import metrics

SAVED = "vllm:kvtier_disk_saved_seconds"
SECONDS_EACH = 0.25


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    """An engine that was seen to need so long for a chunk."""
    rigs.write(keys(8))
    made = rigs.make(tenant_from="Parameter")
    made.tier.rates.prefill.observe(TOKENS_PER_BLOCK, SECONDS_EACH)
    return made


def test_a_hit_counts_for_what_computing_it_takes(rig: Rig) -> None:
    assert rig.serve(keys(8)).hit_blocks == 8
    assert rig.metric(SAVED, "") == pytest.approx(8 * SECONDS_EACH)


def test_what_the_cpu_tier_had_is_no_merit_of_the_volume(rig: Rig) -> None:
    rig.serve(keys(8), "first")
    rig.serve(keys(8), "second")
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 8
    assert rig.metric(SAVED, "") == pytest.approx(8 * SECONDS_EACH)


def test_what_could_not_be_read_was_not_saved(rigs: Rigs, rig: Rig) -> None:
    path = rigs.block_file(keys(8)[3])
    path.write_bytes(path.read_bytes()[:-1])
    assert rig.serve(keys(8)).hit_blocks == 3
    assert rig.metric(SAVED, "") == pytest.approx(3 * SECONDS_EACH)


def test_before_the_first_measurement_nothing_is_claimed(rigs: Rigs) -> None:
    rigs.write(keys(4))
    made = rigs.make()
    assert made.serve(keys(4)).hit_blocks == 4
    assert made.metric(SAVED, "") == 0


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
