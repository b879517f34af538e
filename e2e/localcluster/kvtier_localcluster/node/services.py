# SPDX-License-Identifier: Apache-2.0
"""What the node gives to each pod, and a pod to each of its containers: plain records, made once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import Json
from kvtier_localcluster.node.addresses import PodAddresses
from kvtier_localcluster.node.environment import Sources
from kvtier_localcluster.node.images import ImageProfile
from kvtier_localcluster.node.volumes import PodVolumes
from kvtier_localcluster.recorder import EventRecorder, Happening

NODE_NAME = "local"


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How long a container that ended waits for its restart: longer after each failure in a row."""

    first_seconds: float = 1.0
    limit_seconds: float = 60.0
    reset_seconds: float = 600.0
    """A container that ran for this long starts over with the first delay."""

    def delay_seconds(self, failures: int) -> float:
        """Return the delay after so many ends in a row."""
        return min(self.limit_seconds, self.first_seconds * 2.0 ** max(0, min(failures - 1, 32)))


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What can be chosen about a node."""

    images: Sequence[ImageProfile] = ()
    restarts: Restarts = field(default_factory=Restarts)
    stop_grace_seconds: float = 5.0
    """How long pods may take to end when the whole cluster stops."""
    isolates_memory: bool = True
    """Give each pod a /dev/shm of its own where the machine allows it."""


@dataclass(frozen=True, kw_only=True)
class NodeServices:
    """What every pod of the node uses."""

    client: ApiClient
    informers: Informers
    recorder: EventRecorder
    data: DataDirectory
    addresses: PodAddresses
    session: aiohttp.ClientSession
    settings: NodeSettings
    allocatable: Json
    kubeconfig: Path
    """What stands for the token of a service account."""


@dataclass(frozen=True, kw_only=True)
class PodServices:
    """What every container of a pod uses."""

    node: NodeServices
    sources: Sources
    volumes: PodVolumes
    tell: Callable[[Happening], None]
    """Posts an Event about the pod."""
    report: Callable[[], None]
    """Says that the state of a container changed."""
    config_changed: asyncio.Event
    """Set whenever a ConfigMap, Secret or claim of the namespace changed."""
