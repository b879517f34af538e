# SPDX-License-Identifier: Apache-2.0
"""The service proxy: listens on every ClusterIP and port, and passes connections on to ready endpoints.

Linux answers on all of 127.0.0.0/8, so an address from that range needs no set-up; only TCP is served. A
`Balancer` chooses endpoints in turn, or the same one for a client until it has been away for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.endpoints import SERVICE_LABEL
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import ENDPOINT_SLICE, SERVICE, Json, Key, Kind, is_deleting
from kvtier_localcluster.recorder import Happening


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


_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 10
_CONNECT_SECONDS = 3
_RETRY_SECONDS = 5
_ACCEPTING_TURNS = 3


class ServiceProxy(Controller):
    """Serves the ClusterIPs; one listening socket for each Service port."""

    kind: ClassVar[Kind] = SERVICE
    component: ClassVar[str] = "kube-proxy"

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to Services and slices."""
        super().__init__(client, informers)
        self._slices = informers[ENDPOINT_SLICE]
        self._forwarders: dict[Key, dict[tuple[str, int], PortForwarder]] = {}
        self._slices.listen(lambda change: self.enqueue(_service_of(change.object)))

    async def sync(self, key: Key) -> None:
        """Open and close sockets as the Service wants, and tell each where to pass connections on to."""
        service = self.own.get(key)
        wanted = {} if service is None or is_deleting(service) else _listeners(service)
        present = self._forwarders.setdefault(key, {})
        for address in [address for address in present if address not in wanted]:
            await present.pop(address).stop()
        for address, port in wanted.items():
            if address not in present and service is not None:
                forwarder = PortForwarder()
                try:
                    await forwarder.start(address)
                except OSError as problem:
                    message = f"cannot listen on {address[0]}:{address[1]}: {problem.strerror or problem}"
                    self.recorder.record(service, Happening(reason="ProxyFailed", message=message, is_warning=True))
                    self.enqueue_after(key, _RETRY_SECONDS)
                    continue
                present[address] = forwarder
            present[address].point_to(self._endpoints(key, port), _affinity_seconds(service or {}))
        if not present:
            del self._forwarders[key]

    async def stop(self) -> None:
        """Close every socket and connection."""
        for forwarders in self._forwarders.values():
            for forwarder in forwarders.values():
                await forwarder.stop()
        self._forwarders.clear()

    def _endpoints(self, key: Key, port: Json) -> list[Endpoint]:
        found: list[Endpoint] = []
        for piece in self._slices:
            if _service_of(piece) != key:
                continue
            numbers = [each["port"] for each in piece.get("ports") or [] if each["name"] == port.get("name", "")]
            ready = [each for each in piece.get("endpoints") or [] if each["conditions"].get("ready")]
            found.extend(Endpoint(each["addresses"][0], number) for each in ready for number in numbers[:1])
        return found


class PortForwarder:
    """One listening socket and its connections."""

    def __init__(self) -> None:
        """Store; `start` listens."""
        self._endpoints: Sequence[Endpoint] = ()
        self._balancer = Balancer()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, address: tuple[str, int]) -> None:
        """Listen; raises OSError where the address cannot be had."""
        self._server = await asyncio.start_server(self._accept, host=address[0], port=address[1], reuse_address=True)

    def point_to(self, endpoints: Sequence[Endpoint], affinity_seconds: float | None) -> None:
        """Use these endpoints for connections from now on."""
        self._endpoints = endpoints
        self._balancer.affinity_seconds = affinity_seconds

    async def stop(self) -> None:
        """Stop listening and cut the connections."""
        if self._server is not None:
            await self._stop_accepting(self._server)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _stop_accepting(self, server: asyncio.Server) -> None:
        """Close the socket once every connection that it gave out is known.

        asyncio makes transport, protocol and task in one turn of the loop each, and asserts that the server is open.
        """
        loop = asyncio.get_running_loop()
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
        for _ in range(_ACCEPTING_TURNS):
            await asyncio.sleep(0)
        server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            _LOG.debug("a connection was cut")
        finally:
            writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = str(writer.get_extra_info("peername")[0])
        now = asyncio.get_running_loop().time()
        for endpoint in self._balancer.order(client, self._endpoints, now):
            try:
                async with asyncio.timeout(_CONNECT_SECONDS):
                    upstream = await asyncio.open_connection(endpoint.address, endpoint.port)
            except (OSError, TimeoutError):
                continue  # it has just died, and its slice is about to say so
            self._balancer.settle(client, endpoint, now)
            try:
                await asyncio.gather(_pipe(reader, upstream[1]), _pipe(upstream[0], writer))
            finally:
                upstream[1].close()
            return


async def _pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(_CHUNK_BYTES):
        target.write(chunk)
        await target.drain()
    if target.can_write_eof():
        target.write_eof()


def _service_of(piece: Json) -> Key:
    """Return the Service that an EndpointSlice belongs to."""
    metadata = piece["metadata"]
    return metadata["namespace"], (metadata.get("labels") or {}).get(SERVICE_LABEL, "")


def _listeners(service: Json) -> dict[tuple[str, int], Json]:
    """Return the sockets that a Service needs; headless ones need none."""
    address = service["spec"].get("clusterIP")
    if not address or address == "None":
        return {}
    ports = [port for port in service["spec"].get("ports") or [] if port.get("protocol", "TCP") == "TCP"]
    return {(address, int(port["port"])): port for port in ports}


def _affinity_seconds(service: Json) -> float | None:
    spec = service.get("spec") or {}
    if spec.get("sessionAffinity") != "ClientIP":
        return None
    return float(spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"])
