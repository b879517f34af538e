# SPDX-License-Identifier: Apache-2.0
"""Which chunks are written at all: those that as many requests have asked for as configured."""

from __future__ import annotations

import hashlib

import pytest
from clocks import Clock
from rig import Rigs, key, keys, wait_until

from kvtier_connector.cascade.memory import ASIDE_SECONDS, DAMAGED_SECONDS, TRUST_SECONDS, BlockMemory, Presence
from kvtier_connector.cascade.reuse_sample import SAMPLED_OF, ReuseSample
from kvtier_connector.cascade.transfers import ReuseFilter
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.vllm_adapter import metrics


def test_a_block_is_due_with_the_request_that_is_configured_and_is_named_once() -> None:
    reuse = ReuseFilter(3)
    assert [list(reuse.note_request([key(1)])) for _ in range(4)] == [[], [], [key(1)], []]
    assert reuse.is_due(key(1))
    assert not reuse.is_due(key(1, group=1))


def test_counts_of_chunks_that_were_asked_for_long_ago_are_forgotten() -> None:
    reuse = ReuseFilter(2, remembered=4)
    reuse.note_request([key(0)])
    for other in keys(8, first=1):
        reuse.note_request([other])
    assert not reuse.note_request([key(0)])


@pytest.fixture
def tries_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.transfers.RETRY_SECONDS", 0.02)


@pytest.mark.usefixtures("tries_again_at_once")
def test_chunks_that_two_requests_ask_for_are_written_where_the_cpu_tier_has_them(rigs: Rigs) -> None:
    rig = rigs.make(min_reuse=2)
    rig.tier.transfers.note_request(keys(3))
    rig.offload(keys(3), "first")
    assert rig.metric("vllm:kvtier_disk_shed_stores", "min_reuse") == 3
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 0
    # The CPU tier has the first three still, so that vLLM does not offer them again.
    rig.tier.transfers.note_request(keys(4))
    rig.offload(keys(4), "second")
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_shed_stores", "min_reuse") == 4
    rig.tier.transfers.note_request(keys(4))
    written = "vllm:kvtier_disk_written_blocks"
    wait_until(lambda: rig.end_step() or rig.metric(written) == 4, "all four are written")
    assert rigs.make().serve(keys(4)).hit_blocks == 4


def test_chunks_that_the_cpu_tier_lost_are_written_when_they_are_computed_again(rigs: Rigs) -> None:
    rig = rigs.make(min_reuse=2)
    rig.tier.transfers.note_request(keys(3))
    rig.offload(keys(3), "first")
    rig.manager.reset_cache()
    rig.tier.transfers.note_request(keys(3))
    rig.offload(keys(3), "second")
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3


@pytest.mark.usefixtures("tries_again_at_once")
def test_chunks_of_a_request_that_is_kept_off_the_volume_stay_off_it_when_others_ask_for_them(rigs: Rigs) -> None:
    rig = rigs.make(min_reuse=2, tenant_from="Parameter")
    rig.params = {"kvtier_tenant": "../escape"}
    rig.tier.transfers.note_request(keys(3))
    rig.offload(keys(3), "of an unknown tenant")
    rig.params = None
    rig.tier.transfers.note_request([key(9)])
    rig.offload([key(9)], "unknown")
    rig.tier.transfers.note_request([*keys(3), key(9)])
    written = "vllm:kvtier_disk_written_blocks"
    wait_until(lambda: rig.end_step() or rig.metric(written) > 0, "what may be written is")
    rig.settle()
    assert rig.metric(written) == 1


def asked(stats: metrics.Stats) -> dict[str, float]:
    values = stats.take().data["data"].get(metrics.ASKED_BLOCKS.name, {})
    return {before: count for (before,), count in values.items()}


def test_blocks_asked_for_are_counted_by_how_often_before() -> None:
    sample = ReuseSample(stats := metrics.Stats())
    prompt = keys(4000)
    found = []
    for _ in range(7):
        sample.note_request(prompt)
        found.append(asked(stats))
    assert [list(each) for each in found] == [["0"], ["1"], ["2"], ["3"], ["4"], ["5+"], ["5+"]]
    counts = {count for each in found for count in each.values()}
    assert len(counts) == 1
    # Of 4,000 blocks with hashes, one of sixteen is 250 give or take 60.
    assert abs(counts.pop() - len(prompt)) < 60 * SAMPLED_OF
    sample.note_request(keys(4000, first=2000))
    assert list(asked(stats)) == ["5+", "0"]


def test_an_engine_reports_the_blocks_that_its_requests_ask_for(rigs: Rigs) -> None:
    rig = rigs.make()
    sampled = next(number for number in range(1000) if not key(number)[0] % SAMPLED_OF)
    for _ in range(2):
        rig.tier.transfers.note_request([key(sampled)])
    assert [rig.metric(metrics.ASKED_BLOCKS.name, before) for before in ("0", "1", "2")] == [16, 16, 0]


def block(number: int, tenant: str = "", group: int = 0) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest(), group, tenant)


@pytest.fixture
def memory(clock: Clock) -> BlockMemory:
    return BlockMemory(now=clock)


def test_a_block_that_was_written_or_read_is_present_for_a_while(memory: BlockMemory, clock: Clock) -> None:
    assert memory.state(block(1)) is Presence.UNKNOWN
    memory.add(block(1))
    assert memory.state(block(1)) is Presence.PRESENT
    clock.seconds += TRUST_SECONDS
    assert memory.state(block(1)) is Presence.UNKNOWN
    assert memory.has(block(1))
    memory.discard(block(1))
    assert not memory.has(block(1))


def test_blocks_of_tenants_and_groups_are_told_apart(memory: BlockMemory) -> None:
    memory.add(block(1, "acme"))
    assert memory.state(block(1)) is Presence.UNKNOWN
    assert memory.state(block(1, "other")) is Presence.UNKNOWN
    assert memory.state(block(1, "acme", group=1)) is Presence.UNKNOWN
    assert memory.state(block(1, "acme")) is Presence.PRESENT


@pytest.mark.parametrize(("is_damaged", "seconds"), [(False, ASIDE_SECONDS), (True, DAMAGED_SECONDS)])
def test_a_block_that_the_volume_did_not_give_is_absent_for_a_while_whatever_lookups_see(
    memory: BlockMemory, clock: Clock, is_damaged: bool, seconds: float
) -> None:
    memory.set_aside(block(1), is_damaged=is_damaged)
    memory.see(block(1))
    assert memory.state(block(1)) is Presence.ABSENT
    clock.seconds += seconds
    assert memory.state(block(1)) is Presence.UNKNOWN
    memory.set_aside(block(1), is_damaged=is_damaged)
    memory.add(block(1))
    assert memory.state(block(1)) is Presence.PRESENT, "it was written anew"


def test_lookups_are_quick_again_once_nothing_is_set_aside_any_more(memory: BlockMemory, clock: Clock) -> None:
    memory.set_aside(block(1), is_damaged=True)
    memory.set_aside(block(2))
    assert memory.has_asides
    clock.seconds += max(DAMAGED_SECONDS, ASIDE_SECONDS)
    assert not memory.has_asides
    assert len(memory) == 0


def test_the_memory_is_bounded_and_keeps_the_last_blocks(clock: Clock) -> None:
    memory = BlockMemory(remembered=100, now=clock)
    for number in range(1000):
        memory.add(block(number))
    assert len(memory) == 100
    assert all(memory.has(block(number)) for number in range(900, 1000))
    for number in range(40_000):
        memory.set_aside(block(number))
    assert len(memory) <= 1 << 14


def test_nothing_is_known_of_a_directory_that_was_made_anew(memory: BlockMemory) -> None:
    memory.add(block(1))
    memory.set_aside(block(2))
    memory.clear()
    assert memory.state(block(1)) is Presence.UNKNOWN
    assert memory.state(block(2)) is Presence.UNKNOWN
    assert len(memory) == 0
