# SPDX-License-Identifier: Apache-2.0
"""Reading files in memory through a mapping answers as reading them does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import BlockKey, block_path

KEY = BlockKey(b"k" * 32, 0)
SIZE, TURNS = 3 << 20, 20


@pytest.fixture(params=["memory", "disk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)


def test_a_store_does_with_it_what_it_does_without(root: Path) -> None:
    payload = memoryview(bytearray(os.urandom(SIZE)))
    store, plain = BlockStore(root, fs=WorkerFileSystem()), BlockStore(root)
    read = memoryview(bytearray(SIZE))
    got = bytearray(SIZE)

    def take(offset: int, piece: memoryview) -> bool:
        got[offset : offset + piece.nbytes] = piece
        return True

    assert store.stream(KEY, read, take) == Miss()
    assert isinstance(store.put(KEY, payload), Stored)
    assert store.put(KEY, payload) == Present()
    assert isinstance(store.stream(KEY, read, take), Hit)
    assert got == payload
    path = root / block_path(KEY)
    os.truncate(path, SIZE // 2)
    assert store.stream(KEY, read, take) is Fault.TRUNCATED
    assert isinstance(plain.put(KEY, payload), Stored)


def test_a_file_without_bytes_that_is_longer_than_memory_is_a_fault_and_not_an_error(root: Path) -> None:
    store = BlockStore(root, fs=WorkerFileSystem())
    path = root / block_path(KEY)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(8 << 40)
    read = memoryview(bytearray(SIZE))
    assert store.stream(KEY, read, lambda _offset, _piece: True) is Fault.MAGIC
    assert store.stream(KEY, read, lambda _offset, _piece: True) == Miss()


@pytest.mark.parametrize("size", [1, 4095, 4096, 5000, SIZE])
def test_a_file_that_is_cut_short_is_the_same_fault(root: Path, size: int) -> None:
    plain = BlockStore(root)
    answers = []
    for fs in (LOCAL, WorkerFileSystem()):
        plain.put(KEY, memoryview(bytearray(SIZE)))
        os.truncate(root / block_path(KEY), size)
        answers.append(BlockStore(root, fs=fs).stream(KEY, memoryview(bytearray(SIZE)), lambda _offset, _piece: True))
    assert answers == [Fault.TRUNCATED] * 2


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_reader_that_takes_no_more_ends_the_read(root: Path, tmp_path: Path, is_encrypted: bool) -> None:
    keys_dir = tmp_path / "keys"
    keys_dir.mkdir()
    (keys_dir / "k").write_bytes(bytes(32))
    store = BlockStore(root, fs=WorkerFileSystem(), keys_dir=str(keys_dir) if is_encrypted else "")
    if store.keyring is not None:
        store.keyring.active_name = "k"
    payload = memoryview(bytearray(os.urandom(SIZE)))
    store.put(KEY, payload)
    taken = bytearray()

    def take(offset: int, piece: memoryview) -> bool:
        assert offset == len(taken)
        taken.extend(piece)
        return len(taken) < SIZE // 2

    assert store.stream(KEY, memoryview(bytearray(SIZE)), take) is None
    assert taken == payload[: len(taken)]
    assert SIZE // 2 <= len(taken) < SIZE


def test_neither_descriptor_nor_mapping_is_left(root: Path) -> None:
    store = BlockStore(root, fs=WorkerFileSystem())
    store.put(KEY, memoryview(bytearray(SIZE)))
    read = memoryview(bytearray(SIZE))
    before, mappings = len(list(Path("/proc/self/fd").iterdir())), mapped(root)
    for _ in range(TURNS):
        assert isinstance(store.stream(KEY, read, lambda _offset, _piece: True), Hit)
    # Other threads of this process may open some meanwhile; a leak would be one in each turn.
    assert len(list(Path("/proc/self/fd").iterdir())) - before < TURNS
    assert mapped(root) == mappings


def mapped(root: Path) -> int:
    return sum(str(root) in line for line in Path("/proc/self/maps").read_text().splitlines())
