# SPDX-License-Identifier: Apache-2.0
"""What a mount is called, and what is said of its options."""

from __future__ import annotations

import pytest

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
