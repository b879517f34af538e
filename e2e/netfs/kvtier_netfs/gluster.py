# SPDX-License-Identifier: Apache-2.0
"""GlusterFS: two bricks on xfs, and two clients; files spread over the bricks, or each on both.

Bricks and clients are GlusterFS's own programs with the translators that ``gluster volume create`` gives them. They run
without glusterd, which distributes their settings: there is one of it a host, and it may be in use.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvtier_netfs.volume import ADDRESS, SharedVolume, wait_for

_PORTS = (24101, 24102)

_BRICK = Path(__file__).with_name("gluster_brick.vol").read_text()
_REMOTE = """
volume kv-client-{number}
    type protocol/client
    option transport-type tcp
    option remote-host {address}
    option remote-port {port}
    option remote-subvolume brick
    option ping-timeout {ping_seconds}
end-volume
"""
_DISTRIBUTE = """
volume spread
    type cluster/distribute
    subvolumes kv-client-0 kv-client-1
end-volume
"""
_REPLICATE = """
volume spread
    type cluster/replicate
    option afr-pending-xattr kv-client-0,kv-client-1
    option data-self-heal on
    option metadata-self-heal on
    option entry-self-heal on
    subvolumes kv-client-0 kv-client-1
end-volume
"""
_CLIENT = Path(__file__).with_name("gluster_client.vol").read_text()


class GlusterDistribute(SharedVolume):
    """Each file is on one of the bricks."""

    name = "glusterfs-distribute"
    commands: ClassVar[dict[str, str]] = {
        "glusterfsd": "glusterfs-server",
        "glusterfs": "glusterfs-client",
        "mkfs.xfs": "xfsprogs",
    }
    serving = ("brick0", "brick1")
    ping_seconds: ClassVar[int] = 42
    """After so long a client gives up on a brick that does not answer; GlusterFS's default."""
    _spread: ClassVar[str] = _DISTRIBUTE

    def brick(self, number: int) -> Path:
        """Return where a brick keeps its files."""
        return self.base / f"disk{number}/files"

    def _up(self) -> None:
        for number, (server, port) in enumerate(zip(self.serving, _PORTS, strict=True)):
            self._image(f"disk{number}", mib=self.disk_mib)
            # The directory of bookkeeping, which glusterd makes.
            (self.brick(number) / ".glusterfs").mkdir(parents=True)
            settings = _BRICK.format(directory=self.brick(number), address=ADDRESS, port=port)
            self._serve(server, self._command("glusterfsd", server, settings))
        wait_for(lambda: all(self.servers.listens(port) for port in _PORTS), "the bricks listen")
        remotes = "".join(
            _REMOTE.format(number=number, ping_seconds=self.ping_seconds, address=ADDRESS, port=port)
            for number, port in enumerate(_PORTS)
        )
        for directory in self.mounts:
            name = f"client-{directory.name}"
            command = self._command("glusterfs", name, remotes + self._spread + _CLIENT)
            more = [f"--{option}" for option in self.options.split(",") if option]
            self._mount(name, directory, [*command, *more, str(directory)])

    def _command(self, program: str, name: str, settings: str) -> list[str]:
        file = self.base / f"{name}.vol"
        file.write_text(settings)
        log, process = self.base / f"{name}.log", self.base / f"{name}.pid"
        return [program, "-f", str(file), "-l", str(log), "-p", str(process), "--no-daemon"]


class GlusterReplica(GlusterDistribute):
    """Each file is on both bricks."""

    name = "glusterfs-replica"
    ping_seconds: ClassVar[int] = 2
    """A brick that hangs is left out soon, so that a test of it is soon over."""
    _spread: ClassVar[str] = _REPLICATE
