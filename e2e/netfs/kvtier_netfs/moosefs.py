# SPDX-License-Identifier: Apache-2.0
"""MooseFS: a master, two chunk servers on xfs, and two clients; each file has one copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import ClassVar

from kvtier_netfs.volume import ADDRESS, SharedVolume, UnavailableError, wait_for

_EMPTY = Path("/var/lib/mfs/metadata.mfs.empty")
_OF_MASTERS, _OF_CHUNKS, _OF_CLIENTS, *_PORTS = range(9419, 9424)


class MooseFs(SharedVolume):
    """Chunk servers hold the bytes, the master everything else."""

    name = "moosefs"
    commands: ClassVar[dict[str, str]] = {
        "mfsmaster": "moosefs-master",
        "mfschunkserver": "moosefs-chunkserver",
        "mfsmount": "moosefs-client",
        "mkfs.xfs": "xfsprogs",
    }
    serving = ("chunks0", "chunks1")

    def _up(self) -> None:
        if not _EMPTY.exists():
            raise UnavailableError(f"install moosefs-master: there is no {_EMPTY}")
        master = self.base / "master"
        master.mkdir()
        shutil.copy(_EMPTY, master / "metadata.mfs")
        (self.base / "exports.cfg").write_text(f"{ADDRESS} / rw,alldirs,admin,maproot=0:0\n")
        (self.base / "topology.cfg").touch()
        settings = {
            "DATA_PATH": master,
            "EXPORTS_FILENAME": self.base / "exports.cfg",
            "TOPOLOGY_FILENAME": self.base / "topology.cfg",
            "MATOML_LISTEN_HOST": ADDRESS,
            "MATOML_LISTEN_PORT": _OF_MASTERS,
            "MATOCS_LISTEN_HOST": ADDRESS,
            "MATOCS_LISTEN_PORT": _OF_CHUNKS,
            "MATOCL_LISTEN_HOST": ADDRESS,
            "MATOCL_LISTEN_PORT": _OF_CLIENTS,
        }
        self._start("master", "mfsmaster", settings)
        wait_for(lambda: self.servers.listens(_OF_CLIENTS) and self.servers.listens(_OF_CHUNKS), "the master listens")
        for number, (server, port) in enumerate(zip(self.serving, _PORTS, strict=True)):
            disk, data = self._image(f"disk{number}", mib=self.disk_mib), self.base / server
            data.mkdir()
            (self.base / f"{server}.disks").write_text(f"{disk}\n")
            settings = {
                "DATA_PATH": data,
                "HDD_CONF_FILENAME": self.base / f"{server}.disks",
                "HDD_LEAVE_SPACE_DEFAULT": "64MiB",
                "MASTER_HOST": ADDRESS,
                "MASTER_PORT": _OF_CHUNKS,
                "CSSERV_LISTEN_HOST": ADDRESS,
                "CSSERV_LISTEN_PORT": port,
            }
            self._start(server, "mfschunkserver", settings)
        for directory in self.mounts:
            options = ["-o", self.options] if self.options else []
            self._mount(
                f"client-{directory.name}",
                directory,
                ["mfsmount", "-f", "-H", ADDRESS, "-P", str(_OF_CLIENTS), *options, str(directory)],
            )
        # Files are gone when they are removed, and have one copy.
        self.servers.run("mfssettrashtime", "-r", "0", str(self.a))
        self.servers.run("mfssetgoal", "-r", "1", str(self.a))
        wait_for(self._takes_files, "the chunk servers take files")

    def set_quota(self, directory: Path, limit_bytes: int) -> None:
        """Let the files below a directory take no more: what does not fit is answered with EDQUOT."""
        self.servers.run("mfssetquota", "-L", str(limit_bytes), str(directory))

    def _start(self, name: str, program: str, settings: dict[str, object]) -> None:
        file = self.base / f"{name}.cfg"
        lasting = {"WORKING_USER": "root", "WORKING_GROUP": "root", "LOCK_MEMORY": 0, "DISABLE_OOM_KILLER": 0}
        file.write_text("".join(f"{key} = {value}\n" for key, value in {**lasting, **settings}.items()))
        self._serve(name, [program, "-f", "-c", str(file), "start"])

    def _takes_files(self) -> bool:
        probe = self.a / "probe"
        try:
            probe.write_bytes(b"x" * 65536)
        except OSError:
            return False
        finally:
            probe.unlink(missing_ok=True)
        return os.statvfs(self.a).f_bavail > 0
