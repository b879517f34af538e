# SPDX-License-Identifier: Apache-2.0
"""What a mount is called, and what is said of its options."""

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
from kvtier_connector.store.mounts import UNKNOWN, Mount, advice, mount_of

TABLE = r"""
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
45 27 0:39 / /mnt/gluster rw,relatime - fuse.glusterfs srv:/kv rw,user_id=0,max_read=131072
46 27 0:40 / /mnt/moose rw,nosuid - fuse mfs\04310.0.0.1:9421 rw,allow_other
47 27 0:41 / /mnt/nfs rw,noatime - nfs4 srv:/export rw,vers=4.2,rsize=65536,wsize=1048576,hard,nconnect=8
48 27 0:42 /sub /mnt/a\040b rw - ceph 10.0.0.1:/ rw,name=k
49 27 0:43 / /mnt/hidden rw - xfs /dev/vdb rw
50 27 0:44 / /mnt/hidden rw - lustre srv@tcp:/l rw,flock
broken line
"""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/mnt/gluster/ns.llama/aa", "GlusterFS"),
        ("/mnt/glusterx", "ext4"),
        ("/mnt/moose", "MooseFS"),
        ("/mnt/nfs/x", "NFS"),
        ("/mnt/a b/x", "CephFS"),
        ("/mnt/hidden/x", "Lustre"),
        ("/var/lib", "ext4"),
    ],
)
def test_a_file_system_is_called_by_its_name(path: str, name: str) -> None:
    assert mount_of(path, table=TABLE).name == name


def test_a_system_that_does_not_tell_has_an_unknown_file_system() -> None:
    assert mount_of("/mnt", table="") == UNKNOWN
    assert advice(UNKNOWN) == []


def test_this_machine_tells_of_its_own() -> None:
    assert mount_of("/proc/self").type == "proc"


@pytest.mark.parametrize(
    ("type_", "options", "words"),
    [
        ("nfs4", "noac,nconnect=4", ["noac"]),
        ("nfs4", "nocto,nconnect=4", ["nocto"]),
        ("nfs", "rsize=65536,wsize=1048576,nconnect=2", ["rsize of 1048576"]),
        ("nfs4", "rsize=1048576", ["nconnect"]),
        ("nfs4", "nconnect=2,lookupcache=none,sync", ["sync", "lookupcache"]),
        ("fuse.glusterfs", "max_read=131072", ["max_read is 131072"]),
        ("ext4", "rw", ["of one node"]),
        ("ceph", "rw", []),
    ],
)
def test_an_option_that_costs_speed_or_safety_is_named(type_: str, options: str, words: list[str]) -> None:
    found = advice(Mount(type_, "x", dict(part.partition("=")[::2] for part in options.split(","))))
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


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
