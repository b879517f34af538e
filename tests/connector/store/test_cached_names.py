# SPDX-License-Identifier: Apache-2.0
"""Nodes that answer from caches what a name means; both were seen with real clients (`tests/connector/netfs`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_contract import BLOCK_BYTES, key, pages, payload, read

from kvtier_connector.store import reading
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import block_path
from kvtier_connector.store.mounts import Mount


class NfsClient(FileSystem):
    """Says of a name that was looked for in vain that it is not there, until the directory above is opened."""

    def __init__(self) -> None:
        self._absent: set[Path] = set()
        self.opened = 0

    def open(self, path: str, flags: int) -> int:
        self.opened += 1
        for each in (*reversed(Path(path).parents), Path(path)):
            if each in self._absent:
                raise FileNotFoundError(errno.ENOENT, "as last time", path)
            if not each.exists() and not flags & os.O_CREAT:
                self._absent.add(each)
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if Path(path).is_dir():
            self._absent = {each for each in self._absent if each.parent != Path(path)}
        return super().open(path, flags)


class FuseClient(FileSystem):
    """Opens the file that it has in mind, which the server has replaced, until it is asked anew about the name."""

    def __init__(self) -> None:
        self.is_stale = True

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_stale:
            raise OSError(errno.ESTALE, "stale")
        return super().preadv(fd, buffers, offset)

    def look_again(self, path: str) -> None:
        super().look_again(path)
        self.is_stale = False


def of_type(name: str) -> object:
    return lambda _: Mount(name, "server:/export", {})


@pytest.mark.parametrize("first", [(), (2,)], ids=["no directory yet", "another block in the directory"])
def test_a_block_that_was_looked_for_in_vain_is_read_once_another_node_has_stored_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Sequence[int]
) -> None:
    monkeypatch.setattr(reading, "mount_of", of_type("nfs4"))
    reader, writer = BlockStore(tmp_path, fs=NfsClient()), BlockStore(tmp_path)
    for number in first:
        writer.put(key(number), payload(number))
    assert reader.get(key(1), pages()) == Miss()
    writer.put(key(1), payload(1))
    assert read(reader, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


def test_a_miss_costs_one_call_where_names_come_from_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for kind in ("fuse.glusterfs", "nfs4"):
        monkeypatch.setattr(reading, "mount_of", of_type(kind))
        fs = NfsClient()
        reader = BlockStore(tmp_path, fs=fs, direct=False)
        assert reader.get(key(1), pages()) == Miss()
        counts.append(fs.opened)
    assert counts[0] == 1 < counts[1]


def test_a_file_that_was_replaced_on_the_server_is_asked_for_anew(tmp_path: Path) -> None:
    fs = FuseClient()
    BlockStore(tmp_path).put(key(1), payload(1))
    assert read(BlockStore(tmp_path, fs=fs, direct=False), key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


def test_to_look_again_changes_nothing_and_raises_nothing(tmp_path: Path) -> None:
    fs = FileSystem()
    BlockStore(tmp_path).put(key(1), payload(1))
    path = tmp_path / block_path(key(1))
    before = path.stat()
    fs.look_again(str(path))
    assert path.stat() == before
    fs.look_again(str(tmp_path / "nothing"))
