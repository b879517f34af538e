# SPDX-License-Identifier: Apache-2.0
"""Paths on disk: one directory for each cluster, and one with a short path for its pods.

- `pvc/<namespace>/<claim>/` outlives the cluster; removed with the claim
- `logs/<namespace>/<pod>/<container>.log` of this run; `.previous.log` of the container before
- `kubeconfig`, `cluster.lock`
- `/tmp/kvtier-<user>-<digest>/<pod>/` volumes and working directories; removed with the pod
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtier_localcluster.errors import ClusterUnavailable
from kvtier_localcluster.kinds import Key

SHORT = Path("/tmp")  # noqa: S108 - TMPDIR may be long; `prepare` checks the owner


@dataclass(frozen=True)
class DataDirectory:
    """The directory of one cluster."""

    root: Path

    @property
    def pods(self) -> Path:
        """Return where the pods' directories lie: short, as a socket in a pod's /tmp has at most 107 bytes of path."""
        digest = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:8]
        return SHORT / f"kvtier-{os.getuid()}-{digest}"

    @property
    def logs(self) -> Path:
        """Return where the logs lie."""
        return self.root / "logs"

    @property
    def kubeconfig(self) -> Path:
        """Return the kubeconfig of the running cluster."""
        return self.root / "kubeconfig"

    @property
    def lock(self) -> Path:
        """Return the file that a running cluster holds locked."""
        return self.root / "cluster.lock"

    def claim(self, key: Key) -> Path:
        """Return the directory of a claim."""
        return self.root / "pvc" / key[0] / key[1]

    def discarded_claim(self, uid: str) -> Path:
        """Return where the directory of a deleted claim waits for its removal."""
        return self.root / "discarded" / uid

    def pod(self, uid: str) -> Path:
        """Return the directory of a pod."""
        return self.pods / uid.replace("-", "")[:12]

    def prepare(self) -> None:
        """Make the directories.

        Raises:
            ClusterUnavailable: the pods' directory, whose name others can guess, belongs to another user.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self.pods.mkdir(mode=0o700, exist_ok=True)
        found = self.pods.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise ClusterUnavailable(
                f"{self.pods} belongs to another user: remove it, or choose another data directory"
            )

    def release(self) -> None:
        """Remove the pods' directory if it is empty; a directory that is left tells of a crash."""
        with contextlib.suppress(OSError):
            self.pods.rmdir()

    def log(self, pod: Key, container: str) -> Path:
        """Return the log of a container as it runs now."""
        return self.logs / pod[0] / pod[1] / f"{container}.log"

    def previous_log(self, pod: Key, container: str) -> Path:
        """Return the log of the container before its last restart."""
        return self.logs / pod[0] / pod[1] / f"{container}.previous.log"

    def discard_pods(self) -> None:
        """Remove what pods of an earlier run left; call it when none of their processes is alive."""
        for directory in (self.pods, self.logs, self.root / "discarded"):
            shutil.rmtree(directory, ignore_errors=True)
