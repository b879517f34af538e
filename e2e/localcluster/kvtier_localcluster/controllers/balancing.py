# SPDX-License-Identifier: Apache-2.0
"""Which endpoint a connection goes to: in turn, or the same for a client until it has been away for long. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Endpoint(NamedTuple):
    """Where a pod listens."""

    address: str
    port: int


@dataclass
class Balancer:
    """The memory of one Service port; the present endpoints are an argument, so that none goes stale."""

    affinity_seconds: float | None = None
    """How long a client stays with its endpoint; None is no affinity."""
    _turn: int = 0
    _clients: dict[str, tuple[Endpoint, float]] = field(default_factory=dict)

    def order(self, client: str, endpoints: Sequence[Endpoint], now: float) -> list[Endpoint]:
        """Return the endpoints in the order in which to try them."""
        if not endpoints:
            return []
        start = self._turn % len(endpoints)
        self._turn += 1
        candidates = [*endpoints[start:], *endpoints[:start]]
        if self.affinity_seconds is not None and client in self._clients:
            endpoint, last = self._clients[client]
            if endpoint in candidates and now - last <= self.affinity_seconds:
                candidates.remove(endpoint)
                candidates.insert(0, endpoint)
        return candidates

    def settle(self, client: str, endpoint: Endpoint, now: float) -> None:
        """Remember where a client's connection went."""
        if self.affinity_seconds is not None:
            self._clients[client] = (endpoint, now)
