# SPDX-License-Identifier: Apache-2.0
"""The bytes of a block file: round trips, every kind of damage, and a file frozen at the first release."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from checks import check
from hypothesis import given
from hypothesis import strategies as st
from store_contract import HOME, NOW_NS, key, pages, payload, read, stream, whole_file, write_block

from kvtier_connector.contract.engine import GENERATION_PATTERN, KEY_ID_PATTERN, TENANT_PATTERN
from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.header import (
    DEFAULT_ALGORITHM,
    HEADER_BYTES,
    NOT_PACKED,
    WIDTHS,
    Algorithm,
    Encryption,
    Fault,
    Header,
    Method,
    Packing,
    Seal,
    checksum,
    decode_header,
    encode_header,
    new_hasher,
)
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import ALIGNMENT, MAX_GROUP, QUARANTINE, BlockKey, Home, Lineage, block_path

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
DATA = Path(__file__).parents[1] / "data"
FORMAT_MD = Path(__file__).parents[3] / "connector" / "FORMAT.md"

u32 = st.integers(0, 2**32 - 1)
positions = st.integers(0, 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
hashes = st.binary(min_size=3, max_size=32)
tenants = st.just("") | st.from_regex(TENANT_PATTERN, fullmatch=True)
keys = st.builds(BlockKey, hashes, st.integers(0, MAX_GROUP), tenants)
adapters = st.just("") | st.from_regex("[0-9a-f]{32}", fullmatch=True)
lineages = st.builds(Lineage, st.just(b"") | hashes, positions, adapters)
homes = st.builds(
    Home,
    st.from_regex(GENERATION_PATTERN, fullmatch=True),
    st.just("") | st.from_regex("[a-z0-9]{1,32}", fullmatch=True),
)
packings = st.just(NOT_PACKED) | st.builds(
    Packing,
    method=st.just(Method.ZSTD_PLANES),
    block_bytes=st.integers(2**61, 2**62 - 1).map(lambda quarter: 4 * quarter),
    width=st.sampled_from(WIDTHS),
)
common = st.fixed_dictionaries(
    {
        "key": keys,
        "payload_bytes": st.integers(1, 2**64 - 1),
        "created_ns": u64,
        "home": homes,
        "lineage": lineages,
        "packing": packings,
    }
)
clear_headers = st.builds(
    lambda fields, digest, algorithm: Header(**fields, checksum=digest, algorithm=algorithm),
    common,
    st.binary(min_size=32, max_size=32),
    st.sampled_from([Algorithm.BLAKE3_256, Algorithm.AES_GMAC]),
)
encrypted_headers = st.builds(
    lambda fields, tag, seal: Header(
        **fields,
        checksum=tag + bytes(16),
        algorithm=Algorithm.NONE,
        encryption=Encryption.AES_256_GCM,
        seal=Seal(*seal),
    ),
    common,
    st.binary(min_size=16, max_size=16),
    st.tuples(
        st.from_regex(KEY_ID_PATTERN, fullmatch=True),
        st.binary(min_size=8, max_size=8),
        st.binary(min_size=12, max_size=12),
    ),
)
headers = (clear_headers | encrypted_headers).filter(
    # A compressed payload is shorter than its block.
    lambda header: header.packing == NOT_PACKED or header.payload_bytes < header.packing.block_bytes
)


def table() -> list[tuple[int, int, str]]:
    """Return offset, length and name of each field as FORMAT.md has them."""
    section = FORMAT_MD.read_text().partition("## A block file")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([a-z ]+) \|", section, re.MULTILINE)
    return [(int(offset), int(size), name) for offset, size, name in rows]


FIELDS = table()


def forge(changes: dict[str, int], of: Header) -> bytes:
    """Return a header with other numbers in it and a header checksum that agrees with them."""
    page = bytearray(encode_header(of))
    for name, value in changes.items():
        offset, size = {name: (offset, size) for offset, size, name in FIELDS}[name]
        page[offset : offset + size] = value.to_bytes(size, "little")
    page[-4:] = struct.pack("<I", zlib.crc32(page[:-4]))
    return bytes(page)


def as_number(text: str) -> int:
    return int.from_bytes(text.encode(), "little")


SOUND = Header(key(1), 4096, bytes(range(32)), NOW_NS, HOME)


@given(headers)
def test_a_header_comes_back_as_it_was(header: Header) -> None:
    page = encode_header(header)
    assert len(page) == HEADER_BYTES == ALIGNMENT
    assert decode_header(page) == header
    assert decode_header(memoryview(bytearray(page + b"payload"))) == header


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_noticed(header: Header, bit: int) -> None:
    page = bytearray(encode_header(header))
    page[bit // 8] ^= 1 << bit % 8
    assert decode_header(page) in {Fault.MAGIC, Fault.HEADER}


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_any_bytes_are_a_header_or_a_fault(data: bytes) -> None:
    assert isinstance(decode_header(data), Header | Fault)


@given(st.dictionaries(st.sampled_from(["flags", "encryption", "group", "hash length", "payload length"]), u32))
def test_any_numbers_under_a_right_checksum_are_a_header_or_a_fault(changes: dict[str, int]) -> None:
    decoded = decode_header(forge(changes, SOUND))
    assert isinstance(decoded, Fault) or encode_header(decoded) == forge(changes, SOUND)


@pytest.mark.parametrize(("changes", "fault"), TABLES["intact_headers"], ids=str)
def test_an_intact_header_that_says_something_else_has_its_own_fault(changes: dict[str, int | str], fault: str) -> None:
    numbers = {name: value if isinstance(value, int) else as_number(value) for name, value in changes.items()}
    assert decode_header(forge(numbers, SOUND)) is Fault[fault]


def test_reserved_bytes_are_not_looked_at_and_what_is_no_checksum_cannot_be_computed() -> None:
    assert decode_header(forge({"reserved": 12345}, SOUND)) == SOUND
    for algorithm in (Algorithm.NONE, 7):
        with pytest.raises(ValueError, match="cannot be computed here"):
            new_hasher(algorithm)


PARTS: dict[str, Callable[..., object]] = {
    "key": lambda length, *rest: BlockKey(bytes(length), *rest),
    "lineage": lambda length, *rest: Lineage(bytes(length), *rest),
    "home": Home,
    "seal": Seal,
    "packing": Packing,
}


@pytest.mark.parametrize(("field", "value"), TABLES["unreadable_headers"], ids=str)
def test_a_header_that_nobody_could_read_is_not_written(field: str, value: Any) -> None:
    header = SOUND._replace(**{field: PARTS[field](*value) if field in PARTS else value})
    with pytest.raises(ValueError, match="Header"):
        encode_header(header)


def test_every_fault_says_what_it_means() -> None:
    harmless = {"VERSION", "LENGTH", "ALGORITHM", "KEY_MISSING", "KEY_WRONG", "CLEAR", "IO"}
    assert {fault.name for fault in Fault if not fault.is_damage} == harmless
    named = re.findall(r"^\| `([a-z_]+)` \|.*\| (is moved|stays) \|$", FORMAT_MD.read_text(), re.MULTILINE)
    assert dict(named) == {fault.value: "is moved" if fault.is_damage else "stays" for fault in Fault}


def test_the_documented_fields_are_those_of_the_header() -> None:
    ends = [offset + size for offset, size, _ in FIELDS]
    assert [offset for offset, _, _ in FIELDS] == [0, *ends[:-1]]
    assert ends[-1] == HEADER_BYTES
    header = Header(
        BlockKey(bytes(range(1, 33)), 7, "acme"),
        1 << 40,
        bytes(range(100, 116)) + bytes(16),
        NOW_NS,
        Home("0123456789abcdef", "e1"),
        Lineage(bytes(range(50, 82)), 9, "ab" * 16),
        Algorithm.NONE,
        Encryption.AES_256_GCM,
        Seal("k1", b"8 bytes.", b"twelve bytes"),
        Packing(Method.ZSTD_PLANES, 1 << 41, 2),
    )
    page = encode_header(header)
    found = {name: page[offset : offset + size] for offset, size, name in FIELDS}
    numbers = {"header length": HEADER_BYTES, "created": NOW_NS, "header checksum": zlib.crc32(page[:-4])}
    numbers |= TABLES["numbers"]
    assert {name: int.from_bytes(found[name], "little") for name in numbers} == numbers
    assert found["magic"] == b"KVTB"
    assert found["hash"] == header.key.hash
    assert found["parent hash"] == header.lineage.parent
    assert found["tenant"] == b"acme" + bytes(28)
    assert found["key id"] == b"k1" + bytes(62)
    assert found["key check"] == b"8 bytes."
    assert found["nonce"] == b"twelve bytes"
    assert found["generation"] == b"0123456789abcdef" + bytes(48)
    assert found["epoch"] == b"e1" + bytes(30)
    assert found["adapter"] == b"ab" * 16
    assert found["checksum"] == header.checksum


FROZEN_KEY = BlockKey(bytes(range(32)), 3, "acme")
FROZEN_LINEAGE = Lineage(bytes(range(32, 64)), 5, "0123456789abcdef" * 2)
FROZEN_DATA = bytes(index * 7 % 256 for index in range(8192))
FROZEN_NS = 1_763_683_200_000_000_000
FROZEN = {Algorithm.BLAKE3_256: "block_v4_blake3.kvb", Algorithm.AES_GMAC: "block_v4_gmac.kvb"}


@pytest.mark.parametrize("algorithm", FROZEN)
def test_a_block_that_was_frozen_is_still_read(root: Path, algorithm: Algorithm) -> None:
    frozen = (DATA / FROZEN[algorithm]).read_bytes()
    digest = checksum(memoryview(FROZEN_DATA), algorithm)
    assert decode_header(frozen) == Header(FROZEN_KEY, 8192, digest, FROZEN_NS, HOME, FROZEN_LINEAGE, algorithm)
    assert frozen[HEADER_BYTES:] == FROZEN_DATA
    write_block(root, FROZEN_KEY, frozen)
    assert read(BlockStore(root), FROZEN_KEY, 8192) == (Hit(HEADER_BYTES + 8192), FROZEN_DATA)


def test_the_writer_still_makes_the_frozen_bytes(root: Path) -> None:
    store = BlockStore(root, clock=lambda: FROZEN_NS)
    store.put(FROZEN_KEY, memoryview(FROZEN_DATA), FROZEN_LINEAGE)
    assert (root / block_path(FROZEN_KEY)).read_bytes() == (DATA / FROZEN[DEFAULT_ALGORITHM]).read_bytes()


GOOD = whole_file(key(1), payload(1, 8192))

DAMAGES = {
    **{
        f"a flipped bit in the {name}": (GOOD[:offset] + bytes([GOOD[offset] ^ 4]) + GOOD[offset + 1 :], fault)
        for offset, _, name in FIELDS
        for fault in [Fault.MAGIC if name == "magic" else Fault.HEADER]
    },
    "a flipped bit at the start of the payload": (GOOD[:4096] + bytes([GOOD[4096] ^ 1]) + GOOD[4097:], Fault.CHECKSUM),
    "a flipped bit at the end of the payload": (GOOD[:-1] + bytes([GOOD[-1] ^ 128]), Fault.CHECKSUM),
    "a zero-filled payload": (GOOD[:4096] + bytes(8192), Fault.CHECKSUM),
    "a zero-filled file": (bytes(len(GOOD)), Fault.MAGIC),
    **{name: (GOOD[:length], Fault[fault]) for name, (length, fault) in TABLES["cut_to"].items()},
    "a byte more": (GOOD + b"x", Fault.TRAILING),
    "a page more": (GOOD + bytes(4096), Fault.TRAILING),
    "another block": (whole_file(key(2), payload(1, 8192)), Fault.KEY),
    "another tenant": (whole_file(key(1)._replace(tenant="acme"), payload(1, 8192)), Fault.KEY),
    "another generation": (whole_file(key(1), payload(1, 8192), Home("d2gest")), Fault.GENERATION),
    "other weights": (whole_file(key(1), payload(1, 8192), Home("d1gest", "e1")), Fault.GENERATION),
    "another group": (whole_file(key(1, group=1), payload(1, 8192)), Fault.KEY),
    "a longer block cut to our length": (whole_file(key(1), payload(1, 16384))[: len(GOOD)], Fault.TRUNCATED),
}


@pytest.mark.parametrize("way", ["get", "get direct", "stream", "stream of a worker"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_never_served_and_is_moved_away(tmp_path: Path, damage: str, way: str) -> None:
    content, fault = DAMAGES[damage]
    root = tmp_path / "d1gest"
    claim(root, {}, "d1gest")
    write_block(root, key(1), content)
    assert [problem.kind for problem in check(root)] == [fault.value]
    fs = WorkerFileSystem() if way == "stream of a worker" else LOCAL
    store = BlockStore(root, fs=fs, direct=None if way == "get direct" else False)
    assert [(stream if "stream" in way else read)(store, key(1), 8192)[0] for _ in range(2)] == [fault, Miss()]
    assert [moved.read_bytes() for moved in (root / QUARANTINE).iterdir()] == [content]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (forge({"format version": 5}, SOUND) + bytes(4096), Fault.VERSION),
        (forge({"checksum algorithm": 9}, SOUND) + bytes(4096), Fault.ALGORITHM),
        (whole_file(key(1), payload(1, 8192)), Fault.LENGTH),
    ],
)
def test_a_file_that_another_reader_may_understand_stays(tmp_path: Path, content: bytes, fault: Fault) -> None:
    root = tmp_path / "d1gest"
    path = write_block(root, key(1), content)
    assert BlockStore(root).get(key(1), pages(size=4096)) is fault
    assert path.read_bytes() == content


@pytest.mark.parametrize("algorithm", [Algorithm.BLAKE3_256, Algorithm.AES_GMAC])
@given(cuts=st.lists(st.integers(0, len(FROZEN_DATA)), max_size=6))
def test_the_pieces_do_not_matter(algorithm: Algorithm, cuts: list[int]) -> None:
    hasher = new_hasher(algorithm)
    for start, end in itertools.pairwise([0, *sorted(cuts), len(FROZEN_DATA)]):
        hasher.update(memoryview(FROZEN_DATA)[start:end])
    assert hasher.digest() == checksum(memoryview(FROZEN_DATA), algorithm)


WITHOUT = TABLES["without"]


def test_without_the_library_blocks_are_written_with_the_other_checksum_and_never_in_clear(tmp_path: Path) -> None:
    assert DEFAULT_ALGORITHM is Algorithm.AES_GMAC
    subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "d1gest"), str(DATA)], check=True)
