# SPDX-License-Identifier: Apache-2.0
"""What the tier keeps of a request, and which of its chunks are written: those that were asked for often enough."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import TOKENS_PER_BLOCK, Rig, Rigs, key, keys, note_positions, wait_until
from store_faults import GatedFs
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_block_hash
from waiting import Clock

from kvtier_connector.cascade.memory import ASIDE_SECONDS, DAMAGED_SECONDS, TRUST_SECONDS, BlockMemory, Presence
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.cascade.reuse_sample import SAMPLED_OF, ReuseSample
from kvtier_connector.cascade.transfers import ReuseFilter
from kvtier_connector.janitor.follow import JournalFollower
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import Op, Record
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage
from kvtier_connector.vllm_adapter import metrics

TOKENS = {0: TOKENS_PER_BLOCK, 1: 2 * TOKENS_PER_BLOCK}


def hash_of(number: int) -> bytes:
    return get_offload_block_hash(key(number))


def request_of(*prefix: OffloadKey) -> tuple[ReqContext, TierRequest]:
    context = ReqContext(req_id="r")
    note_positions(context, prefix)
    return context, TierRequest(context, TOKENS)


class WalkedDict(dict[OffloadKey, int]):
    walked = 0

    def __iter__(self) -> Iterator[OffloadKey]:
        for each in super().__iter__():
            self.walked += 1
            yield each


def test_a_long_prompt_is_walked_once_and_its_last_chunk_found_with_few_questions() -> None:
    context = ReqContext(req_id="r")
    walked = context._offload_key_positions = WalkedDict()
    note_positions(context, keys(1000))
    request = TierRequest(context, TOKENS)
    assert [request.lineage(of).position for of in keys(1000)] == list(range(1000))
    assert walked.walked == 1000
    _, request = request_of(*keys(1000))
    asked: list[OffloadKey] = []
    there = set(keys(617))

    def is_present(of: OffloadKey) -> bool:
        asked.append(of)
        return of in there

    assert request.last_present(is_present) == [key(616)]
    assert len(asked) <= 8 + 11
    assert request.last_present(set(keys(3, first=995)).__contains__) == [key(997)], "of a sliding window"
    assert request.last_present(lambda _: False) == []


def test_groups_are_chains_of_their_own_and_a_chunk_inside_another_is_no_link() -> None:
    context = ReqContext(req_id="r")
    for number in range(4):
        context.set_offload_key_position(key(number), (number + 1) * TOKENS_PER_BLOCK)
        if number % 2:
            context.set_offload_key_position(key(number, group=1), (number + 1) * TOKENS_PER_BLOCK)
    request = TierRequest(context, TOKENS)
    assert request.lineage(key(3)) == Lineage(hash_of(2), 3)
    assert request.lineage(key(3, group=1)) == Lineage(hash_of(1), 1)
    context, request = request_of(*keys(2))
    assert [request.lineage(key(number)) for number in range(3)] == [NO_LINEAGE, Lineage(hash_of(0), 1), NO_LINEAGE]
    context.set_offload_key_position(key(50), 2 * TOKENS_PER_BLOCK + 3)
    context.set_offload_key_position(key(2), 3 * TOKENS_PER_BLOCK)
    assert request.lineage(key(50)) == NO_LINEAGE
    assert request.lineage(key(2)) == Lineage(hash_of(1), 2)


def following(root: Path) -> JournalFollower:
    """Return a reader of journals that has read all that there is."""
    reader = JournalFollower(str(root.parent), fs=FileSystem(), now=itertools.count(1000.0, 60.0).__next__)
    records(reader, root)
    return reader


def records(reader: JournalFollower, root: Path) -> list[Record]:
    return [record for _, batch in reader.read([root.name]) for record in batch]


def used(reader: JournalFollower, root: Path) -> list[Record]:
    return [record for record in records(reader, root) if record.op == Op.USED]


def wait_for_used(reader: JournalFollower, root: Path) -> list[Record]:
    found: list[Record] = []
    wait_until(lambda: found.extend(used(reader, root)) or bool(found), "the use is on the volume")
    return found


def test_a_hit_is_one_record_for_the_end_of_the_prefix(rigs: Rigs) -> None:
    rigs.make().offload(keys(20))
    reader = following(rigs.root)
    user: Rig = rigs.make(refresh_seconds=0.05)
    for number in range(3):
        assert user.serve(keys(20), f"r{number}").hit_blocks == 20
    assert [(record.key.hash, record.lineage) for record in wait_for_used(reader, rigs.root)] == [
        (hash_of(19), Lineage(hash_of(18), 19))
    ]
    user.close()
    assert used(reader, rigs.root) == []


def test_a_prefix_that_only_the_cpu_tier_served_counts_as_used(rigs: Rigs) -> None:
    rigs.make().offload(keys(5))
    user = rigs.make(refresh_seconds=0.05)
    assert user.serve(keys(5), "from disk").hit_blocks == 5
    reader = following(rigs.root)
    # A part of it only, so that it is another prefix than the one that was noted before.
    assert user.serve(keys(3), "from the CPU tier").hit_blocks == 3
    assert user.metric("vllm:kvtier_disk_read_blocks") == 5
    user.close()
    assert hash_of(2) in {record.key.hash for record in used(reader, rigs.root)}


def directories(root: Path) -> dict[str, int]:
    """Return how many blocks each tenant has, and the common tree."""
    found: dict[str, int] = {}
    for path in root.rglob("*.kvb"):
        parts = path.relative_to(root).parts
        name = parts[1] if parts[0] == "tenants" else ""
        found[name] = found.get(name, 0) + 1
    return found


def with_tenant(rig: Rig, tenant: Any) -> Rig:
    rig.params = None if tenant is None else {"kvtier_tenant": tenant}
    return rig


@pytest.mark.parametrize(
    ("source", "tenants", "stored"),
    [
        ("Parameter", ["acme", "other"], {"acme": 3, "other": 3}),
        ("Parameter", [None], {"": 3}),
        ("None", ["acme"], {"": 3}),
    ],
)
def test_each_tenant_that_the_parameter_names_has_a_directory_and_reads_no_other_where_tenants_are_on(
    rigs: Rigs, source: str, tenants: list[str | None], stored: dict[str, int]
) -> None:
    for tenant in tenants:
        with_tenant(rigs.make(tenant_from=source), tenant).offload(keys(3))
    assert directories(rigs.root) == stored
    for tenant in ("acme", "other", "third", None):
        reader = with_tenant(rigs.make(tenant_from=source), tenant)
        assert reader.serve(keys(3)).hit_blocks == 3 * ((tenant or "") in stored or source == "None")


def test_a_request_whose_tenant_cannot_be_told_is_computed_and_kept_off_the_volume(rigs: Rigs) -> None:
    rigs.make(tenant_from="Parameter").offload(keys(2))
    rig = rigs.make(tenant_from="Parameter")
    impossible: list[Any] = ["../escape", "UPPER", "", 7, ["acme"], "x" * 33]
    for number, tenant in enumerate(impossible):
        with_tenant(rig, tenant)
        assert rig.serve(keys(2), f"reader {number}").hit_blocks == 0
        rig.offload(keys(2, first=10 * number + 10), f"writer {number}")
    assert directories(rigs.root) == {"": 2}
    assert rig.metric("vllm:kvtier_disk_misses", "tenant") >= len(impossible)
    assert rig.metric("vllm:kvtier_disk_shed_stores", "tenant") == 2 * len(impossible)


def test_tenants_over_their_quota_are_refused_and_others_go_on(rigs: Rigs) -> None:
    rigs.permit(1 << 30, tenants=["acme"])
    rig = rigs.make(tenant_from="Parameter", live_file=str(rigs.live_file(needs_permit=True)))
    with_tenant(rig, "acme").offload(keys(5), "one")
    with_tenant(rig, "other").offload(keys(3, first=10), "two")
    rig.params = None
    rig.offload(keys(5, first=20), "three")
    assert directories(rigs.root) == {"other": 3, "": 5}
    assert rig.metric("vllm:kvtier_disk_shed_stores", "no_quota") == 5


def test_a_salt_is_a_directory_that_does_not_show_it(rigs: Rigs) -> None:
    rig = rigs.make(tenant_from="CacheSalt")
    rig.offload(keys(2), "whose salt cannot be seen")
    assert directories(rigs.root) == {}
    assert rig.metric("vllm:kvtier_disk_shed_stores", "tenant") == 2
    rig.manager.reset_cache()
    rig.salt = "my secret salt"
    rig.offload(keys(2))
    tenant = hashlib.sha256(b"my secret salt").hexdigest()[:16]
    assert directories(rigs.root) == {tenant: 2}
    assert b"my secret salt" not in b"".join(path.read_bytes() for path in rigs.root.rglob("*") if path.is_file())
    rig.salt = ""
    rig.offload(keys(2, first=10), "unsalted")
    assert directories(rigs.root) == {tenant: 2, "": 2}


def test_a_step_with_many_requests_whose_blocks_are_being_written_asks_about_each_at_the_same_cost(rigs: Rigs) -> None:
    gate = GatedFs(lambda call, path: call == "pwritev" and "/blocks/" in path)
    rig = rigs.make(fs=gate, chunks=2048)
    transfers = rig.tier.transfers
    contexts = [rig.begin_offload([key(number)], f"r{number}") for number in range(1000)]
    began = time.thread_time()
    assert all(map(transfers.is_storing, contexts))
    assert not transfers.is_storing(ReqContext(req_id="other"))
    # A look at every store for each request is a million looks, a tenth of a second at least.
    assert time.thread_time() - began < 0.02
    gate.open_gate()
    rig.settle()
    assert not any(map(transfers.is_storing, contexts))


def test_a_block_is_due_once_with_the_configured_request_and_old_counts_are_forgotten() -> None:
    reuse = ReuseFilter(3)
    assert [list(reuse.note_request([key(1)])) for _ in range(4)] == [[], [], [key(1)], []]
    assert reuse.is_due(key(1))
    assert not reuse.is_due(key(1, group=1))
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
