# SPDX-License-Identifier: Apache-2.0
"""Allocate the cluster IPs of Services from one range. The stored Services record which are taken."""

from __future__ import annotations

import ipaddress
import itertools

from kvtier_localcluster.apiserver.store.api_errors import ApiError, invalid
from kvtier_localcluster.apiserver.store.memory import Storage
from kvtier_localcluster.apiserver.store.objects import Json

_SERVICES = ("", "services")


class ClusterIps:
    """Allocates addresses in turn, so that an address which just became free is the last to be given again."""

    def __init__(self, cidr: str, storage: Storage) -> None:
        """Use the addresses of `cidr`, but for its first and last."""
        self._storage = storage
        self.use(cidr)

    def use(self, cidr: str) -> None:
        """Take the addresses from another range from now on."""
        self._network = ipaddress.ip_network(cidr)
        self._turn = itertools.cycle(range(1, self._network.num_addresses - 1))

    def assign(self, service: Json, old: Json | None) -> None:
        """Set, in place, the cluster IP of a Service that is being written; an update keeps the one it has.

        Raises:
            ApiError: the address asked for is taken, out of range, or not the one that the Service has; 422.
        """
        spec = service["spec"]
        name = service["metadata"]["name"]
        if spec.get("type") == "ExternalName":
            return
        current = (old or {}).get("spec", {}).get("clusterIP")
        asked = spec.get("clusterIP") or current
        if current and asked != current:
            raise invalid(
                "Service", "", name, [f'spec.clusterIPs[0]: Invalid value: "{asked}": may not change once set']
            )
        if not current:
            asked = self._checked(asked, name) if asked else self._free()
        spec["clusterIP"] = asked
        spec.setdefault("clusterIPs", [asked])

    def _taken(self) -> set[str]:
        return {service["spec"].get("clusterIP", "") for service in self._storage.all(_SERVICES)}

    def _checked(self, asked: str, name: str) -> str:
        problem = None
        if asked == "None":
            return asked
        try:
            if ipaddress.ip_address(asked) not in self._network:
                problem = f"the provided IP is not in the valid range {self._network}"
            elif asked in self._taken():
                problem = "failed to allocate IP: provided IP is already allocated"
        except ValueError:
            problem = "must be a valid IP address"
        if problem:
            raise invalid("Service", "", name, [f'spec.clusterIPs[0]: Invalid value: "{asked}": {problem}'])
        return asked

    def _free(self) -> str:
        taken = self._taken()
        for offset in itertools.islice(self._turn, self._network.num_addresses):
            candidate = str(self._network[offset])
            if candidate not in taken:
                return candidate
        raise ApiError(500, "InternalError", f"failed to allocate a serviceIP: range {self._network} is full")
