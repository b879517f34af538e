# SPDX-License-Identifier: Apache-2.0
"""Parents, positions and recency: what the tier tells whoever makes room."""

from __future__ import annotations

from pathlib import Path

from rig import TOKENS_PER_BLOCK, Rig, Rigs, key, keys, note_positions, wait_until
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_block_hash

from kvtier_connector.store.format import Header, decode_header
from kvtier_connector.store.journal import JournalReader
from kvtier_connector.store.layout import NO_LINEAGE, Lineage
from kvtier_connector.store.records import Op, Record
from kvtier_connector.tier.chains import Chain

TOKENS = {0: TOKENS_PER_BLOCK, 1: 2 * TOKENS_PER_BLOCK}


def hash_of(number: int) -> bytes:
    return get_offload_block_hash(key(number))


def chain_of(*prefix: OffloadKey) -> tuple[ReqContext, Chain]:
    context = ReqContext(req_id="r")
    note_positions(context, prefix)
    return context, Chain(context, TOKENS)


def test_each_chunk_has_its_number_and_the_one_before_it_as_parent() -> None:
    _, chain = chain_of(*keys(3))
    assert chain.lineage(key(0)) == NO_LINEAGE
    assert chain.lineage(key(1)) == Lineage(hash_of(0), 1)
    assert chain.lineage(key(2)) == Lineage(hash_of(1), 2)


def test_a_chain_grows_with_the_request() -> None:
    context, chain = chain_of(*keys(2))
    assert chain.lineage(key(2)) == NO_LINEAGE
    context.set_offload_key_position(key(2), 3 * TOKENS_PER_BLOCK)
    assert chain.lineage(key(2)) == Lineage(hash_of(1), 2)


def test_groups_are_chains_of_their_own_with_chunks_of_their_own_length() -> None:
    context = ReqContext(req_id="r")
    for number in range(4):
        context.set_offload_key_position(key(number), (number + 1) * TOKENS_PER_BLOCK)
        if number % 2:
            context.set_offload_key_position(key(number, group=1), (number + 1) * TOKENS_PER_BLOCK)
    chain = Chain(context, TOKENS)
    assert chain.lineage(key(3)) == Lineage(hash_of(2), 3)
    assert chain.lineage(key(3, group=1)) == Lineage(hash_of(1), 1)


def test_a_chunk_that_ends_inside_another_is_no_link() -> None:
    context, chain = chain_of(*keys(2))
    context.set_offload_key_position(key(50), 2 * TOKENS_PER_BLOCK + 3)
    context.set_offload_key_position(key(2), 3 * TOKENS_PER_BLOCK)
    assert chain.lineage(key(50)) == NO_LINEAGE
    assert chain.lineage(key(2)) == Lineage(hash_of(1), 2)


def test_of_a_chunk_that_vllm_did_not_note_nothing_is_said() -> None:
    _, chain = chain_of()
    assert chain.lineage(key(0)) == NO_LINEAGE
    assert chain.last_present(lambda _: True) == []


def test_the_last_chunk_that_is_there_is_found_with_few_questions() -> None:
    _, chain = chain_of(*keys(1000))
    asked: list[OffloadKey] = []
    there = set(keys(617))

    def is_present(of: OffloadKey) -> bool:
        asked.append(of)
        return of in there

    assert chain.last_present(is_present) == [key(616)]
    assert len(asked) <= 8 + 11


def test_of_a_sliding_window_the_end_is_found_although_the_beginning_is_not_there() -> None:
    _, chain = chain_of(*keys(1000))
    assert chain.last_present(set(keys(3, first=995)).__contains__) == [key(997)]
    assert chain.last_present(lambda _: False) == []


def headers(root: Path) -> dict[bytes, Header]:
    decoded = [decode_header(path.read_bytes()) for path in (root / "blocks").rglob("*.kvb")]
    return {header.key.hash: header for header in decoded if isinstance(header, Header)}


def records(reader: JournalReader) -> list[Record]:
    return [record for batch in reader.read() for record in batch]


def test_a_block_says_on_the_volume_what_comes_before_it(rigs: Rigs) -> None:
    rigs.make().offload(keys(3))
    found = headers(rigs.root)
    assert [found[hash_of(number)].lineage for number in range(3)] == [
        NO_LINEAGE,
        Lineage(hash_of(0), 1),
        Lineage(hash_of(1), 2),
    ]


def test_the_parent_is_known_although_only_the_end_of_the_prompt_is_stored(rigs: Rigs) -> None:
    rig = rigs.make()
    context = rig.request("writer")
    note_positions(context, keys(4))
    prepared = rig.manager.prepare_store([key(3)], context)
    assert prepared is not None
    rig.manager.complete_store(prepared.keys_to_store, context)
    rig.settle()
    assert headers(rigs.root)[hash_of(3)].lineage == Lineage(hash_of(2), 3)


def used(reader: JournalReader) -> list[Record]:
    return [record for record in records(reader) if record.op == Op.USED]


def wait_for_used(reader: JournalReader) -> list[Record]:
    found: list[Record] = []
    wait_until(lambda: found.extend(used(reader)) or bool(found), "the use is on the volume")
    return found


def test_a_hit_is_one_record_for_the_end_of_the_prefix(rigs: Rigs) -> None:
    rigs.make().offload(keys(20))
    reader = JournalReader(rigs.root)
    reader.start()
    user: Rig = rigs.make(refresh_seconds=0.05)
    for number in range(3):
        assert user.serve(keys(20), f"r{number}").hit_blocks == 20
    assert [(record.key.hash, record.lineage) for record in wait_for_used(reader)] == [
        (hash_of(19), Lineage(hash_of(18), 19))
    ]
    user.close()
    assert used(reader) == []


def test_a_prefix_that_only_the_cpu_tier_served_counts_as_used(rigs: Rigs) -> None:
    rigs.make().offload(keys(5))
    user = rigs.make(refresh_seconds=0.05)
    assert user.serve(keys(5), "from disk").hit_blocks == 5
    reader = JournalReader(rigs.root)
    reader.start()
    # A part of it only, so that it is another prefix than the one that was noted before.
    assert user.serve(keys(3), "from the CPU tier").hit_blocks == 3
    assert user.metric("vllm:kvtier_disk_read_blocks") == 5
    user.close()
    assert hash_of(2) in {record.key.hash for record in used(reader)}
