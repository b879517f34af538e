# SPDX-License-Identifier: Apache-2.0
"""Which chunks are written at all: those that as many requests have asked for as configured."""

from __future__ import annotations

from rig import Rigs, key, keys, wait_until

from kvtier_connector.cascade.transfers import ReuseFilter


def test_every_block_is_due_unless_configured_otherwise() -> None:
    reuse = ReuseFilter(1)
    assert reuse.is_due(key(1))


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

    def are_written() -> bool:
        rig.end_step()
        return rig.metric("vllm:kvtier_disk_written_blocks") == 4

    wait_until(are_written, "all four are written")
    assert rigs.make().serve(keys(4)).hit_blocks == 4


def test_chunks_that_the_cpu_tier_lost_are_written_when_they_are_computed_again(rigs: Rigs) -> None:
    rig = rigs.make(min_reuse=2)
    rig.tier.transfers.note_request(keys(3))
    rig.offload(keys(3), "first")
    rig.manager.reset_cache()
    rig.tier.transfers.note_request(keys(3))
    rig.offload(keys(3), "second")
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3
