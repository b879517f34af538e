# SPDX-License-Identifier: Apache-2.0
"""NFS: the user-space server Ganesha on xfs, and two mounts of the kernel's own client that share no cache.

The kernel of a container host may have no NFS client; `kvtier_netfs.guest` boots one that has, as a process.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvtier_netfs.volume import ADDRESS, SharedVolume, unmount, wait_for

_PORT, _MOUNT_PORT = 2049, 20048
_SETTINGS = """
NFS_CORE_PARAM {{
    Protocols = {protocols}; Bind_addr = {address}; NFS_Port = {port}; MNT_Port = {mount_port};
    Enable_NLM = false; Enable_RQUOTA = false;
}}
NFSv4 {{ RecoveryBackend = fs; RecoveryRoot = {state}; Lease_Lifetime = 60; Grace_Period = 60; Minor_Versions = 1; }}
EXPORT {{
    Export_Id = 1; Path = {files}; Pseudo = /kv; Access_Type = RW; Squash = No_Root_Squash; SecType = sys;
    FSAL {{ Name = VFS; }}
}}
LOG {{ Default_Log_Level = WARN; }}
"""


class Nfs(SharedVolume):
    """NFS 4.1, as EFS, FSx and ONTAP have it."""

    name = "nfs"
    commands: ClassVar[dict[str, str]] = {
        "ganesha.nfsd": "nfs-ganesha-vfs",
        "mount.nfs": "nfs-common",
        "mkfs.xfs": "xfsprogs",
    }
    serving = ("ganesha",)
    _type: ClassVar[str] = "nfs4"
    _protocols: ClassVar[str] = "4"
    _mount_with: ClassVar[str] = "vers=4.1"

    @classmethod
    def why_not(cls) -> str:
        """Say what is missing here; empty if nothing is."""
        if cls._type not in Path("/proc/filesystems").read_text(encoding="ascii").split():
            return "this kernel has no NFS client; `python -m kvtier_netfs.guest` boots one that has"
        return super().why_not()

    def _up(self) -> None:
        disk, state = self._image("disk", mib=self.disk_mib), self.base / "state"
        files = disk / "files"
        files.mkdir()
        state.mkdir()
        settings = self.base / "ganesha.conf"
        settings.write_text(
            _SETTINGS.format(
                protocols=self._protocols, address=ADDRESS, port=_PORT, mount_port=_MOUNT_PORT, state=state, files=files
            )
        )
        self._prepare()
        log, process = self.base / "ganesha.log", self.base / "ganesha.pid"
        # It does not make the directory of its locks.
        Path("/run/ganesha").mkdir(exist_ok=True)
        self._serve("ganesha", ["ganesha.nfsd", "-F", "-f", str(settings), "-L", str(log), "-p", str(process)])
        wait_for(lambda: self.servers.listens(_PORT), "the server listens")
        for directory in self.mounts:
            # As of two nodes: of one node they would share what they know.
            options = f"{self._mount_with},proto=tcp,hard,noatime,nosharecache"
            more = f"{options},{self.options}" if self.options else options
            self.servers.run("mount", "-t", self._type, "-o", more, f"{ADDRESS}:{self._path(files)}", str(directory))
            self._undo.callback(unmount, directory)

    def _prepare(self) -> None:
        """Start what the server needs."""

    def _path(self, files: Path) -> str:  # noqa: ARG002 - another protocol's
        return "/kv"


class Nfs3(Nfs):
    """NFS 3, as Filestore has it."""

    name = "nfs3"
    commands: ClassVar[dict[str, str]] = {**Nfs.commands, "rpcbind": "rpcbind"}
    _type: ClassVar[str] = "nfs"
    _protocols: ClassVar[str] = "3, 4"
    _mount_with: ClassVar[str] = f"vers=3,nolock,port={_PORT},mountport={_MOUNT_PORT},mountproto=tcp"

    def _prepare(self) -> None:
        self._serve("rpcbind", ["rpcbind", "-f", "-w"])
        wait_for(lambda: self.servers.listens(111), "the port mapper listens")

    def _path(self, files: Path) -> str:
        return str(files)
