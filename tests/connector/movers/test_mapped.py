# SPDX-License-Identifier: Apache-2.0
"""Reading files in memory through a mapping answers as reading them does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_connector.movers.mapped import MappingFs
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored
from kvtier_connector.store.format import Fault
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.layout import BlockKey, block_path

KEY = BlockKey(b"k" * 32, 0)
SIZE = 3 << 20


@pytest.fixture(params=["memory", "disk"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
@pytest.mark.parametrize("offset", [0, 4095, 99_999, 200_000])
def test_the_same_bytes_come_as_from_the_system(root: Path, size: int, offset: int) -> None:
    path = root / "file"
    path.write_bytes(os.urandom(size))
    answers = []
    for fs in (LOCAL, MappingFs()):
        buffers = [memoryview(bytearray(4096)), memoryview(bytearray(70_001))]
        fd = fs.open(str(path), os.O_RDONLY)
        answers.append((fs.preadv(fd, buffers, offset), [bytes(buffer) for buffer in buffers]))
        fs.close(fd)
    assert answers[0] == answers[1]


def test_a_store_does_with_it_what_it_does_without(root: Path) -> None:
    payload = memoryview(bytearray(os.urandom(SIZE)))
    store, plain = BlockStore(root, fs=MappingFs()), BlockStore(root)
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
    store = BlockStore(root, fs=MappingFs())
    path = root / block_path(KEY)
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(8 << 40)
    read = memoryview(bytearray(SIZE))
    assert store.stream(KEY, read, lambda _offset, _piece: True) is Fault.MAGIC
    assert store.stream(KEY, read, lambda _offset, _piece: True) == Miss()


def test_no_descriptor_is_left_open(root: Path) -> None:
    fs = MappingFs()
    (root / "file").write_bytes(b"x" * 5000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        fs.close(fs.open(str(root / "file"), os.O_RDONLY))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(FileNotFoundError):
        fs.open(str(root / "nothing"), os.O_RDONLY)
