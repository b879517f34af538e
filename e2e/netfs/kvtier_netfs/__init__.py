# SPDX-License-Identifier: Apache-2.0
"""Real network file systems on this machine, each mounted twice as two nodes would: for tests and measurements.

Needs root, ``/dev/fuse`` and the packages of the file system. Servers listen on loopback only.
"""

from __future__ import annotations

from typing import Final

from kvtier_netfs.cephfs import CephFs
from kvtier_netfs.gluster import GlusterDistribute, GlusterReplica
from kvtier_netfs.moosefs import MooseFs
from kvtier_netfs.nfs import Nfs, Nfs3
from kvtier_netfs.quotas import XfsQuota
from kvtier_netfs.volume import SharedVolume

KINDS: Final[dict[str, type[SharedVolume]]] = {
    kind.name: kind for kind in (GlusterDistribute, GlusterReplica, MooseFs, CephFs, Nfs, Nfs3, XfsQuota)
}
"""By the name that commands and tests call them."""
