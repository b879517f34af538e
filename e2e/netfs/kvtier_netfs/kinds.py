# SPDX-License-Identifier: Apache-2.0
"""The file systems that can be had, by the name that commands and tests call them."""

from __future__ import annotations

from typing import Final

from kvtier_netfs.cephfs import CephFs
from kvtier_netfs.gluster import GlusterDistribute, GlusterReplica
from kvtier_netfs.moosefs import MooseFs
from kvtier_netfs.nfs import Nfs, Nfs3
from kvtier_netfs.quotas import BtrfsQuota, XfsQuota
from kvtier_netfs.volume import SharedVolume

KINDS: Final[dict[str, type[SharedVolume]]] = {
    kind.name: kind for kind in (GlusterDistribute, GlusterReplica, MooseFs, CephFs, Nfs, Nfs3, XfsQuota, BtrfsQuota)
}
