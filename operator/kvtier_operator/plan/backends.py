# SPDX-License-Identifier: Apache-2.0
"""What each connector takes of a pod, and who looks after what it keeps. Pure."""

from __future__ import annotations

from kvtier_connector.contract import janitor
from kvtier_operator.api import connector_spec as kinds
from kvtier_operator.api.connector_spec import Connector


def is_in_shm(connector: Connector) -> bool:
    """Tell whether the CPU tier is a file in /dev/shm, and not memory that each process pins for itself."""
    return connector.is_ours or connector.type in {kinds.VLLM_OFFLOADING, kinds.VLLM_TIERING, kinds.HYBRID}


def passing_bytes(connector: Connector) -> int | None:
    """Return the memory of one engine that blocks pass through on their way; None for kvtier's own movers."""
    if connector.is_ours:
        return None
    hybrid = connector.hybrid
    return 0 if hybrid is None or hybrid.lmcache is None else hybrid.lmcache_bytes


def file_bytes(connector: Connector, cpu_bytes: int) -> int:
    """Return what blocks of one engine take on the node's disk."""
    if connector.is_on_node_disk:
        return cpu_bytes
    lmcache = connector.used_lmcache()
    return 0 if lmcache is None or lmcache.local_disk is None else lmcache.local_disk.size_bytes


def has_janitor(connector: Connector) -> bool:
    """Tell whether blocks lie on the volume that nobody else removes."""
    return connector.uses_volume and connector.blocks_of is None


def layout(connector: Connector) -> str:
    """Return how the files on the volume lie."""
    return janitor.BLOCKS_LAYOUT if connector.is_ours else janitor.VLLM_FS_LAYOUT


def cleaner(connector: Connector) -> str:
    """Say who keeps within bounds what a connector without a janitor keeps, as the end of a sentence."""
    if connector.blocks_of is not None:
        return f"the blocks are those of the tier {connector.blocks_of}, whose janitor looks after them"
    if connector.is_on_node_disk:
        return "its file on the node's disk has one size, and goes with the pod"
    lmcache = connector.used_lmcache()
    if lmcache is not None and lmcache.redis is not None:
        return "LMCache keeps host memory and disk within their sizes, and Redis evicts by its own maxmemory-policy"
    if connector.type == kinds.FLEX_KV:
        return "FlexKV keeps to the sizes of its own configuration"
    if connector.type == kinds.MOONCAKE:
        return "Mooncake's master evicts within the segments that the engines give it"
    return "host memory has one size, and goes with the pod"
