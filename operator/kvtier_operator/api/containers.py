# SPDX-License-Identifier: Apache-2.0
"""``containers`` and ``initContainers`` of ``spec.engine.podTemplate``: sidecars, and more for the engine itself. Pure.

The entry named `engine` is merged into the container that the operator makes, by the rules of server-side apply; every
other entry is a container of its own. Of the engine's, what another field of this resource sets is refused, by that
field's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, StrictInt, StrictStr, WithJsonSchema

from kvtier_operator.api.rules import ApiModel, Checked, Keyed, Pasted, Rule
from kvtier_operator.api.scalars import LabelKey

Anything = Mapping[str, Any]
"""An object of Kubernetes' API that we do not describe."""

ENGINE: Final = "engine"
"""Name of the engine's own container."""

PortionName = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""The name of a part of a pod: a volume, a container, a claim."""

_Int64 = Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)]
IntOrText = Annotated[
    _Int64 | Annotated[StrictStr, Field(max_length=64)], WithJsonSchema({"x-kubernetes-int-or-string": True})
]
"""A number with or without a unit, as Kubernetes takes it: beyond 64 bits, a number is none to it."""

_Amounts = Annotated[Mapping[LabelKey, IntOrText], Field(max_length=32)]
_Patience = Annotated[StrictInt, Field(ge=0, le=86400)]
_Text = Annotated[StrictStr, Field(max_length=1024)]
_Words = Annotated[tuple[Annotated[StrictStr, Field(max_length=32768)], ...], Field(max_length=128)]


class ClaimUse(ApiModel):
    """Devices of a claim that the container uses."""

    name: PortionName
    """Name of an entry of `resourceClaims`."""
    request: _Text | None = None
    """One request of the claim; all that it got if left out."""


class ContainerResources(ApiModel):
    """What a container asks for."""

    requests: _Amounts | None = None
    """Amounts that the node sets aside, by resource."""
    limits: _Amounts | None = None
    """Amounts that it may use at most. Extended resources, such as `rdma/hca`, are given here."""
    claims: (
        Annotated[tuple[Annotated[dict[str, Any], Pasted(ClaimUse)], ...], Field(max_length=16), Keyed("name")] | None
    ) = None
    """Entries of `resourceClaims` whose devices it uses."""


class Probe(ApiModel):
    """How patient a probe is; the fields beside these are those of a container."""

    model_config = ConfigDict(extra="allow")

    initial_delay_seconds: _Patience | None = None
    """Seconds before the first try."""
    period_seconds: _Patience | None = None
    """Seconds between tries."""
    timeout_seconds: _Patience | None = None
    """Seconds that one try may take."""
    success_threshold: _Patience | None = None
    """Tries in a row that must succeed."""
    failure_threshold: _Patience | None = None
    """Tries in a row that must fail. Times `periodSeconds`, that of `startupProbe` is what a start may take."""
    exec: Anything | None = None
    """Command that is run. Not for the engine."""
    http_get: Anything | None = None
    """Request that is sent. Not for the engine."""
    tcp_socket: Anything | None = None
    """Port that is connected to. Not for the engine."""
    grpc: Anything | None = None
    """Service that is asked. Not for the engine."""


class Lifecycle(ApiModel):
    """What is run when the container starts and ends."""

    post_start: Anything | None = None
    """Run right after its start."""
    pre_stop: Anything | None = None
    """Run before it is told to end. Not for the engine, which the operator drains there."""
    stop_signal: _Text | None = None
    """Signal that tells it to end."""


class NamedEntry(ApiModel):
    """An entry that is told from others by its name; the fields beside it are those of a container."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[StrictStr, Field(min_length=1, max_length=256)]
    """Its name."""


class MountEntry(ApiModel):
    """Where the container sees a volume; the fields beside these are those of a container."""

    model_config = ConfigDict(extra="allow")

    name: PortionName
    """Name of a volume of the pod."""
    mount_path: Annotated[StrictStr, Field(min_length=1, max_length=1024)]
    """Directory in the container."""


class InitContainer(ApiModel):
    """A container that runs before the engine; the fields beside these are those of a container."""

    model_config = ConfigDict(extra="allow")

    name: PortionName
    """Name of the container."""
    image: _Text
    """Its image."""


class Container(ApiModel):
    """A container of the pods, or what is laid over the engine's; the fields beside these are those of a container."""

    model_config = ConfigDict(extra="allow")

    name: PortionName
    """Name of the container. `engine` is the engine itself."""
    image: _Text | None = None
    """Image. Of every container but the engine, whose image is `spec.engine.image`."""
    command: _Words | None = None
    """Command. Not for the engine."""
    args: _Words | None = None
    """Arguments of the command. Not for the engine: `spec.engine.args`."""
    env: (
        Annotated[tuple[Annotated[dict[str, Any], Pasted(NamedEntry)], ...], Field(max_length=128), Keyed("name")]
        | None
    ) = None
    """Environment variables. Not for the engine: `spec.engine.env`."""
    volume_mounts: (
        Annotated[tuple[Annotated[dict[str, Any], Pasted(MountEntry)], ...], Field(max_length=32), Keyed("mountPath")]
        | None
    ) = None
    """Volumes that it sees. Not for the engine: `spec.engine.podTemplate.volumeMounts`."""
    resources: ContainerResources | None = None
    """What it asks for. Of the engine, what other fields set is refused."""
    startup_probe: Probe | None = None
    """Until it succeeds, the other probes wait."""
    readiness_probe: Probe | None = None
    """While it fails, no requests are sent."""
    liveness_probe: Probe | None = None
    """When it fails, the container is restarted."""
    lifecycle: Lifecycle | None = None
    """What is run when it starts and ends."""
    security_context: Anything | None = None
    """Laid over the operator's own, which satisfies the restricted Pod Security Standard; what breaks it, the namespace
    must allow."""


_OWN_CONTAINERS: Final = re.compile(r"^(install-connector|kvtier-.*)$")
"""Containers that the operator gives the pods, beside the engine."""

_FIELDS: Final[Mapping[str, str]] = {
    "image": "set spec.engine.image",
    "command": "the operator starts vLLM; set spec.engine.args, or another spec.engine.image",
    "args": "set spec.engine.args, where flags are checked and become part of the cache identity",
    "env": "set spec.engine.env",
    "volumeMounts": "set spec.engine.podTemplate.volumeMounts",
}
"""Field of the engine's container to what its user does instead."""

_PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")
_HANDLERS: Final = ("exec", "httpGet", "tcpSocket", "grpc")

_MEMORY: Final = "set spec.engine.memory and spec.cpu.size, which shared memory is derived from, too"
_STORAGE: Final = "set spec.engine.ephemeralStorage"
_AMOUNTS: Final[Mapping[tuple[str, str], str]] = {
    ("requests", "cpu"): "set spec.engine.cpu",
    ("requests", "memory"): _MEMORY,
    ("limits", "memory"): _MEMORY,
    ("requests", "ephemeral-storage"): _STORAGE,
    ("limits", "ephemeral-storage"): _STORAGE,
}
"""Resource of the engine's container to what its user does instead."""


def of_engine(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what is to be laid over the engine's container."""
    return next((each for each in containers if each["name"] == ENGINE), {})


def _owned(has: str, path: str, instead: str, *, check: Callable[[Mapping[str, Any]], bool]) -> Rule:
    """Return the rule that the engine's entry leaves one field alone."""
    return Rule(
        cel=f"self.all(each, each.name != '{ENGINE}' || !({has}))",
        message=f"{path} of the container {ENGINE} is not yours to set here: {instead}",
        check=lambda containers: not check(of_engine(containers)),
    )


def _owned_field(name: str, instead: str) -> Rule:
    return _owned(f"has(each.{name})", name, instead, check=lambda engine: name in engine)


def _owned_handler(probe: str) -> Rule:
    named = " || ".join(f"has(each.{probe}.{handler})" for handler in _HANDLERS)
    return _owned(
        f"has(each.{probe}) && ({named})",
        f"{probe}.{'|'.join(_HANDLERS)}",
        "the operator says what the probe asks; set its periodSeconds, timeoutSeconds or failureThreshold",
        check=lambda engine: bool(set(_HANDLERS) & set(engine.get(probe) or {})),
    )


def _owned_amount(kind: str, resource: str, instead: str) -> Rule:
    return _owned(
        f"has(each.resources) && has(each.resources.{kind}) && '{resource}' in each.resources.{kind}",
        f"resources.{kind}.{resource}",
        instead,
        check=lambda engine: resource in amounts(engine, kind),
    )


def amounts(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the requests or limits of a container, by resource."""
    return (container.get("resources") or {}).get(kind) or {}


CONTAINER_RULES: Final = (
    *(_owned_field(name, instead) for name, instead in _FIELDS.items()),
    *(_owned_handler(probe) for probe in _PROBES),
    _owned(
        "has(each.lifecycle) && has(each.lifecycle.preStop)",
        "lifecycle.preStop",
        "the operator drains the engine there before it ends",
        check=lambda engine: "preStop" in (engine.get("lifecycle") or {}),
    ),
    *(_owned_amount(*where, instead) for where, instead in _AMOUNTS.items()),
    Rule(
        cel=f"self.all(each, each.name == '{ENGINE}' || has(each.image))",
        message=f"every container needs an image, but for {ENGINE}, which is the engine itself",
        check=lambda containers: all(each["name"] == ENGINE or "image" in each for each in containers),
    ),
)
"""What ``containers`` must keep to beside their names."""

NAMES_ARE_FREE: Final = Rule(
    cel=f"self.all(each, !each.name.matches('{_OWN_CONTAINERS.pattern}'))",
    message="the container names install-connector and kvtier-… are the operator's; choose another",
    check=lambda containers: not any(_OWN_CONTAINERS.match(each["name"]) for each in containers),
)

Containers = Annotated[
    tuple[Annotated[dict[str, Any], Pasted(Container)], ...],
    Field(max_length=16),
    Keyed("name"),
    Checked((NAMES_ARE_FREE, *CONTAINER_RULES)),
]

InitContainers = Annotated[
    tuple[Annotated[dict[str, Any], Pasted(InitContainer)], ...],
    Field(max_length=16),
    Keyed("name"),
    Checked((NAMES_ARE_FREE,)),
]
