# SPDX-License-Identifier: Apache-2.0
"""Local file systems whose quotas are the kernel's own, seen at two places of one node: for a real EDQUOT."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvtier_netfs.volume import SharedVolume, UnavailableError, run

_PROJECT = 42


class XfsQuota(SharedVolume):
    """xfs with project quotas, as volume plug-ins of many storage systems use them."""

    name = "xfs-quota"
    commands: ClassVar[dict[str, str]] = {"mkfs.xfs": "xfsprogs", "xfs_quota": "xfsprogs"}
    serving: ClassVar[tuple[str, ...]] = ()
    disk_mib = 1024

    def set_quota(self, directory: Path, limit_bytes: int) -> None:
        """Let the files below a directory take no more."""
        disk = self.base / "disk"
        limited = disk / directory.relative_to(self.a)
        project = f"project -s -p {limited} {_PROJECT}"
        run("xfs_quota", "-x", "-c", project, "-c", f"limit -p bhard={limit_bytes} {_PROJECT}", str(disk))

    def _up(self) -> None:
        try:
            disk = self._image("disk", mib=self.disk_mib, options="prjquota")
        except UnavailableError as error:
            raise UnavailableError("this kernel has no quotas of xfs (CONFIG_XFS_QUOTA)") from error
        for directory in self.mounts:
            self._bind(disk, directory)


class BtrfsQuota(SharedVolume):
    """btrfs with a quota of a subvolume; it frees what was removed with its next commit."""

    name = "btrfs-quota"
    commands: ClassVar[dict[str, str]] = {"mkfs.btrfs": "btrfs-progs", "btrfs": "btrfs-progs"}
    serving: ClassVar[tuple[str, ...]] = ()
    disk_mib = 1024

    def set_quota(self, directory: Path, limit_bytes: int) -> None:  # noqa: ARG002 - it is of all that is there
        """Let the files take no more, those of other directories too."""
        run("btrfs", "qgroup", "limit", str(limit_bytes), str(self.base / "disk/files"))

    def _up(self) -> None:
        disk = self._image("disk", mib=self.disk_mib, options="commit=1", format_with=("mkfs.btrfs", "-q"))
        run("btrfs", "quota", "enable", str(disk))
        run("btrfs", "subvolume", "create", str(disk / "files"))
        for directory in self.mounts:
            self._bind(disk / "files", directory)
