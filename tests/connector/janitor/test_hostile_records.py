# SPDX-License-Identifier: Apache-2.0
"""Records with right checksums and wrong contents: nothing goes because of them, and the janitor works on."""

from __future__ import annotations

import tempfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_faults import WatchedFs
from tier_dir import BLOCK_BYTES, PAYLOAD_BYTES, Engine, Rig, key

from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.fs import new_token
from kvtier_connector.store.journal import MAX_PAYLOAD_BYTES, RECORD_BYTES, Op, Record, encode_head, encode_record
from kvtier_connector.store.layout import JournalName, Lineage, journal_path

BLOCKS = 20
LIMITS = {"max_bytes": 100 * BLOCK_BYTES, "high_watermark": 0.9, "low_watermark": 0.7}


def plant(engine: Engine, *records: bytes) -> None:
    writer = new_token()
    path = engine.root / journal_path(JournalName(writer, 0))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode_head(writer, 1) + b"".join(records))


def raw(op: int, number: int, *, payload_bytes: int = PAYLOAD_BYTES, time_ns: int = 1, position: int = 0) -> bytes:
    """Return a record with any numbers and a right checksum."""
    fields = bytearray(encode_record(Record(op, key(number), 1, 1))[:-4])
    fields[8:16] = payload_bytes.to_bytes(8, "little")
    fields[16:24] = time_ns.to_bytes(8, "little")
    fields[24:28] = position.to_bytes(4, "little")
    return bytes(fields) + zlib.crc32(fields).to_bytes(4, "little")


def sweep(rig: Rig, sweeper: Sweeper) -> None:
    for _ in range(8):
        rig.sweep(sweeper)


HOSTILE = {
    "a wrong length": [(Op.STORED, number, {"payload_bytes": 1 << 50}) for number in (0, BLOCKS)],
    "a negative length": [(Op.STORED, number, {"payload_bytes": 2**64 - 1}) for number in (0, BLOCKS)],
    "the longest length": [(Op.STORED, number, {"payload_bytes": MAX_PAYLOAD_BYTES}) for number in (0, BLOCKS)],
    "blocks that are not there": [(Op.STORED, number, {}) for number in range(1000, 1500)],
    "blocks that are there as gone": [(Op.GONE, number, {"time_ns": 2**62}) for number in range(BLOCKS)],
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_wrong_records_evict_and_count_nothing(rig: Rig, engine: Engine, case: str, *, is_restarted: bool) -> None:
    engine.put(*range(BLOCKS))
    sweeper = rig.swept(**LIMITS)
    plant(engine, *(raw(op, number, **{"time_ns": rig.clock.ns, **fields}) for op, number, fields in HOSTILE[case]))
    if is_restarted:
        sweeper = rig.sweeper(**LIMITS)
    sweep(rig, sweeper)
    assert engine.there(range(BLOCKS)) == list(range(BLOCKS))
    usage = sweeper.report.usage
    assert (usage.blocks, usage.used_bytes, usage.store_pause) == (BLOCKS, BLOCKS * BLOCK_BYTES, "")
    assert usage.problems == ()


def test_a_time_long_ago_makes_no_block_too_old(rig: Rig, engine: Engine) -> None:
    engine.put(*range(BLOCKS))
    sweeper = rig.sweeper(ttl_seconds=86_400.0)
    for _ in range(30):
        rig.clock.move(300)
        rig.sweep(sweeper)
    plant(engine, raw(Op.STORED, 0), raw(Op.STORED, BLOCKS, time_ns=0))
    engine.put(BLOCKS)
    sweep(rig, sweeper)
    assert engine.there(range(BLOCKS + 1)) == list(range(BLOCKS + 1))


def test_a_file_whose_length_is_wrong_in_the_ledger_removes_nothing_else(rig: Rig, engine: Engine) -> None:
    engine.put(*range(BLOCKS))
    sweeper = rig.swept(**LIMITS)
    sweeper.catalog.update(0, size=1 << 50, created_ns=rig.clock.ns)
    sweep(rig, sweeper)
    assert engine.there(range(BLOCKS)) == list(range(BLOCKS))
    assert sweeper.catalog.total.bytes == BLOCKS * BLOCK_BYTES


class CountingFs(WatchedFs):
    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def before(self, call: str, path: str | None) -> None:
        self.counted[call] += path is not None and path.endswith(".kvb")


def test_uses_of_blocks_that_do_not_exist_cost_one_look_each(rig: Rig) -> None:
    engine, fs = rig.engine(), CountingFs()
    engine.put(0)
    sweeper = rig.swept(fs)
    plant(engine, *(raw(Op.USED, number, time_ns=rig.clock.ns) for number in range(1000, 3000)))
    fs.counted.clear()
    for _ in range(3):
        sweep(rig, sweeper)
    assert fs.counted["open"] == 2000
    assert sweeper.catalog.total.blocks == 1


@pytest.mark.parametrize(("low", "looks"), [(0.7, 1), (0.2, 2)])
def test_a_large_sweep_looks_at_every_file_anew(rig: Rig, low: float, looks: int) -> None:
    engine, fs = rig.engine(), CountingFs()
    engine.put(*range(100))
    rig.swept(fs, **{**LIMITS, "low_watermark": low})
    left = len(engine.there(range(100)))
    assert left == int(100 * low)
    # Before anything is decided by what journals tell, and once more at each removal.
    assert fs.counted["stat"] == 100 * looks + (100 - left)


numbers = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 1 << 50]))
hostile = st.builds(
    raw,
    st.integers(0, 255) | st.sampled_from(list(Op)),
    st.integers(0, BLOCKS + 5),
    payload_bytes=numbers,
    time_ns=numbers,
    position=st.integers(0, 2**32 - 1),
)
noise = st.binary(min_size=RECORD_BYTES - 4, max_size=RECORD_BYTES - 4).map(
    lambda fields: fields + zlib.crc32(fields).to_bytes(4, "little")
)


@given(st.lists(hostile | noise, max_size=60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_record_removes_a_block_or_ends_the_janitor(records: list[bytes], is_first: bool) -> None:
    with tempfile.TemporaryDirectory() as base:
        rig = Rig(Path(base))
        engine = rig.engine()
        parent = b""
        for number in range(BLOCKS):
            engine.put(number, lineage=Lineage(parent, number))
            parent = key(number).hash
        sweeper = rig.sweeper(**LIMITS, ttl_seconds=86_400.0, default_quota_bytes=1 << 20)
        if not is_first:
            rig.sweep(sweeper)
        plant(engine, *records)
        sweep(rig, sweeper)
        assert engine.there(range(BLOCKS)) == list(range(BLOCKS))
        assert sweeper.catalog.total.blocks >= BLOCKS
        engine.put(BLOCKS + 50)
        rig.sweep(sweeper)
        assert sweeper.catalog.find(sweeper.catalog.generation("aa"), key(BLOCKS + 50)) >= 0
