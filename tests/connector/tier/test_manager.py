# SPDX-License-Identifier: Apache-2.0
"""The disk tier under vLLM's own tiering manager, on a volume that works."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import IO_THREADS, ROW_BYTES, Rig, Rigs, key, keys, note_positions, offloading_config, wait_until
from store_faults import GatedFs, flip
from vllm.v1.kv_offload.base import Medium, OffloadKey
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.tiering.metrics import TieringOffloadingMetrics

from kvtier_connector.cascade.fetch import Load
from kvtier_connector.cascade.split import Split
from kvtier_connector.contract.errors import ConfigInvalid


def test_what_another_engine_stores_is_found_at_once_and_not_written_again(rigs: Rigs) -> None:
    reader, writer = rigs.make(), rigs.make()
    for number in range(5):
        wanted = keys(2, first=10 * number)
        assert reader.serve(wanted, f"before {number}").hit_blocks == 0
        writer.offload(wanted)
        assert reader.serve(wanted, f"after {number}").hit_blocks == 2
    assert reader.metric("vllm:kvtier_disk_misses", "absent") > 0
    third = rigs.make()
    third.offload(keys(2))
    assert third.metric("vllm:kvtier_disk_written_blocks") == 0
    assert third.metric("vllm:kvtier_disk_present_blocks") == 2
    assert list(third.tier.take_events()) == [], "none are kept unless they are asked for"


def test_a_load_that_fails_late_leaves_nothing_to_its_namesake(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.memory.DAMAGED_SECONDS", 0.0)
    wanted = keys(3)
    rigs.make().offload(wanted)
    flip(rigs.block_file(key(1)))
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


class _Busy:
    """An engine whose I/O workers all read the first of 24 chunks; two requests have found them."""

    def __init__(self, rigs: Rigs, *, rows: int) -> None:
        self.chunks = keys(24)
        rigs.write(self.chunks)
        self.fs = GatedFs(lambda call, path: call == "preadv" and "/blocks/" in path)
        self.rig = rigs.make(chunks=rows, fs=self.fs)
        self.fetches = self.rig.manager.fetches
        self.ahead, self.other = self.rig.request("ahead"), self.rig.request("other")
        for context in (self.ahead, self.other):
            wait_until(lambda context=context: self.rig.find(self.chunks, context) == 24, "the chunks are found")
        assert self.fetches.lease(self.chunks, self.ahead)
        wait_until(lambda: self.fs.waiting == IO_THREADS, "all workers read")


def test_chunks_that_no_request_waits_for_are_not_read(rigs: Rigs) -> None:
    busy = _Busy(rigs, rows=48)
    busy.fetches.end_lease(busy.ahead)
    assert busy.rig.manager.match_prefix(busy.chunks, busy.other) == (24, None), "they are on the volume"
    wait_until(lambda: busy.rig.poll() and busy.rig.tier.transfers.loading == IO_THREADS, "the others end")
    busy.fs.open_gate()
    busy.rig.settle()
    (read,) = busy.rig.manager._metrics.take_stats().data["data"][TieringOffloadingMetrics.READ_BYTES].values()
    assert busy.rig.metric("vllm:kvtier_disk_read_blocks") * ROW_BYTES == read == IO_THREADS * ROW_BYTES
    assert [busy.rig.metric("vllm:kvtier_disk_misses", cause) for cause in ("shutdown", "unneeded")] == [0, 0]
    assert busy.rig.primary.room == 48


@pytest.mark.parametrize("rows", [10, 48])
def test_a_load_that_comes_just_then_gets_all_of_them(rigs: Rigs, rows: int) -> None:
    busy = _Busy(rigs, rows=rows)
    busy.fetches.end_lease(busy.ahead)
    assert not busy.fetches.lease(busy.chunks, busy.other), "their rows are not free yet"
    load = busy.rig.begin_load(busy.chunks, busy.other)
    busy.fs.open_gate()
    wait_until(lambda: busy.rig.take_piece(load) < 0 or load.is_handed_over, "all of it comes")
    assert not load.failed
    busy.rig.manager.release_load("other")
    busy.rig.settle()
    assert busy.rig.primary.room == rows


def test_a_split_reads_itself_what_another_request_has_given_up(rigs: Rigs) -> None:
    busy = _Busy(rigs, rows=48)
    manager, split = busy.rig.manager, Split(busy.other, busy.chunks, 0, 16, 0)
    manager.splits.begin("other", split)
    assert split.ordered == 24
    busy.fetches.end_lease(busy.ahead)
    busy.fs.open_gate()
    wait_until(lambda: busy.rig.poll() and (manager.splits.advance() or split.ready == 24), "all of it comes")


def test_stored_blocks_are_published_as_events_of_the_storage_medium(rigs: Rigs) -> None:
    rig = rigs.make(options={"enable_kv_events": True, "locality": "REMOTE"})
    rig.offload(keys(3))
    (event,) = rig.tier.take_events()
    assert (set(event.keys), event.medium, event.removed) == (set(keys(3)), Medium.STORAGE, False)
    assert event.locality.value == "REMOTE"
    assert list(rig.tier.take_events()) == []


def test_unknown_options_are_refused_by_name(rigs: Rigs) -> None:
    with pytest.raises(ConfigInvalid, match="does not know n_read_threads, root_dir"):
        rigs.make(options={"root_dir": "/x", "n_read_threads": 4})


def test_a_config_file_that_cannot_be_read_is_refused_by_name() -> None:
    with pytest.raises(ConfigInvalid, match=r"config_file /nowhere/connector\.json"):
        Rig(Path("/nowhere/connector.json"), chunks=4)


def test_an_engine_says_how_large_its_kv_is(rigs: Rigs) -> None:
    groups = (
        OffloadingGroupConfig(tokens_per_block=16, layer_names=("full",), group_id=0),
        OffloadingGroupConfig(tokens_per_block=64, layer_names=("states",), group_id=1),
    )
    engine = rigs.make(config=offloading_config(groups=groups))
    assert engine.metric("vllm:kvtier_chunk_bytes") == ROW_BYTES
    assert engine.metric("vllm:kvtier_token_bytes") == ROW_BYTES / 16 + ROW_BYTES / 64


def test_a_part_of_the_prefix_that_is_in_the_cpu_tier_does_not_keep_the_rest_out(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rig = rigs.make(chunks=10)
    rig.offload(keys(6), "head")
    assert rig.serve(keys(30)).hit_blocks == 30


def serve_together(rig: Rig, wanted: dict[str, list[OffloadKey]]) -> dict[str, int]:
    """Serve requests that arrive at once, a piece of each in each step; compare every byte."""
    contexts = {name: rig.request(name) for name in wanted}
    for name, context in contexts.items():
        note_positions(context, wanted[name])
    loads: dict[str, Load] = {}
    hits = dict.fromkeys(wanted, 0)
    over: set[str] = set()

    def are_served() -> bool:
        for name in wanted.keys() - over:
            if name not in loads:
                found = rig.find_prefix(wanted[name], contexts[name])
                if found is None:
                    continue
                if not found:
                    over.add(name)
                    continue
                loads[name] = rig.begin_load(wanted[name][:found], contexts[name])
            hits[name] += rig.take_piece(loads[name])
            if loads[name].is_handed_over:
                rig.manager.release_load(name)
                over.add(name)
        rig.end_step()
        return len(over) == len(wanted)

    wait_until(are_served, "all are served")
    for context in contexts.values():
        rig.finish(context)
    return hits


def prefixes(rigs: Rigs, requests: int, blocks: int) -> dict[str, list[OffloadKey]]:
    wanted = {f"user {number}": keys(blocks, first=1000 * number) for number in range(requests)}
    for prefix in wanted.values():
        rigs.write(prefix)
    return wanted


ALONE = [(1, 5, 1), *((1, blocks, 10) for blocks in (9, 10, 11, 20, 40))]


@pytest.mark.parametrize(("requests", "blocks", "chunks"), [*ALONE, (2, 30, 10), (8, 16, 40)])
def test_requests_that_want_too_much_are_all_served_whole(rigs: Rigs, requests: int, blocks: int, chunks: int) -> None:
    wanted = prefixes(rigs, requests, blocks)
    rig = rigs.make(chunks=chunks)
    assert serve_together(rig, wanted) == dict.fromkeys(wanted, blocks)
    assert rig.metric("vllm:kvtier_disk_read_blocks") == requests * blocks
    assert rig.metric("vllm:kvtier_disk_misses", "budget") == 0


def test_rows_are_given_to_requests_in_their_order_and_to_chunks_in_that_of_the_prefix(rigs: Rigs) -> None:
    wanted = prefixes(rigs, 3, 8)
    rig = rigs.make(chunks=8)
    loads = {name: rig.begin_load(prefix, rig.request(name)) for name, prefix in wanted.items()}
    order = []

    def are_served() -> bool:
        for name, load in loads.items():
            before = len(load.handed)
            rig.take_piece(load)
            order.extend((name, number) for number in range(before, len(load.handed)))
        rig.end_step()
        return all(load.is_handed_over for load in loads.values())

    wait_until(are_served, "all are served")
    # What was freed goes to the next in line, so requests overlap; none overtakes another, nor a chunk another.
    assert list(dict.fromkeys(name for name, _ in order)) == list(wanted)
    for name in wanted:
        assert [number for of, number in order if of == name] == list(range(8))
    for name in wanted:
        rig.manager.release_load(name)


def test_a_load_whose_rows_can_never_come_gives_up(rigs: Rigs) -> None:
    rigs.write(keys(8))
    rig = rigs.make(chunks=4)
    # Pinned for good, as by requests that all wait for more.
    holder = rig.request("holder")
    rig.offload(keys(4, first=100), "writer")
    rig.manager.primary_tier.prepare_load(keys(4, first=100), holder)
    assert rig.serve(keys(8)).hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "budget") >= 1
    rig.manager.primary_tier.complete_load(keys(4, first=100), holder)
    assert rig.serve(keys(8), "later").hit_blocks == 8


def prefetch(rig: Rig, name: str, wanted: list[OffloadKey]) -> Rig:
    context = rig.request(name)
    note_positions(context, wanted)
    wait_until(lambda: rig.find(wanted, context) == len(wanted), "the prefix is found")
    rig.manager.read_ahead(wanted, context)
    return rig


def test_what_is_fetched_ahead_is_there_for_its_request_and_takes_a_share_of_the_rows_at_most(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rig = prefetch(rigs.make(chunks=20), "early", keys(6))
    wait_until(lambda: rig.poll() and rig.manager.are_ready(keys(6)), "all is there")
    assert rig.serve(keys(6), "early").steps == 1
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 6
    rig = prefetch(rigs.make(chunks=10), "early", keys(30))
    rig.settle()
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 5


def test_what_is_fetched_ahead_yields_to_what_is_loaded_and_the_last_that_came_first(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rig = rigs.make(chunks=10)
    prefetch(rig, "first", keys(2))
    prefetch(rig, "second", keys(3, first=2))
    wait_until(lambda: rig.poll() and rig.manager.are_ready(keys(5)), "both are there")
    load = rig.begin_load(keys(8, first=20), rig.request("now"))
    wait_until(lambda: rig.poll() and load.rows.count(-1) == 0, "all is there")
    assert rig.manager.are_ready(keys(2))
    assert not rig.manager.are_ready(keys(3, first=2))
    rig.manager.release_load("now")


def gate_of(rigs: Rigs, number: int) -> GatedFs:
    """Return a volume on which the read of one block waits."""
    name = rigs.block_file(key(number)).name
    return GatedFs(lambda call, path: call == "preadv" and name in path)


def test_a_load_joins_what_is_fetched_ahead_for_another_request(rigs: Rigs) -> None:
    rigs.write(keys(6))
    fs = gate_of(rigs, 5)
    rig = prefetch(rigs.make(chunks=20, fs=fs), "early", keys(6))
    load = rig.begin_load(keys(6), rig.request("now"))
    wait_until(lambda: rig.poll() and load.rows.count(-1) == 1, "all but one is there")
    fs.open_gate()
    wait_until(lambda: rig.poll() and load.rows.count(-1) == 0, "all is there")
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 6
    rig.manager.release_load("now")


def test_who_shares_a_prefix_fetched_ahead_is_not_looked_up_before_its_turn(rigs: Rigs) -> None:
    rigs.write(keys(6))
    fs = gate_of(rigs, 5)
    rig = prefetch(rigs.make(chunks=20, fs=fs), "first", keys(6))
    shared = rig.request("second")
    prompt = [*keys(6), *keys(2, first=100)]
    note_positions(shared, prompt)
    rig.manager.read_ahead(prompt, shared)
    assert not rig.manager.request(shared).on_volume
    fs.open_gate()
    assert rig.serve(prompt, "second").hit_blocks == 6
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 6


def test_what_follows_a_prefix_that_is_fetched_ahead_for_another_request_is_fetched_ahead_too(rigs: Rigs) -> None:
    rigs.write(keys(9))
    fs = gate_of(rigs, 5)
    rig = prefetch(rigs.make(chunks=40, fs=fs), "first", keys(6))
    prefetch(rig, "second", keys(9))
    fs.open_gate()
    wait_until(lambda: rig.poll() and rig.manager.are_ready(keys(9)), "all is there")
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 9


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
