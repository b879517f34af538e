# SPDX-License-Identifier: Apache-2.0
"""Compressed blocks: what was stored comes back bit by bit, in fewer bytes, and nothing else does."""

from __future__ import annotations

import functools
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from checks import check
from hypothesis import given, settings
from hypothesis import strategies as st
from store_contract import HOME, NOW_NS, header_of, key, pages, read, stream, write_block

from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.janitor import commands
from kvtier_connector.store import compression as codec
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored
from kvtier_connector.store.compression import PIECE_BYTES, Codec, pays
from kvtier_connector.store.fs import LOCAL, PROFILE_FILE, FileSystem
from kvtier_connector.store.header import (
    HEADER_BYTES,
    WIDTHS,
    Fault,
    Header,
    Method,
    Packing,
    checksum,
    encode_header,
)
from kvtier_connector.store.layout import block_path

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

SIZE = PIECE_BYTES + 12288
MIB = 1 << 20


@functools.cache
def draw_numbers(seed: int, size: int) -> bytes:
    draw = random.Random(seed)
    values = struct.pack(f"<{size // 2}f", *(draw.gauss(0, 1.5) for _ in range(size // 2)))
    content = bytearray(size)
    content[0::2], content[1::2] = values[2::4], values[3::4]
    return bytes(content)


def numbers(seed: int, size: int = SIZE) -> memoryview:
    """Return bfloat16 as a cache has them: their exponents differ by little, their mantissas are noise."""
    return pages(draw_numbers(seed, size), size)


def noise(seed: int, size: int = SIZE) -> memoryview:
    return pages(random.Random(seed).randbytes(size), size)


def make(
    root: Path,
    compression: str = "Always",
    *,
    keys_dir: Path | None = None,
    direct: bool | None = False,
    fs: FileSystem = LOCAL,
) -> BlockStore:
    store = BlockStore(root, direct=direct, fs=fs, compression=compression, keys_dir=str(keys_dir or ""))
    if store.keyring is not None:
        store.keyring.active_name = "k1"
    return store


Reader = Callable[..., tuple[object, bytes]]
READS: list[Reader] = [read, stream]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize(
    ("direct", "fs"), [(False, LOCAL), (None, LOCAL), (False, WorkerFileSystem())], ids=["cached", "direct", "mapped"]
)
def test_a_compressed_block_comes_back_as_it_was(  # noqa: PLR0913, PLR0917 - what is combined
    root: Path, keys_dir: Path, read: Reader, is_encrypted: bool, direct: bool | None, fs: FileSystem
) -> None:
    keys = keys_dir if is_encrypted else None
    block = numbers(1)
    stored = make(root, keys_dir=keys, direct=direct, fs=fs).put(key(1), block)
    assert block == numbers(1), "what was given is not changed"
    size = (root / block_path(key(1))).stat().st_size
    assert stored == Stored(size)
    assert size < HEADER_BYTES + 0.8 * SIZE
    # Whoever writes none reads them all the same.
    assert read(make(root, "Off", keys_dir=keys, direct=direct, fs=fs), key(1), SIZE) == (Hit(size), bytes(block))
    assert check(root) == []


@pytest.mark.parametrize("read", READS)
def test_a_block_that_gets_no_smaller_is_written_as_is(root: Path, read: Reader) -> None:
    store = make(root)
    assert store.put(key(1), noise(1)) == Stored(HEADER_BYTES + SIZE)
    assert header_of(root, key(1)).flags == 0
    assert read(store, key(1), SIZE) == (Hit(HEADER_BYTES + SIZE), bytes(noise(1)))


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=0, max_size=4096), st.integers(1, 300_000), st.sampled_from(WIDTHS))
def test_whatever_is_packed_unpacks_to_the_same(pattern: bytes, size: int, width: int) -> None:
    size -= size % -width or 0
    size = max(width, size - size % width)
    block = (pattern * (size // max(1, len(pattern)) + 1) + bytes(size))[:size]
    into, taken = bytearray(size), bytearray(size)
    here = Codec()
    length = here.pack(memoryview(block), memoryview(into), width)
    if not length:
        return

    def take(offset: int, piece: memoryview) -> bool:
        taken[offset : offset + piece.nbytes] = piece
        return True

    assert here.unpack(memoryview(into)[:length], size, width, take) is True
    assert taken == block


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bytes_that_are_no_packed_block_are_refused_or_make_no_byte_too_many(data: st.DataObject) -> None:
    here = Codec()
    block = bytes(numbers(1, 65536))
    into = bytearray(len(block))
    length = here.pack(memoryview(block), memoryview(into), 2)
    packed = into[:length]
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, 63) | st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    claimed = data.draw(st.sampled_from([len(block), len(block) - 2, 2, PIECE_BYTES, 16 * PIECE_BYTES]))
    made = []

    def take(offset: int, piece: memoryview) -> bool:
        made.append((offset, piece.nbytes))
        return True

    here.unpack(memoryview(packed), claimed, data.draw(st.sampled_from(WIDTHS)), take)
    assert all(offset + size <= claimed for offset, size in made)


def plant(root: Path, number: int, packed: bytes, packing: Packing) -> None:
    """Write a file whose checksum is right, as somebody might who can write to the volume."""
    header = Header(key(number), len(packed), checksum(memoryview(packed)), NOW_NS, HOME, packing=packing)
    write_block(root, key(number), encode_header(header) + packed)


def bomb(planes: bytes, block_bytes: int) -> bytes:
    """Return a payload whose only plane decompresses to much more than the block has."""
    into = bytearray(len(planes))
    length = Codec().pack(memoryview(planes), memoryview(into), 1)
    (frame_bytes,) = struct.unpack_from("<I", into)
    assert 0 < frame_bytes < length <= block_bytes
    return bytes(into[:length])


@pytest.mark.parametrize("read", READS)
def test_a_payload_that_grows_beyond_the_block_is_damage(unchecked_root: Path, read: Reader) -> None:
    plant(unchecked_root, 1, bomb(bytes(PIECE_BYTES), 65536), Packing(Method.ZSTD_PLANES, 65536, 1))
    outcome, _ = read(make(unchecked_root), key(1), 65536)
    assert outcome is Fault.PACKING
    assert read(make(unchecked_root), key(1), 65536)[0] == Miss()


@pytest.mark.parametrize("block_bytes", [65536 - 4096, 65536 + 4096, 1 << 40])
def test_a_block_of_another_length_is_never_unpacked(root: Path, block_bytes: int) -> None:
    plant(root, 1, bomb(bytes(PIECE_BYTES), 65536), Packing(Method.ZSTD_PLANES, block_bytes, 2))
    assert read(make(root), key(1), 65536)[0] is Fault.LENGTH


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_flip_is_noticed(unchecked_root: Path, keys_dir: Path, read: Reader, is_encrypted: bool) -> None:
    store = make(unchecked_root, keys_dir=keys_dir if is_encrypted else None)
    draw = random.Random(7)
    for _ in range(20):
        store.put(key(1), numbers(1))
        path = unchecked_root / block_path(key(1))
        content = bytearray(path.read_bytes())
        place = draw.choice([draw.randrange(412), draw.randrange(HEADER_BYTES, len(content))])
        content[place] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        assert isinstance(read(store, key(1), SIZE)[0], Fault)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kept", [0, 100, HEADER_BYTES, HEADER_BYTES + 5000, -1, -4096])
def test_a_file_that_was_cut_short_is_damage(unchecked_root: Path, kept: int, read: Reader) -> None:
    store = make(unchecked_root)
    store.put(key(1), numbers(1))
    path = unchecked_root / block_path(key(1))
    path.write_bytes(path.read_bytes()[: kept if kept >= 0 else len(path.read_bytes()) + kept])
    assert read(store, key(1), SIZE)[0] in {Fault.TRUNCATED, Fault.EMPTY}


@pytest.mark.parametrize("read", READS)
def test_who_cannot_decompress_misses_the_block_leaves_it_and_may_write_it_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch, read: Reader
) -> None:
    make(root).put(key(1), numbers(1))
    monkeypatch.setattr(codec, "_library", lambda: None)
    store = make(root)
    assert read(store, key(1), SIZE)[0] is Fault.ALGORITHM
    assert header_of(root, key(1)).packing.method == Method.ZSTD_PLANES
    assert store.put(key(1), numbers(1)) == Stored(HEADER_BYTES + SIZE)
    assert read(store, key(1), SIZE) == (Hit(HEADER_BYTES + SIZE), bytes(numbers(1)))


@pytest.mark.parametrize(("before", "after"), [("Always", "Off"), ("Off", "Always")])
def test_a_block_that_is_there_in_either_form_is_not_written_again(root: Path, before: str, after: str) -> None:
    make(root, before).put(key(1), numbers(1))
    assert make(root, after).put(key(1), numbers(1)) == Present()


def test_a_check_says_how_many_blocks_are_compressed_and_what_that_saves(root: Path) -> None:
    make(root).put(key(1), numbers(1))
    make(root).put(key(2), noise(2))
    document = commands.check(root, lambda *_: None).document
    saved = HEADER_BYTES + SIZE - (root / block_path(key(1))).stat().st_size
    assert (document["blocks"], document["compressed"], document["savedBytes"]) == (2, 1, saved)
    assert document["problems"] == []


@pytest.mark.parametrize(("change", "is_worth_it"), TABLES["worth"])
def test_blocks_are_compressed_where_loads_gain_and_no_store_loses(change: dict[str, float], is_worth_it: bool) -> None:
    rates = {
        "ratio": 0.7, "pack_rate": 1e9, "unpack_rate": 1.5e9, "read_rate": 0.5e9, "write_rate": 0.3e9, "processors": 4,
    } | change  # fmt: skip
    assert pays(**rates) is is_worth_it  # type: ignore[arg-type]  # one number stands for a whole one


@pytest.mark.parametrize(("choices", "is_compressed"), TABLES["auto"].values(), ids=TABLES["auto"])
def test_auto_follows_what_was_measured_of_it(root: Path, choices: dict[str, object], is_compressed: bool) -> None:
    (root.parent / PROFILE_FILE).write_text(json.dumps(choices))
    make(root, "Auto").put(key(1), numbers(1))
    assert (header_of(root, key(1)).packing.method == Method.ZSTD_PLANES) is is_compressed


FROZEN = Path(__file__).parents[1] / "data" / "block_v4_zstd.kvb"
FROZEN_BLOCK = bytes(index * 7 % 256 if index % 2 == 0 else 60 + index % 3 for index in range(16384))


@pytest.mark.parametrize("read", READS)
def test_a_compressed_block_that_was_frozen_is_still_read(root: Path, read: Reader) -> None:
    write_block(root, key(1), FROZEN.read_bytes())
    assert read(make(root), key(1), len(FROZEN_BLOCK)) == (Hit(FROZEN.stat().st_size), FROZEN_BLOCK)
