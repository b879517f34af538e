# SPDX-License-Identifier: Apache-2.0
"""CephFS: a monitor, a manager, a metadata server and two servers of objects, which keep one copy; and two ceph-fuse.

There is no authentication.
"""

from __future__ import annotations

import os
import uuid
from typing import ClassVar

from kvtier_netfs.volume import ADDRESS, SharedVolume, UnavailableError, wait_for

_PORT = 6789
_START_SECONDS = 90.0
_SETTINGS = """
[global]
fsid = {cluster}
mon_host = v1:{address}:{port}
public_addr = {address}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = {base}
admin_socket = {base}/$name.$pid.socket
pid_file =
log_file = {base}/$name.log
mon_data = {base}/mon
mgr_data = {base}/mgr
mds_data = {base}/mds
osd_data = {base}/objects$id
crash_dir = {base}/crash
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
mon_data_avail_warn = 1
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
osd_objectstore = bluestore
osd_class_update_on_start = true
osd_memory_target = 939524096
bluestore_block_size = {disk_bytes}
mds_beacon_grace = 60
"""


class CephFs(SharedVolume):
    """Each file is cut into objects on both servers."""

    name = "cephfs"
    commands: ClassVar[dict[str, str]] = {
        "ceph": "ceph-common",
        "ceph-mon": "ceph-mon",
        "ceph-mgr": "ceph-mgr",
        "ceph-osd": "ceph-osd",
        "ceph-mds": "ceph-mds",
        "ceph-fuse": "ceph-fuse",
        "mkfs.xfs": "xfsprogs",
    }
    serving: ClassVar[tuple[str, ...]] = ()
    """None that tests may stop: what a server of one copy was asked for meanwhile hangs for ever (Ceph 16)."""
    _objects: ClassVar[tuple[str, ...]] = ("objects0", "objects1")

    def _up(self) -> None:
        cluster = str(uuid.uuid4())
        settings = self.base / "ceph.conf"
        settings.write_text(
            _SETTINGS.format(
                cluster=cluster, address=ADDRESS, port=_PORT, base=self.base, disk_bytes=self.disk_mib << 20
            )
        )
        self._conf = ["-c", str(settings)]
        for name in ("mon", "mgr", "mds", "crash"):
            (self.base / name).mkdir()
        for server in self._objects:
            # They write past the page cache, which a tmpfs does not take.
            self._image(server, mib=self.disk_mib + 512)
        monitors = str(self.base / "monitors")
        self.servers.run(
            "monmaptool", "--create", "--addv", "a", f"[v1:{ADDRESS}:{_PORT}]", "--fsid", cluster, monitors
        )
        self.servers.run("ceph-mon", *self._conf, "--mkfs", "-i", "a", "--monmap", monitors)
        self._start("monitor", "ceph-mon", "a")
        wait_for(lambda: self.servers.listens(_PORT), "the monitor listens")
        wait_for(self._answers, "the monitor answers", seconds=_START_SECONDS)
        self._start("manager", "ceph-mgr", "a")
        for number, server in enumerate(self._objects):
            of_server = str(uuid.uuid4())
            self._tell("osd", "new", of_server, str(number))
            self.servers.run("ceph-osd", *self._conf, "--mkfs", "-i", str(number), "--osd-uuid", of_server)
            self._start(server, "ceph-osd", str(number))
        for pool in ("names", "bytes"):
            self._tell("osd", "pool", "create", pool, "8")
        self._tell("fs", "new", "kv", "names", "bytes")
        self._start("metadata", "ceph-mds", "a")
        wait_for(lambda: "up:active" in self._tell("mds", "stat"), "names are served", seconds=_START_SECONDS)
        options = [f"--{option}" for option in self.options.split(",") if option]
        for directory in self.mounts:
            command = ["ceph-fuse", "-f", *self._conf, "-n", "client.admin", *options, str(directory)]
            self._mount(f"client-{directory.name}", directory, command)
        wait_for(lambda: os.statvfs(self.a).f_bavail > 0, "there is room", seconds=_START_SECONDS)

    def _start(self, name: str, program: str, number: str) -> None:
        self._serve(name, [program, "-f", *self._conf, "-i", number])

    def _tell(self, *words: str) -> str:
        return self.servers.run("ceph", *self._conf, "--connect-timeout", "20", *words)

    def _answers(self) -> bool:
        try:
            return bool(self._tell("status"))
        except UnavailableError:
            return False
