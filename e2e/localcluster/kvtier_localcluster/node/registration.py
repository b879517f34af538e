# SPDX-License-Identifier: Apache-2.0
"""The Node object: the resources of the machine. Written once, at the start; there is no heartbeat."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.errors import Conflict
from kvtier_localcluster.kinds import NODE, Json, timestamp
from kvtier_localcluster.node.services import NODE_NAME

_PODS = "250"
SIMULATED = {"cpu": "1000", "memory": "16Ti", "ephemeral-storage": "16Ti", "pods": "4000"}
"""More than any test asks for, but no devices."""


def machine_resources(data: Path) -> dict[str, str]:
    """Return what this machine has."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = os.statvfs(data)
    return {
        "cpu": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_bytes >> 10}Ki",
        "ephemeral-storage": f"{disk.f_blocks * disk.f_frsize >> 10}Ki",
        "pods": _PODS,
    }


def node_manifest(allocatable: Mapping[str, str], now: str) -> Json:
    """Return the Node."""
    ready = Condition("Ready", holds=True, reason="KubeletReady", message="the local node is posting ready status")
    return {
        "metadata": {"name": NODE_NAME, "labels": {"kubernetes.io/hostname": NODE_NAME, "kubernetes.io/os": "linux"}},
        "spec": {},
        "status": {
            "capacity": dict(allocatable),
            "allocatable": dict(allocatable),
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "conditions": [{**ready.written(now), "lastHeartbeatTime": now}],
            "nodeInfo": {
                "architecture": platform.machine(),
                "operatingSystem": "linux",
                "osImage": platform.platform(),
                "kernelVersion": platform.release(),
                "kubeletVersion": "v1.34.0",
                "kubeProxyVersion": "v1.34.0",
                "containerRuntimeVersion": "process://1.0",
                "bootID": "",
                "machineID": "",
                "systemUUID": "",
            },
        },
    }


async def register(client: ApiClient, allocatable: Mapping[str, str]) -> None:
    """Create the Node, or bring the one that is there up to date."""
    manifest = node_manifest(allocatable, timestamp())
    try:
        created = await client.create(NODE, manifest)
    except Conflict:
        created = await client.get(NODE, ("", NODE_NAME))
    await client.patch(NODE, created, {"status": manifest["status"]}, subresource="status")
