# SPDX-License-Identifier: Apache-2.0
"""``spec.routing``, ``spec.kvEvents`` and ``spec.networkPolicy``: who reaches the replicas, and which one. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictInt, StrictStr, StringConstraints

from kvtier_operator.api.engine_spec import ServiceSettings, refuse_flags
from kvtier_operator.api.pod_template import Anything
from kvtier_operator.api.rules import ApiModel, ByteQuantity, Checked, CpuQuantity, ObjectName, Rule, Word, at

EVENTS_PORT: Final = 5557
"""Where they are published. An engine of several data-parallel ranks takes the ports after it, too."""
REPLAY_PORT: Final = 5757
"""Where they are repeated to who missed some; as far away as ranks may count."""


class KvEvents(ApiModel):
    """KV events over ZeroMQ, as vLLM publishes them, for routers that know what lies where.

    Engines tell of their accelerator and host memory; the janitor tells of the volume, once for the whole tier.
    """

    block_hashes: Literal["Integers", "Bytes"] = "Integers"
    """How a block is named: `Integers`, the last 64 bits of its hash, as vLLM does; or `Bytes`, the whole hash."""


NONE: Final = "None"
CLIENT_IP: Final = "ClientIP"
ROUTER: Final = "Router"

_RENDERED: Final = "the operator renders it"
_ROUTER_FLAGS: Final = {
    "--host": _RENDERED,
    "--port": "the Service and the probes expect the router on port 8000",
    "--policy": "set spec.routing.router.policy",
    "--worker-urls": "the router finds the engines by their labels",
    "--service-discovery": _RENDERED,
    "--service-discovery-port": _RENDERED,
    "--service-discovery-namespace": "the router sees the tier's own namespace only",
    "--selector": _RENDERED,
    "--prometheus-host": _RENDERED,
    "--prometheus-port": "the router's metrics are served on port 29000",
    "--api-key": "engines are asked with the key that the client sends",
    "--vllm-pd-disaggregation": "the engines of a tier are all alike",
}


class ClientIp(ApiModel):
    """Stickiness of the Service: a client's address stays with the engine it came to first."""

    timeout_seconds: Annotated[StrictInt, Field(ge=1, le=86400)] = 10800
    """Seconds until a silent address may come to another engine. All behind one proxy or gateway have one address."""


class RouterResources(ApiModel):
    """Resources of a container of the router."""

    cpu: CpuQuantity = "250m"
    """Processors that it asks for; it may use more when others do not."""
    memory: ByteQuantity = "512Mi"
    """Memory that it requests and is limited to. The trees of `cache_aware` grow with what is asked."""


class Router(ApiModel):
    """vLLM's own router (vllm-router) in front of the engines, with a Service of its own."""

    image: Word | None = None
    """Image with the Python package `vllm-router`; kvtier's build of vLLM's release if left out."""
    replicas: Annotated[StrictInt, Field(ge=1, le=100, json_schema_extra={"format": "int32"})] = 2
    """Pods. Those of `consistent_hash` agree on where a session goes; of the other policies each decides by itself."""
    policy: Literal["consistent_hash", "cache_aware", "power_of_two", "round_robin", "random"] = "consistent_hash"
    """Who gets a request. `consistent_hash`: requests of one session go to one engine. A session is the header
    `X-Session-ID`, `X-User-ID` or `X-Tenant-ID`, or `user` in the body. Of `cache_aware`, it is the engine that was
    sent the longest common beginning, unless others have much less to do. Of `power_of_two`, it is the less busy one of
    two. Another engine takes over where one goes."""
    resources: RouterResources = RouterResources()
    """Resources of its container."""
    service: ServiceSettings = ServiceSettings()
    """The Service in front of the router."""
    args: Annotated[
        tuple[Annotated[StrictStr, StringConstraints(min_length=1, max_length=256)], ...],
        Field(max_length=64),
        Checked(refuse_flags(_ROUTER_FLAGS)),
    ] = ()
    """More flags for `vllm-router`, one word each, such as `--cache-threshold`, `"0.5"`. Those that the operator
    renders are refused."""


class EndpointPicker(ApiModel):
    """The Service of an endpoint picker, such as llm-d's, which the gateway asks where a request is to go."""

    name: ObjectName
    """Service in the same namespace."""
    port: Annotated[StrictInt, Field(ge=1, le=65535)] = 9002
    """Its port for the gateway (ext-proc)."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"
    """Behaviour of the gateway without a picker: send requests to any engine, or refuse them."""


class InferencePool(ApiModel):
    """An `InferencePool` of Gateway API's inference extension, v1, that names the engines as its endpoints."""

    endpoint_picker: EndpointPicker
    """Who picks among the engines."""


class Routing(ApiModel):
    """How a request comes to the replica that has its cache."""

    type: Literal["None", "ClientIP", "Router"] = NONE
    """With `None`, the Service spreads connections over the engines. With `ClientIP`, it keeps a client's address with
    one engine. With `Router`, a router stands before them, behind a Service named after the tier and `-router`. All
    of them share the volume; the caches of the accelerator and of host memory are what is near."""
    client_ip: ClientIp | None = Field(default=None, alias="clientIP")
    """Settings of `ClientIP`."""
    router: Router | None = None
    """Settings of `Router`."""
    inference_pool: InferencePool | None = None
    """Makes an `InferencePool` of the engines besides, for a gateway and an endpoint picker of your own."""

    rules = (
        Rule.that(
            ~at("router").is_given | at("type").is_(ROUTER),
            f"describes a router that no request would go through: set spec.routing.type to {ROUTER}, or remove "
            "spec.routing.router",
            field=".router",
        ),
        Rule.that(
            ~at("clientIP").is_given | at("type").is_(CLIENT_IP),
            f"has settings of another type of routing: set spec.routing.type to {CLIENT_IP}, or remove "
            "spec.routing.clientIP",
            field=".clientIP",
        ),
    )

    @property
    def router_settings(self) -> Router | None:
        """Return how the router is to be; None where there is none."""
        return (self.router or Router()) if self.type == ROUTER else None


_Objects = Annotated[tuple[Anything, ...], Field(max_length=64)]
_Port = Annotated[StrictInt, Field(ge=1, le=65535)]


class NetworkPolicySpec(ApiModel):
    """A NetworkPolicy for each component of the tier.

    Engines, router and stores reach each other and DNS. The operator reaches engines and janitor; janitor and router
    reach the API server. The network plugin must enforce policies. Mounts of the volume are traffic of the node.
    """

    clients: _Objects | None = None
    """Peers that may send requests to the engines and the router and read KV events, as in `from` of a NetworkPolicy.
    Left out, every pod of the namespace; with `[]`, no pod but those of the tier."""
    scrapers: _Objects = ()
    """Peers that may read the metrics, such as the namespace of Prometheus. They can send requests to engines, too."""
    egress: _Objects | None = None
    """Rules about what else the engines may reach, as in `egress` of a NetworkPolicy: a model hub, a Redis of your own.
    Left out, TCP port 443 of any address. With `[]`, nothing: for a model on a volume."""
    api_server: _Objects = ()
    """Where janitor and router find the API server, as in `to` of a NetworkPolicy; any address if absent."""
    api_server_ports: Annotated[tuple[_Port, ...], Field(min_length=1, max_length=16)] = (443, 6443, 8443, 16443)
    """Ports of the API server: of its Service, and behind that of kubeadm, minikube and MicroK8s."""
