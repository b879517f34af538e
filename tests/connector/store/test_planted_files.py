# SPDX-License-Identifier: Apache-2.0
"""Blocks that are no file, since somebody put something else there, and files that were replaced on the server."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from planted import KINDS, plant
from store_contract import BLOCK_BYTES, key, pages, payload, read, stream

from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Stored
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import block_path


@pytest.mark.parametrize("direct", [False, None])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_under_a_blocks_name_is_a_fault_once_and_holds_nobody_up(
    root: Path, kind: str, *, direct: bool | None
) -> None:
    path = root / block_path(key(1))
    plant(kind, path)
    store = BlockStore(root, direct=direct)
    assert store.look_up(key(1)) is False
    outcome = store.get(key(1), pages())
    assert outcome is Fault.MAGIC
    assert store.get(key(1), pages()) == Miss()
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_under_a_blocks_name_is_replaced_by_a_block(root: Path, kind: str) -> None:
    plant(kind, root / block_path(key(1)))
    store = BlockStore(root)
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


class StaleFs(FileSystem):
    """The first calls of one kind say that the file was replaced on the server."""

    def __init__(self, call: str, times: int, *, unlinks: bool = False) -> None:
        self.left = times
        self._call = call
        self._unlinks = unlinks
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        if path.endswith(".kvb"):
            self._fail("open", path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._fail("preadv", self._paths[fd])
        return super().preadv(fd, buffers, offset)

    def _fail(self, call: str, path: str) -> None:
        if call == self._call and self.left:
            self.left -= 1
            if self._unlinks:
                Path(path).unlink()
            raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_was_replaced_on_the_server_is_opened_again(root: Path, call: str) -> None:
    BlockStore(root).put(key(1), payload(1))
    assert read(BlockStore(root, fs=StaleFs(call, 1)), key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))
    assert stream(BlockStore(root, fs=StaleFs(call, 1), direct=False), key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


def test_a_file_that_was_removed_on_the_server_is_a_miss(root: Path) -> None:
    BlockStore(root).put(key(1), payload(1))
    assert BlockStore(root, fs=StaleFs("preadv", 1, unlinks=True)).get(key(1), pages()) == Miss()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_stays_stale_is_a_volume_that_fails(root: Path, call: str) -> None:
    BlockStore(root).put(key(1), payload(1))
    fs = StaleFs(call, 100)
    assert BlockStore(root, fs=fs, direct=False).get(key(1), pages()) is Fault.IO
    # It is asked for once more, and not for ever.
    assert fs.left == 98
