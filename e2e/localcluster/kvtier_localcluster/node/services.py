# SPDX-License-Identifier: Apache-2.0
"""Records that the node gives to each pod, and a pod to each of its containers; and addresses for pods.

Each pod gets an address from 127.64.0.0/11, which Linux answers without any set-up. Services get theirs from the range
of the same number in 127.96.0.0/11, so one reservation holds both.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.errors import ClusterUnavailable
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.node.environment import ImageProfile, Sources
from kvtier_localcluster.node.volumes import PodVolumes
from kvtier_localcluster.recorder import EventRecorder, Happening

_ALL = ipaddress.IPv4Network("127.64.0.0/11")
_ALL_SERVICES = ipaddress.IPv4Network("127.96.0.0/11")
_PREFIX = 20
_ATTEMPTS = 64


class PodAddresses:
    """The addresses of one cluster; several clusters on one machine never share a range."""

    def __init__(self) -> None:
        """Reserve a range for as long as this process lives, or until `close`."""
        self._reservation, self._network = _reserve()
        self._next = 1
        self._used: set[str] = set()

    @property
    def services(self) -> str:
        """Return the range of the cluster's Services."""
        offset = int(self._network.network_address) - int(_ALL.network_address)
        return str(ipaddress.IPv4Network((int(_ALL_SERVICES.network_address) + offset, _PREFIX)))

    def allocate(self) -> str:
        """Return a free address; one that was just given back comes last."""
        for _ in range(self._network.num_addresses):
            address = str(self._network[self._next])
            self._next = self._next % (self._network.num_addresses - 2) + 1
            if address not in self._used:
                self._used.add(address)
                return address
        raise ClusterUnavailable(f"all pod addresses in {self._network} are in use: delete some pods")

    def release(self, address: str) -> None:
        """Give an address back."""
        self._used.discard(address)

    def close(self) -> None:
        """Give the range back."""
        self._reservation.close()


def _reserve() -> tuple[socket.socket, ipaddress.IPv4Network]:
    ranges = list(_ALL.subnets(new_prefix=_PREFIX))
    for network in random.sample(ranges, min(_ATTEMPTS, len(ranges))):
        # An abstract socket is a lock that the kernel gives back however the process ends.
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            reservation.bind(f"\0kvtier-localcluster-{network}")
        except OSError:
            reservation.close()
        else:
            return reservation, network
    raise ClusterUnavailable("no range of loopback addresses is free: stop other local clusters first")


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
    """Settings of a node."""

    images: Sequence[ImageProfile] = ()
    restarts: Restarts = field(default_factory=Restarts)
    stop_grace_seconds: float = 5.0
    """How long pods may take to end when the whole cluster stops."""


@dataclass(frozen=True, kw_only=True)
class NodeServices:
    """Services that every pod of the node uses."""

    client: ApiClient
    informers: Informers
    recorder: EventRecorder
    data: DataDirectory
    addresses: PodAddresses
    session: aiohttp.ClientSession
    settings: NodeSettings
    kubeconfig: Path
    """A file that stands for the token of a service account."""


@dataclass(frozen=True, kw_only=True)
class PodServices:
    """Services that every container of a pod uses."""

    node: NodeServices
    sources: Sources
    volumes: PodVolumes
    tell: Callable[[Happening], None]
    """Posts an Event about the pod."""
    report: Callable[[], None]
    """Says that the state of a container changed."""
    config_changed: asyncio.Event
    """Set whenever a ConfigMap, Secret or claim of the namespace changed."""
