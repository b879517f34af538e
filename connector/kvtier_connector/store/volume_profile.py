# SPDX-License-Identifier: Apache-2.0
"""Facts about a volume: its file system, as the kernel describes the mount, and the measurements of the preflight.

The measurements are in ``volume.json`` beside the generations. They are advice: a process that finds none, or cannot
read them, measures the volume itself. Trying a volume decides whether it can be used, never the name of its file
system.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from kvtier_connector.store.fs import READ_FLAGS, FileSystem, find_mount, replacing, write_all

PROFILE_FILE = "volume.json"
"""Name of the file, in the directory of the tier."""
_MOST_BYTES = 4096

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


@dataclass(frozen=True, kw_only=True)
class VolumeProfile:
    """Measurements of a volume; None and 0 where nothing was measured, or the choice made no difference."""

    direct_io: bool | None = None
    """Whether to bypass the page cache."""
    read_bytes_per_second: int = 0
    """Rate at which one node reads a few files at a time."""
    write_bytes_per_second: int = 0
    """Rate at which one node writes a few files at a time."""


def write_profile(fs: FileSystem, tier_dir: str, profile: VolumeProfile) -> None:
    """Replace the file; raise OSError where the volume does not take it."""
    with replacing(fs, f"{tier_dir}/{PROFILE_FILE}") as fd:
        write_all(fs, fd, memoryview(json.dumps(asdict(profile), sort_keys=True).encode()))


def read_profile(fs: FileSystem, tier_dir: str) -> VolumeProfile:
    """Return the measurements in the file; an empty profile if there is no file, or its content cannot be used."""
    buffer = memoryview(bytearray(_MOST_BYTES))
    try:
        fd = fs.open(f"{tier_dir}/{PROFILE_FILE}", READ_FLAGS)
        try:
            document = json.loads(bytes(buffer[: fs.preadv(fd, [buffer], 0)]))
        finally:
            with contextlib.suppress(OSError):
                fs.close(fd)
    except (OSError, ValueError, RecursionError):
        return VolumeProfile()
    if not isinstance(document, dict):
        return VolumeProfile()
    found = document.get("direct_io")
    return VolumeProfile(
        direct_io=found if isinstance(found, bool) else None,
        read_bytes_per_second=_rate(document.get("read_bytes_per_second")),
        write_bytes_per_second=_rate(document.get("write_bytes_per_second")),
    )


def _rate(found: object) -> int:
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


class Mount(NamedTuple):
    """A mount, as /proc/self/mountinfo describes it."""

    type: str
    source: str
    options: dict[str, str]
    """Options of the mount and of the file system; an option without a value has an empty one."""

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
    """Return the mount of an absolute path, without a call to the volume, which could hang; else `UNKNOWN`.

    Args:
        path: It need not exist.
        table: Text to use instead of /proc/self/mountinfo.
    """
    found = find_mount(path, table=table)
    if found is None:
        return UNKNOWN
    options = (part.partition("=") for part in found.options.split(","))
    return Mount(found.type, found.source, {name: value for name, _, value in options})


def advice(mount: Mount) -> list[str]:
    """Return recommended changes of a mount, in sentences for people, the most important first. Pure."""
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
