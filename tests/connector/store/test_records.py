# SPDX-License-Identifier: Apache-2.0
"""Journals: their bytes and names, and what one process notes and another reads; damage loses news and nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from store_contract import NOW_NS, key
from store_faults import CrashingFs, FailingFs, ShortFs
from waiting import Clock

from kvtier_connector.contract.engine import TENANT_PATTERN
from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store import journal, layout
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.journal import RECORD_BYTES, JournalWriter, Op, Record, decode_record, encode_record
from kvtier_connector.store.layout import BlockKey, JournalName, Lineage, block_path, parse_block_path

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

FORMAT_MD = Path(__file__).parents[3] / "connector" / "FORMAT.md"
TOKEN = "0123456789abcdef" * 2

hashes = st.binary(min_size=3, max_size=32)
tenants = st.just("") | st.from_regex(TENANT_PATTERN, fullmatch=True)
keys = st.builds(BlockKey, hashes, st.integers(0, layout.MAX_GROUP), tenants)
records = st.builds(
    Record,
    op=st.integers(0, 255),
    key=keys,
    payload_bytes=st.integers(0, journal.MAX_PAYLOAD_BYTES),
    time_ns=st.integers(0, journal.MAX_TIME_NS),
    lineage=st.builds(Lineage, st.just(b"") | hashes, st.integers(0, layout.MAX_POSITION), st.just("")),
)


@given(records)
def test_a_record_is_read_back(record: Record) -> None:
    data = encode_record(record)
    assert len(data) == RECORD_BYTES
    assert decode_record(data) == record


@given(records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_a_flipped_bit_makes_a_record_unreadable(record: Record, bit: int) -> None:
    data = bytearray(encode_record(record))
    data[bit // 8] ^= 1 << bit % 8
    assert decode_record(bytes(data)) is None


@given(st.binary(max_size=2 * RECORD_BYTES))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    decode_record(data)
    journal.is_head(data)


@pytest.mark.parametrize(
    "record",
    [
        Record(1, BlockKey(bytes(33), 0), 1, 1),
        Record(1, BlockKey(bytes(32), 0, "../x"), 1, 1),
        Record(1, BlockKey(bytes(32), 0), 1, 1, Lineage(bytes(33), 0)),
        Record(1, BlockKey(bytes(32), 0), 1, 1, Lineage(b"", 2**32)),
        Record(1, BlockKey(bytes(32), 0), -1, 1),
        Record(1, BlockKey(bytes(32), 0), journal.MAX_PAYLOAD_BYTES + 1, 1),
        Record(1, BlockKey(bytes(32), 0), 1, journal.MAX_TIME_NS + 1),
    ],
)
def test_a_record_that_nobody_could_read_is_not_written(record: Record) -> None:
    with pytest.raises(ValueError, match="Record"):
        encode_record(record)


@pytest.mark.parametrize("tenant", [b"../x", b"A", b"a\0b", b"\xff"])
def test_a_record_of_an_impossible_tenant_is_not_read(tenant: bytes) -> None:
    data = bytearray(encode_record(Record(1, BlockKey(bytes(32), 0, "acme"), 1, 1)))
    data[92:124] = tenant.ljust(32, b"\0")
    assert decode_record(with_checksum(data[:-4])) is None


def with_checksum(fields: bytes) -> bytes:
    return bytes(fields) + zlib.crc32(fields).to_bytes(4, "little")


@given(st.binary(min_size=RECORD_BYTES - 4, max_size=RECORD_BYTES - 4))
def test_bytes_with_a_right_checksum_are_a_record_that_can_be_written_or_none(fields: bytes) -> None:
    record = decode_record(with_checksum(fields))
    assert record is None or decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    ("offset", "size", "most"),
    [(8, 8, journal.MAX_PAYLOAD_BYTES), (16, 8, journal.MAX_TIME_NS), (24, 4, layout.MAX_POSITION)],
)
def test_a_number_out_of_its_range_makes_a_record_unreadable(offset: int, size: int, most: int) -> None:
    for number, is_read in ((most, True), (most + 1, False), (2 ** (8 * size) - 1, False)):
        fields = bytearray(encode_record(Record(1, BlockKey(bytes(32), 0), 1, 1))[:-4])
        fields[offset : offset + size] = number.to_bytes(size, "little")
        assert (decode_record(with_checksum(fields)) is not None) == is_read


def test_zeros_are_no_record_and_a_path_is_as_documented() -> None:
    assert decode_record(bytes(RECORD_BYTES)) is None
    assert not journal.is_head(bytes(RECORD_BYTES))
    key = BlockKey(bytes.fromhex("abcdef0123456789"), 12)
    assert block_path(key) == "blocks/abc/abcdef0123456789_g12.kvb"
    assert block_path(key._replace(tenant="acme")) == "tenants/acme/blocks/abc/abcdef0123456789_g12.kvb"
    moved = layout.quarantine_path(key._replace(tenant="acme"), "checksum", TOKEN)
    assert moved == f"tenants/acme/quarantine/abcdef0123456789_g12.kvb.checksum.{TOKEN}"


@pytest.mark.parametrize("offset", [0, 4, 8, 12])
def test_a_head_of_another_version_length_or_flags_is_not_read(offset: int) -> None:
    head = bytearray(journal.encode_head(TOKEN, NOW_NS))
    assert journal.is_head(bytes(head))
    head[offset] ^= 0x40
    assert not journal.is_head(with_checksum(head[:-4]))


def test_the_document_has_the_offsets_of_the_records() -> None:
    text = FORMAT_MD.read_text().partition("## Journals")[2]
    rows = [
        (int(offset), int(size), name)
        for offset, size, name in re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+) \|", text, re.MULTILINE)
    ]
    data = encode_record(Record(2, BlockKey(b"\xaa" * 20, 7, "acme"), 11, 13, Lineage(b"\xbb" * 16, 17)))
    numbers = {
        name: int.from_bytes(data[offset : offset + size], "little")
        for offset, size, name in rows[: next(i for i, row in enumerate(rows) if i and row[0] == 0)]
    }
    lengths = {"hash length": 20, "parent length": 16, "payload length": 11}
    assert ({"operation": 2, "group": 7, "time": 13, "position": 17} | lengths).items() <= numbers.items()
    assert numbers["hash"].to_bytes(32, "little") == b"\xaa" * 20 + bytes(12)
    assert numbers["parent hash"].to_bytes(32, "little") == b"\xbb" * 16 + bytes(16)
    assert numbers["tenant"].to_bytes(32, "little") == b"acme" + bytes(28)
    assert numbers["record checksum"] == zlib.crc32(data[:124])
    assert sum(size for _, size, _ in rows) == 2 * RECORD_BYTES


@given(st.integers(0, 99_999_999))
def test_the_path_of_a_journal_gives_its_name_back(number: int) -> None:
    name = JournalName(TOKEN, number)
    assert layout.parse_journal_path(layout.journal_path(name)) == name
    assert parse_block_path(layout.journal_path(name)) is None


@given(keys)
def test_a_path_gives_the_key_back(key: BlockKey) -> None:
    assert parse_block_path(block_path(key)) == key


@given(keys, keys)
def test_different_blocks_have_different_paths(one: BlockKey, other: BlockKey) -> None:
    assert (block_path(one) == block_path(other)) == (one == other)


@given(st.text() | st.from_regex(r"blocks/[0-9a-f]{3}/[0-9a-f]{3,9}_g[0-9]{1,11}\.kvb\n?"))
def test_only_paths_that_are_made_are_understood(path: str) -> None:
    key = parse_block_path(path)
    assert key is None or block_path(key) == path


@pytest.mark.parametrize("path", TABLES["no_blocks"])
def test_a_path_that_is_almost_right_is_not_a_block(path: str) -> None:
    assert parse_block_path(path) is None


@pytest.mark.parametrize(
    "key",
    [BlockKey(b"", 0), BlockKey(b"ab", 0), BlockKey(bytes(33), 0), BlockKey(b"abc", -1), BlockKey(b"abc", 2**32)]
    + [BlockKey(b"abc", 0, tenant) for tenant in ["..", ".", "a/b", "../x", "A", "a b", "x" * 33, "a\n", "\u0661"]],
)
def test_a_key_that_does_not_fit_is_refused(key: BlockKey) -> None:
    with pytest.raises(ValueError, match="hash must have"):
        block_path(key)


@given(keys)
def test_partial_and_quarantined_names_are_no_blocks(key: BlockKey) -> None:
    partial = layout.partial_path(block_path(key), TOKEN)
    assert layout.is_partial(partial)
    assert layout.is_partial(partial.rpartition("/")[2])
    assert parse_block_path(partial) is None
    assert parse_block_path(layout.quarantine_path(key, "checksum", TOKEN)) is None
    assert not layout.is_partial(block_path(key))
    assert not layout.is_partial(layout.quarantine_path(key, "checksum", TOKEN))
    assert layout.is_quarantined(layout.quarantine_path(key, "checksum", TOKEN))
    assert not layout.is_quarantined(block_path(key))


def test_a_partial_name_leads_glusterfs_to_the_server_of_the_final_name() -> None:
    name = layout.partial_path("blocks/000/00/x_g0.kvb", TOKEN).rpartition("/")[2]
    # What GlusterFS calls rsync-hash-regex, by default.
    assert re.fullmatch(r"\.(.+)\.[^.]+", name)[1] == "x_g0.kvb"


@pytest.mark.parametrize(
    "name", [".partial", "x.partial", f".{TOKEN}.partial", f"x.{TOKEN[1:]}.partial", f"x.{TOKEN}-partial", "y.kvb"]
)
def test_other_names_are_not_partial(name: str) -> None:
    assert not layout.is_partial(name)


def make_writer(root: Path, fs: FileSystem = LOCAL, *, now: Clock | None = None, **limits: float) -> JournalWriter:
    return JournalWriter(
        root, fs=fs, limits=journal.JournalLimits(**limits), clock=lambda: NOW_NS, now=now or Clock(1000.0)
    )


def note(writer: JournalWriter, *numbers: int, op: Op = Op.STORED) -> None:
    for number in numbers:
        writer.append(op, key(number), 4096)


def records_of(root: Path) -> list[Record]:
    found = []
    for path in sorted((root / "journal").glob("*.kvj")):
        content = path.read_bytes()
        for at in range(RECORD_BYTES, len(content), RECORD_BYTES):
            record = decode_record(content[at : at + RECORD_BYTES])
            assert record is not None
            found.append(record)
    return found


def numbers_of(found: list[Record]) -> list[int]:
    return [int.from_bytes(record.key.hash[:4], "little") for record in found]


def only_file(root: Path) -> Path:
    (path,) = (root / "journal").glob("*.kvj")
    return path


def test_a_retention_is_noted_with_its_end(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    note(writer, 1, op=Op.USED)
    writer.append(Op.RETAINED, key(1), 4096, ahead_seconds=60)
    writer.flush()
    found = records_of(tmp_path)
    assert [record.op for record in found] == [Op.USED, Op.RETAINED]
    assert [record.time_ns - NOW_NS for record in found] == [0, 60_000_000_000]


def test_a_use_is_noted_once_in_a_window(tmp_path: Path, clock: Clock) -> None:
    writer = make_writer(tmp_path, now=clock, used_window_seconds=60)
    note(writer, 1, 1, 1, op=Op.USED)
    assert writer.pending == 1
    clock.seconds += 30
    note(writer, 1, op=Op.USED)
    assert writer.pending == 1
    clock.seconds += 60
    note(writer, 2, op=Op.USED)
    clock.seconds += 60
    note(writer, 1, op=Op.USED)
    assert writer.pending == 3


def test_a_block_that_was_stored_need_not_be_noted_as_used(tmp_path: Path) -> None:
    writer = make_writer(tmp_path)
    note(writer, 1)
    note(writer, 1, op=Op.USED)
    assert writer.pending == 1
    note(writer, 1)
    note(writer, 1, op=Op.GONE)
    assert writer.pending == 3


def test_a_flush_costs_three_system_calls_and_a_hit_none(tmp_path: Path) -> None:
    fs = CrashingFs(10**9)
    writer = make_writer(tmp_path, fs)
    note(writer, 0)
    writer.flush()
    fs.calls.clear()
    note(writer, *range(1, 1000))
    assert fs.calls == []
    writer.flush()
    assert fs.calls == ["open", "pwritev", "close"]
    writer.flush()
    assert fs.calls == ["open", "pwritev", "close"]


def test_a_volume_that_takes_few_bytes_at_a_time_gets_all_of_them(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, ShortFs(50))
    note(writer, *range(20))
    writer.flush()
    assert numbers_of(records_of(tmp_path)) == list(range(20))


def test_what_the_volume_never_takes_is_dropped_at_a_limit(tmp_path: Path) -> None:
    fs = FailingFs(OSError(errno.EROFS, "read-only"), when=lambda call, path: call == "open")
    writer = make_writer(tmp_path, fs, buffered_records=10)
    for first in range(0, 30, 6):
        note(writer, *range(first, first + 6))
        with pytest.raises(StoreUnavailable, match="read-only"):
            writer.flush()
    assert writer.pending == 10


def test_a_full_segment_is_followed_by_the_next_and_the_oldest_go(tmp_path: Path) -> None:
    writer = make_writer(tmp_path, segment_bytes=3 * RECORD_BYTES, segments=4)
    for number in range(20):
        note(writer, number)
        writer.flush()
    assert numbers_of(records_of(tmp_path)) == list(range(12, 20))
    assert len(list((tmp_path / "journal").iterdir())) == 4


@pytest.mark.parametrize(("number", "segments"), [(errno.EIO, 2), (errno.EACCES, 2), (errno.ENOSPC, 1)])
def test_a_segment_that_fails_is_followed_by_the_next_unless_the_volume_is_full(
    tmp_path: Path, clock: Clock, number: int, segments: int
) -> None:
    fs = FailingFs(OSError(number, os.strerror(number)), when=lambda call, path: path.endswith(".00000000.kvj"))
    fs.is_failing = False
    writer = make_writer(tmp_path, fs, now=clock)
    note(writer, 0)
    writer.flush()
    for seconds in (5, 5, 11):
        # A short failure begins none.
        assert (len(list((tmp_path / "journal").iterdir())), writer.pending) == (1, 0)
        fs.is_failing = True
        note(writer, 1)
        with pytest.raises(StoreUnavailable):
            writer.flush()
        clock.seconds += seconds
        fs.is_failing = seconds > 10
        with contextlib.suppress(StoreUnavailable):
            writer.flush()
    assert (len(list((tmp_path / "journal").iterdir())), writer.pending) == (segments, 2 - segments)


SECOND_NS = 10**9


def written_ns(root: Path) -> int:
    return only_file(root).stat().st_mtime_ns


def test_a_process_that_has_nothing_to_say_renews_the_time_of_its_journal_now_and_then(
    tmp_path: Path, clock: Clock
) -> None:
    writer = make_writer(tmp_path, now=clock)
    note(writer, 1)
    writer.flush()
    content = only_file(tmp_path).read_bytes()
    os.utime(only_file(tmp_path), ns=(SECOND_NS, SECOND_NS))
    clock.seconds += 300
    writer.flush()
    assert written_ns(tmp_path) == SECOND_NS
    clock.seconds += 400
    writer.flush()
    assert written_ns(tmp_path) > SECOND_NS
    assert only_file(tmp_path).read_bytes() == content


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_process_that_may_store_nothing_shows_that_it_is_there(
    tmp_path: Path, clock: Clock, *, is_removed: bool
) -> None:
    writer = make_writer(tmp_path, now=clock)
    note(writer, 1)
    writer.show_life()
    assert only_file(tmp_path).stat().st_size == RECORD_BYTES
    os.utime(only_file(tmp_path), ns=(SECOND_NS, SECOND_NS))
    if is_removed:
        only_file(tmp_path).unlink()
    clock.seconds += 700
    writer.show_life()
    assert written_ns(tmp_path) > SECOND_NS
    assert writer.flush() == 1
    assert [record.key for record in records_of(tmp_path)] == [key(1)]


def test_a_volume_that_takes_no_sign_of_life_is_asked_now_and_then(tmp_path: Path, clock: Clock) -> None:
    calls: list[str] = []
    fs = FailingFs(OSError(errno.EROFS, os.strerror(errno.EROFS)), when=lambda call, _: not calls.append(call))
    writer = make_writer(tmp_path, fs, now=clock)
    for _ in range(10):
        writer.show_life()
        clock.seconds += 100
    assert calls.count("open") == 2
