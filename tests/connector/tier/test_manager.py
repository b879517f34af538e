# SPDX-License-Identifier: Apache-2.0
"""The disk tier under vLLM's own tiering manager, on a volume that works."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import ROW_BYTES, Rig, Rigs, key, keys, note_positions, offloading_config, wait_until
from store_faults import GatedFs
from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.config import OffloadingGroupConfig, OffloadingModelConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_connector.contract.errors import ConfigInvalid


def test_what_one_engine_stores_another_one_loads_byte_by_byte(rigs: Rigs) -> None:
    writer = rigs.make()
    writer.offload(keys(40))
    reader = rigs.make()

    assert reader.serve(keys(40)).hit_blocks == 40
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 40
    assert writer.metric("vllm:kvtier_disk_written_blocks") == 40
    assert reader.metric("vllm:kvtier_disk_active") == 1


def test_a_hit_is_attributed_to_disk(rigs: Rigs) -> None:
    rigs.make().offload(keys(1))
    reader = rigs.make()
    context = reader.request("r")
    wait_until(lambda: reader.find(keys(1), context) == 1, "the chunk is found")
    reader.begin_load(keys(1), context)

    assert reader.manager.get_load_source(key(0), context) is CacheHitSource.DISK
    reader.manager.release_load("r")
    reader.finish(context)


def test_a_block_that_nobody_stored_is_a_miss(rigs: Rigs) -> None:
    reader = rigs.make()
    assert reader.serve(keys(5)).hit_blocks == 0
    assert reader.metric("vllm:kvtier_disk_misses", "absent") > 0


def test_storing_what_the_volume_has_already_writes_nothing(rigs: Rigs) -> None:
    first, second = rigs.make(), rigs.make()
    first.offload(keys(4))
    second.offload(keys(4))

    assert second.metric("vllm:kvtier_disk_written_blocks") == 0
    assert second.metric("vllm:kvtier_disk_present_blocks") == 4


def test_what_another_engine_stores_is_found_at_once(rigs: Rigs) -> None:
    reader, writer = rigs.make(), rigs.make()
    for number in range(5):
        wanted = keys(2, first=10 * number)
        assert reader.serve(wanted, f"before {number}").hit_blocks == 0
        writer.offload(wanted)
        assert reader.serve(wanted, f"after {number}").hit_blocks == 2


def test_a_block_that_was_evicted_is_a_miss_and_is_written_again(rigs: Rigs) -> None:
    rig = rigs.make()
    rig.offload(keys(4))
    rigs.block_file(key(2)).unlink()
    rig.manager.reset_cache()
    assert rig.serve(keys(4)).hit_blocks == 2
    rig.manager.reset_cache()
    rig.offload(keys(4))
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 5
    assert rigs.make().serve(keys(4)).hit_blocks == 4


def test_a_corrupt_block_is_a_miss_and_the_blocks_around_it_are_kept(rigs: Rigs) -> None:
    rigs.make().offload(keys(8))
    damaged = rigs.block_file(key(5))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    reader = rigs.make()
    assert reader.serve(keys(8)).hit_blocks == 5
    reader.settle()
    assert reader.metric("vllm:kvtier_disk_misses", "checksum") == 1
    # Those that landed behind the damage are in the CPU tier: partial success is kept.
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 7
    assert not damaged.exists()


def test_a_load_that_fails_after_its_request_has_ended_leaves_nothing_to_the_next_one_of_that_name(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.memory.DAMAGED_SECONDS", 0.0)
    wanted = keys(3)
    rigs.make().offload(wanted)
    damaged = rigs.block_file(key(1))
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    rig = rigs.make()
    aborted = rig.request("same name")
    note_positions(aborted, wanted)

    wait_until(lambda: rig.find(wanted, aborted) == 3, "the chunks are found")
    rig.begin_load(wanted, aborted)
    assert rig.tier.has_pending_work()
    rig.manager.release_load("same name")
    rig.finish(aborted)
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_misses", "checksum") == 1
    rigs.make().offload(wanted)
    assert rig.serve(wanted, "same name").hit_blocks == 3


def test_gauges_are_reported_now_and_then_and_at_once_when_the_last_transfer_has_ended(rigs: Rigs) -> None:
    fs = GatedFs(lambda call, path: call == "pwritev" and "/blocks/" in path)
    rig = rigs.make(fs=fs)
    wait_until(lambda: rig.metric("vllm:kvtier_disk_active") == 1, "the volume is attached")
    type(rig.tier).stats_seconds = 3600.0
    rig.begin_offload(keys(3))
    rig.end_step()
    assert rig.metric("vllm:kvtier_disk_queued_jobs") == 1
    assert rig.tier.get_stats() is None
    fs.open_gate()
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_queued_jobs") == 0
    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3
    assert rig.tier.get_stats() is None


def test_stores_stop_at_the_limit_and_loads_go_on(rigs: Rigs) -> None:
    rigs.permit(3 * (ROW_BYTES + 4096))
    rig = rigs.make(live_file=str(rigs.live_file(needs_permit=True)))
    rig.offload(keys(5))

    assert rig.metric("vllm:kvtier_disk_written_blocks") == 3
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_budget") == 2
    rig.manager.reset_cache()
    assert sum(rig.serve([key(number)], f"r{number}").hit_blocks for number in range(5)) == 3


def test_stored_blocks_are_published_as_events_of_the_storage_medium(rigs: Rigs) -> None:
    rig = rigs.make(options={"enable_kv_events": True, "locality": "REMOTE"})
    rig.offload(keys(3))
    (event,) = rig.tier.take_events()

    assert (set(event.keys), event.medium, event.removed) == (set(keys(3)), Medium.STORAGE, False)
    assert event.locality.value == "REMOTE"
    assert list(rig.tier.take_events()) == []


def test_no_events_are_kept_unless_they_are_asked_for(rigs: Rigs) -> None:
    rig = rigs.make()
    rig.offload(keys(3))
    assert list(rig.tier.take_events()) == []


def test_unknown_options_are_refused_by_name(rigs: Rigs) -> None:
    with pytest.raises(ConfigInvalid, match="does not know n_read_threads, root_dir"):
        rigs.make(options={"root_dir": "/x", "n_read_threads": 4})


def test_a_config_file_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigInvalid, match=r"config_file /nowhere/connector\.json"):
        Rig(Path("/nowhere/connector.json"), chunks=4)


def test_another_model_is_refused_but_its_engine_serves(rigs: Rigs) -> None:
    rigs.make().offload(keys(3))
    stranger = rigs.make(config=offloading_config(model=OffloadingModelConfig(name="org/other", dtype="bfloat16")))

    assert stranger.serve(keys(3)).hit_blocks == 0
    stranger.offload(keys(2, first=50))
    assert stranger.metric("vllm:kvtier_disk_active") == 0
    assert stranger.metric("vllm:kvtier_disk_refused", "engine.model_name") == 1
    assert stranger.metric("vllm:kvtier_disk_misses", "inert") > 0
    assert stranger.metric("vllm:kvtier_disk_shed_stores", "inert") == 2
    assert rigs.make().serve(keys(2, first=50)).hit_blocks == 0


def test_shutting_down_twice_is_the_same_as_once(rigs: Rigs) -> None:
    rig = rigs.make()
    rig.offload(keys(2))
    rig.tier.shutdown()
    rig.tier.shutdown()


def test_an_engine_says_how_large_its_kv_is(rigs: Rigs) -> None:
    groups = (
        OffloadingGroupConfig(tokens_per_block=16, layer_names=("full",), group_id=0),
        OffloadingGroupConfig(tokens_per_block=64, layer_names=("states",), group_id=1),
    )
    engine = rigs.make(config=offloading_config(groups=groups))
    assert engine.metric("vllm:kvtier_chunk_bytes") == ROW_BYTES
    assert engine.metric("vllm:kvtier_token_bytes") == ROW_BYTES / 16 + ROW_BYTES / 64
