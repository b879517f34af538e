# SPDX-License-Identifier: Apache-2.0
"""Which file system a directory is on, by what the kernel says of its mount, and what is known to suit it.

What decides whether a volume can be used is what it does when it is tried, never its name.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_ESCAPED = re.compile(r"\\([0-7]{3})")
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
"""Of a mount whose type is FUSE and no more."""
_OF_ONE_NODE: Final = frozenset({"ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs"})
_LARGE_BYTES: Final = 1 << 20
_LEFT_FIELDS: Final = 6
_RIGHT_FIELDS: Final = 3


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    type: str
    source: str
    options: dict[str, str]
    """Of the mount and of the file system; an option without a value has an empty one."""

    @property
    def name(self) -> str:
        """What people call the file system."""
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

        MooseFS's servers hold blocks of 64 KiB. One that lengthens a file by less has its kernel bring all that was
        written to the disk first, which takes as long as the file.
        """
        return self.name == "MooseFS"


UNKNOWN = Mount("unknown", "", {})


def mount_of(path: str, *, table: str | None = None) -> Mount:
    """Return the mount that holds an absolute path, without a call to it, which could hang; else `UNKNOWN`.

    Args:
        path: It need not be there yet.
        table: Read in the place of /proc/self/mountinfo.
    """
    return _find(path, table)[0]


def mount_point_of(path: str, *, table: str | None = None) -> str:
    """Return where the mount that holds an absolute path is mounted; empty if that is not known. As `mount_of`."""
    return _find(path, table)[1]


def _find(path: str, table: str | None) -> tuple[Mount, str]:
    if table is None:
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123 - once
                table = mounts.read()
        except OSError:
            return UNKNOWN, ""
    found, where, longest = UNKNOWN, "", -1
    for line in table.splitlines():
        # number, parent, device, root, mount point, options, more of them, "-", type, source, options
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split(" ")
        if len(fields) < _LEFT_FIELDS or len(rest) < _RIGHT_FIELDS:
            continue
        point = _plain(fields[4]).rstrip("/")
        # A later mount on the same place hides an earlier one.
        if f"{path}/".startswith(f"{point}/") and len(point) >= longest:
            where, longest = point or "/", len(point)
            found = Mount(rest[0], _plain(rest[1]), {**_options(rest[2]), **_options(fields[5])})
    return found, where


def advice(mount: Mount) -> list[str]:
    """Return what to change about a mount, in sentences for people, the most important first. Pure."""
    found = []
    if mount.type in _OF_ONE_NODE:
        found.append(f"{mount.type} is of one node: engines elsewhere do not see it")
    if "sync" in mount.options:
        found.append("mount without sync: it makes each write wait for the device")
    if mount.is_nfs:
        found += _advice_on_nfs(mount)
    if mount.type.startswith("fuse"):
        read = mount.options.get("max_read", "")
        if read.isdecimal() and int(read) < _LARGE_BYTES:
            found.append(f"max_read is {read}: each read is cut into pieces of it; raise it if the client can")
    return found


def _advice_on_nfs(mount: Mount) -> list[str]:
    found = []
    if "nocto" in mount.options:
        found.append("mount without nocto: what others have stored is known as late as attributes are cached, a minute")
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


def _options(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name: value for name, _, value in pairs}


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
