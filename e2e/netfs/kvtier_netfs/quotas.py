# SPDX-License-Identifier: Apache-2.0
"""A local file system whose quotas are the kernel's own, seen at two places of one node: for a real EDQUOT."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvtier_netfs.volume import SharedVolume, UnavailableError, run, unmount

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
            run("mount", "--bind", str(disk), str(directory))
            self._undo.callback(unmount, directory)
