# SPDX-License-Identifier: Apache-2.0
"""Which chunks are written at all: those that vLLM has offered as often as configured."""

from __future__ import annotations

from rig import ROW_BYTES, Rigs, key, keys

from kvtier_connector.cascade.offers import Offers


def test_every_block_is_admitted_unless_configured_otherwise() -> None:
    offers = Offers(1)
    assert offers.add(key(1))
    assert not offers.is_gated


def test_a_block_is_admitted_at_the_offer_that_is_configured() -> None:
    offers = Offers(3)
    assert [offers.add(key(1)) for _ in range(4)] == [False, False, True, True]
    assert offers.is_known(key(1))
    assert not offers.is_known(key(2))
    assert not offers.add(key(1, group=1))


def test_counts_of_what_was_offered_long_ago_are_forgotten() -> None:
    offers = Offers(2, remembered=4)
    offers.add(key(0))
    for other in keys(8, first=1):
        offers.add(other)
    assert not offers.add(key(0))


def test_only_what_is_offered_twice_is_written_and_what_is_there_is_not_written_again(rigs: Rigs) -> None:
    rig = rigs.make(min_reuse=2)
    rig.offload(keys(3), "first")
    assert rig.metric("vllm:kvtier_disk_shed_stores", "min_reuse") == 3
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 0

    # In the CPU tier still, and offered again with the next request that has this prefix.
    rig.offload(keys(4), "second")
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3
    assert rig.metric("vllm:kvtier_disk_shed_stores", "min_reuse") == 4
    rig.offload(keys(4), "third")
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 4
    assert rig.metric("vllm:kvtier_disk_present_blocks") == 3
    assert rig.metric("vllm:kvtier_disk_queued_store_bytes") == 0 * ROW_BYTES
    assert rigs.make().serve(keys(4)).hit_blocks == 4
