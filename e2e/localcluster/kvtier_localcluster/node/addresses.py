# SPDX-License-Identifier: Apache-2.0
"""Addresses for pods: each pod gets one of its own from 127.64.0.0/11, which Linux answers without any set-up.

Services get theirs from the range of the same number in 127.96.0.0/11, so one reservation holds both.
"""

from __future__ import annotations

import ipaddress
import random
import socket

from kvtier_localcluster.errors import ClusterUnavailable

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
