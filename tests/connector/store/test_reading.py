# SPDX-License-Identifier: Apache-2.0
"""Blocks are verified on the way, through a small buffer or with one large request."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from store_contract import key, pages, payload
from store_faults import NotingFs, ShortFs

from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Outcome
from kvtier_connector.store.fs import LOCAL, DirectIo, FileSystem
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.layout import QUARANTINE, BlockKey, block_path
from kvtier_connector.store.reading import PIECE_BYTES

SIZE = 3 * PIECE_BYTES - 4096


class Taker:
    def __init__(self, *, most: int = 1 << 30) -> None:
        self.got = bytearray(SIZE)
        self.pieces = 0
        self._most = most

    def __call__(self, offset: int, piece: memoryview) -> bool:
        if self.pieces == self._most:
            return False
        self.pieces += 1
        self.got[offset : offset + piece.nbytes] = piece
        return True


def stream(root: Path, of: BlockKey, taker: Taker, *, fs: FileSystem = LOCAL, direct: bool = False) -> Outcome | None:
    return BlockStore(root, fs=fs, direct=direct).stream(of, pages(size=SIZE), taker)


@pytest.mark.parametrize(("direct", "reads"), [(False, 3), (True, 1)])
def test_a_large_block_is_read_in_pieces_through_the_page_cache_only(
    tmp_path: Path, *, direct: bool, reads: int
) -> None:
    if direct and not DirectIo(LOCAL, str(tmp_path), direct=None).is_supported():
        pytest.skip("the temporary directory does not take O_DIRECT")
    fs = NotingFs()
    store = BlockStore(tmp_path, fs=fs, direct=direct)
    store.put(key(1), payload(1, SIZE))
    fs.calls.clear()
    taker = Taker()
    assert store.stream(key(1), pages(size=SIZE), taker) == Hit(HEADER_BYTES + SIZE)
    assert taker.got == payload(1, SIZE)
    assert fs.calls == ["open", *["preadv"] * reads, "fstat", "close"]


@pytest.mark.parametrize("fs", [LOCAL, ShortFs(3001), ShortFs(300_000)], ids=["whole", "tiny", "short"])
def test_the_pieces_make_up_the_block(tmp_path: Path, fs: FileSystem) -> None:
    BlockStore(tmp_path, direct=False).put(key(1), payload(1, SIZE))
    taker = Taker()

    assert isinstance(stream(tmp_path, key(1), taker, fs=fs), Hit)
    assert taker.got == payload(1, SIZE)


def test_only_a_piece_of_the_buffer_is_used(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, direct=False)
    store.put(key(1), payload(1, SIZE))
    buffer = pages(size=SIZE)
    store.stream(key(1), buffer, Taker())

    assert bytes(buffer[PIECE_BYTES:]) == bytes(SIZE - PIECE_BYTES)


def test_whoever_takes_no_more_ends_the_read_and_the_block_stays(tmp_path: Path) -> None:
    BlockStore(tmp_path, direct=False).put(key(1), payload(1, SIZE))
    assert stream(tmp_path, key(1), Taker(most=1)) is None
    assert isinstance(stream(tmp_path, key(1), Taker()), Hit)


def test_a_block_of_another_key_or_length_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, direct=False)
    store.put(key(1), payload(1, SIZE))
    store.put(key(2), payload(2, SIZE + 4096))
    (tmp_path / block_path(key(3))).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / block_path(key(1))).rename(tmp_path / block_path(key(3)))
    taker = Taker()

    assert stream(tmp_path, key(3), taker) is Fault.KEY
    assert stream(tmp_path, key(2), taker) is Fault.LENGTH
    assert taker.pieces == 0


def test_a_file_system_in_memory_is_read_in_pieces() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        assert not DirectIo(LOCAL, directory, direct=None).is_supported()
        assert DirectIo(LOCAL, directory, direct=True).is_supported()


def test_a_block_whose_header_is_wrong_is_not_read_to_its_end(tmp_path: Path) -> None:
    BlockStore(tmp_path).put(key(1), payload(1, SIZE))
    with (tmp_path / block_path(key(1))).open("r+b") as file:
        file.write(b"what")
    fs = NotingFs()
    assert stream(tmp_path, key(1), Taker(), fs=fs) is Fault.MAGIC
    assert fs.calls.count("preadv") == 1


@pytest.mark.parametrize("appended", [1, 4096])
@pytest.mark.parametrize("way", ["get", "get direct", "stream", "stream mapped"])
def test_a_block_with_bytes_appended_is_a_fault_and_is_moved_away(tmp_path: Path, way: str, appended: int) -> None:
    fs = WorkerFileSystem() if way == "stream mapped" else LOCAL
    store = BlockStore(tmp_path, fs=fs, direct=None if way == "get direct" else False)
    store.put(key(1), payload(1))
    with (tmp_path / block_path(key(1))).open("ab") as file:
        file.write(bytes(appended))

    def read() -> object:
        if way.startswith("get"):
            return store.get(key(1), pages())
        return store.stream(key(1), pages(), lambda _offset, _piece: True)

    assert read() is Fault.TRAILING
    assert read() == Miss()
    assert [path.name.split(".")[2] for path in (tmp_path / QUARANTINE).iterdir()] == ["trailing"]
