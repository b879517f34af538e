# SPDX-License-Identifier: Apache-2.0
"""The mount that holds a path, as the kernel describes it in /proc/self/mountinfo; no call to a volume, which may hang.

Trying a volume decides whether it can be used, never the name of its file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_NAMES: Final = {
    "nfs": "NFS",
    "nfs4": "NFS",
    "lustre": "Lustre",
    "ceph": "CephFS",
    "fuse.ceph": "CephFS",
    "fuse.ceph-fuse": "CephFS",
    "fuse.glusterfs": "GlusterFS",
    "gpfs": "GPFS",
    "fuse.juicefs": "JuiceFS",
    "wekafs": "Weka",
    "beegfs": "BeeGFS",
    "cifs": "SMB",
    "smb3": "SMB",
}
_SOURCES: Final = {"mfs#": "MooseFS", "JuiceFS:": "JuiceFS"}
"""Names by the source of a mount, for those whose type is only FUSE."""
_OF_ONE_NODE: Final = frozenset({"ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs"})
_LARGE_BYTES: Final = 1 << 20
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_LEFT_FIELDS: Final = 6
_RIGHT_FIELDS: Final = 3
"""Fewest fields of a line, on either side of its dash."""


class Mount(NamedTuple):
    """One mount."""

    type: str
    source: str
    options: dict[str, str]
    """Options of the mount and of the file system; an option without a value has an empty one."""
    point: str = ""
    device: str = ""

    @property
    def name(self) -> str:
        """The usual name of the file system."""
        if self.type in _NAMES:
            return _NAMES[self.type]
        found = (name for start, name in _SOURCES.items() if self.source.startswith(start))
        return next(found, self.type) if self.type.startswith("fuse") else self.type

    @property
    def is_nfs(self) -> bool:
        """Whether the times of a directory come from a cache unless it is opened."""
        return self.name == "NFS"

    @property
    def is_end_written_first(self) -> bool:
        """Whether a new file gets its full length first.

        MooseFS's servers hold blocks of 64 KiB. When a write lengthens a file by less, its kernel waits until all
        earlier writes are on the disk, which takes as long as the file.
        """
        return self.name == "MooseFS"


UNKNOWN = Mount("unknown", "", {})


def mount_of(path: str, *, table: str | None = None) -> Mount:
    """Return the mount of an absolute path, which need not exist; else `UNKNOWN`. `table` replaces the kernel's."""
    found = UNKNOWN
    for mount in _mounts(_mount_table() if table is None else table):
        # A later mount on the same place hides an earlier one.
        if f"{path}/".startswith(f"{mount.point}/") and len(mount.point) >= len(found.point):
            found = mount
    return found


def is_in_memory(device: int) -> bool:
    """Return whether the files of a device, by its number, lie in memory; False where the system does not tell."""
    numbers = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.device == numbers and mount.type in {"tmpfs", "ramfs"} for mount in _mounts(_mount_table()))


def _mount_table() -> str:
    try:
        return Path("/proc/self/mountinfo").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _mounts(table: str) -> Iterator[Mount]:
    # Other white space than these two the kernel does not escape in names.
    for line in table.split("\n"):
        # number, parent, device, root, mount point, options, more of them, "-", type, source, options
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) >= _LEFT_FIELDS and len(rest) >= _RIGHT_FIELDS:
            options = (part.partition("=") for part in f"{rest[2]},{fields[5]}".split(","))
            named = {name: value for name, _, value in options}
            yield Mount(rest[0], _unescaped(rest[1]), named, _unescaped(fields[4]).rstrip("/"), fields[2])


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def advice(mount: Mount) -> list[str]:
    """Return recommended changes of a mount, in sentences for people, the most important first. Pure."""
    found = []
    if mount.type in _OF_ONE_NODE:
        found.append(f"{mount.type} is of one node: engines elsewhere do not see it")
    if "sync" in mount.options:
        found.append("mount without sync: it makes each write wait for the device")
    read = mount.options.get("max_read", "")
    if mount.type.startswith("fuse") and read.isdecimal() and int(read) < _LARGE_BYTES:
        found.append(f"max_read is {read}: each read is cut into pieces of it; raise it if the client can")
    if not mount.is_nfs:
        return found
    if "nocto" in mount.options:
        found.append("mount without nocto: blocks of other nodes are known as late as attributes are cached, a minute")
    if "noac" in mount.options:
        found.append("mount without noac: it makes each call ask the server; the store needs no more than open does")
    small = [
        name
        for name in ("rsize", "wsize")
        if mount.options.get(name, "").isdecimal() and int(mount.options[name]) < _LARGE_BYTES
    ]
    if small:
        found.append(f"mount with {' and '.join(small)} of 1048576, if the server takes it")
    if "nconnect" not in mount.options:
        found.append("mount with nconnect=8: one connection carries less than the network does")
    if "lookupcache" in mount.options:
        found.append("mount without lookupcache: names that exist are looked up again and again")
    return found
