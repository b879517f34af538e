# SPDX-License-Identifier: Apache-2.0
"""``spec.engine.env`` and ``spec.engine.podTemplate``: objects of Kubernetes' API that are merged into the pods. Pure.

The schema declares the fields that the operator reads or owns, and keeps every other field as it is. The API server
judges those: the operator applies the Deployment as a strict dry run before it changes anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr, WithJsonSchema

from kvtier_operator.api.rules import (
    Annotations,
    ApiModel,
    Checked,
    Keyed,
    LabelKey,
    Labels,
    ObjectName,
    Pasted,
    Rule,
    at,
)

ENGINE: Final = "engine"
"""Name of the engine's own container."""

Anything = Mapping[str, Any]
"""An object that the schema does not describe."""

IntOrText = Annotated[
    Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)] | Annotated[StrictStr, Field(max_length=64)],
    WithJsonSchema({"x-kubernetes-int-or-string": True}),
]
"""A number with or without a unit; Kubernetes takes at most 64 bits."""

_Text = Annotated[StrictStr, Field(max_length=1024)]
_Amounts = Annotated[Mapping[LabelKey, IntOrText], Field(max_length=32)]
_PartName = Annotated[StrictStr, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class OpenObject(ApiModel):
    """An object of Kubernetes' API with some of its fields declared."""

    model_config = ConfigDict(extra="allow")


class Variable(ApiModel):
    """One environment variable."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_.-][A-Za-z0-9_.-]*$")]
    """Name of the variable."""
    value: Annotated[StrictStr, Field(max_length=32768)] | None = None
    """Value; empty if left out. Exactly as vLLM reads it, so numbers need quotes."""
    value_from: Anything | None = None
    """Source of the value instead, as in a Pod."""


class Named(OpenObject):
    """An entry of a list; the fields beside its name are those of a Pod."""

    name: ObjectName
    """Name of the entry."""


class VolumeMount(OpenObject):
    """Where the engine sees a volume; the other fields are those of a Pod."""

    name: _Text
    """Name of an entry of `volumes`."""
    mount_path: Annotated[StrictStr, Field(min_length=1, max_length=1024, pattern=r"^/[^:]*$")]
    """Directory in the container."""


class Resources(OpenObject):
    """Resources of a container."""

    requests: _Amounts | None = None
    """Amounts that the node sets aside, by resource."""
    limits: _Amounts | None = None
    """Most that it may use. Extended resources, such as `rdma/hca`, are given here."""


class Probe(OpenObject):
    """A probe; the other fields are those of a container."""

    period_seconds: Annotated[StrictInt, Field(ge=0, le=86400)] | None = None
    """Seconds between tries."""
    failure_threshold: Annotated[StrictInt, Field(ge=0, le=86400)] | None = None
    """Tries in a row that must fail. Times `periodSeconds`, that of `startupProbe` is what a start may take."""
    exec: Anything | None = None
    """Command. Not for the engine."""
    http_get: Anything | None = None
    """Request. Not for the engine."""
    tcp_socket: Anything | None = None
    """Port. Not for the engine."""
    grpc: Anything | None = None
    """Service. Not for the engine."""


class Lifecycle(OpenObject):
    """Hooks of a container; the other fields are those of a container."""

    pre_stop: Anything | None = None
    """Run before the container ends. Not for the engine, which the operator drains there."""


class Container(OpenObject):
    """A container, or what is merged into the engine's; the other fields are those of a container."""

    name: _PartName
    """Name of the container. `engine` is the engine itself."""
    image: _Text | None = None
    """Image. Not for the engine."""
    command: Annotated[tuple[Annotated[StrictStr, Field(max_length=32768)], ...], Field(max_length=128)] | None = None
    """Command. Not for the engine."""
    args: Annotated[tuple[Annotated[StrictStr, Field(max_length=32768)], ...], Field(max_length=128)] | None = None
    """Arguments. Not for the engine."""
    env: Annotated[tuple[Anything, ...], Field(max_length=128)] | None = None
    """Environment. Not for the engine."""
    volume_mounts: Annotated[tuple[Anything, ...], Field(max_length=32)] | None = None
    """Volumes that it sees. Not for the engine."""
    resources: Resources | None = None
    """Resources."""
    startup_probe: Probe | None = None
    """Until it succeeds, the other probes wait."""
    readiness_probe: Probe | None = None
    """While it fails, the pod gets no requests."""
    liveness_probe: Probe | None = None
    """When it fails, the container is restarted."""
    lifecycle: Lifecycle | None = None
    """Hooks."""
    security_context: Anything | None = None
    """Merged into the operator's own, which satisfies the restricted Pod Security Standard."""


class PodSecurityContext(OpenObject):
    """User of the pods; the other fields are those of a Pod."""

    run_as_user: Annotated[StrictInt, Field(ge=0, le=(1 << 31) - 1)] | None = None
    """Number of the user; 10001 if left out."""
    run_as_non_root: StrictBool | None = None
    """Whether the kubelet refuses to start the pods as root; `true` if left out."""

    rules = (
        Rule.that(
            ~at("runAsUser").is_(0) | at("runAsNonRoot").is_(False),
            "0 is root, whom runAsNonRoot keeps from running, and it is true unless you set it: choose another user, "
            "or set runAsNonRoot to false as well",
            field=".runAsUser",
        ),
    )


_MEMORY: Final = "set spec.engine.memory and spec.cpu.size, which shared memory is derived from, too"
_STORAGE: Final = "set spec.engine.ephemeralStorage"
_PROBED: Final = "the operator sets the request of the probe; set periodSeconds, timeoutSeconds or failureThreshold"

REFUSED: Final[Mapping[tuple[str, ...], str]] = {
    ("image",): "set spec.engine.image",
    ("command",): "the operator starts vLLM; set spec.engine.args, or another spec.engine.image",
    ("args",): "set spec.engine.args, where flags are checked and become part of the cache identity",
    ("env",): "set spec.engine.env",
    ("volumeMounts",): "set spec.engine.podTemplate.volumeMounts",
    ("resources", "requests", "cpu"): "set spec.engine.cpu",
    ("resources", "requests", "memory"): _MEMORY,
    ("resources", "limits", "memory"): _MEMORY,
    ("resources", "requests", "ephemeral-storage"): _STORAGE,
    ("resources", "limits", "ephemeral-storage"): _STORAGE,
    **{
        (f"{probe}Probe", handler): _PROBED
        for probe in ("startup", "readiness", "liveness")
        for handler in ("exec", "httpGet", "tcpSocket", "grpc")
    },
    ("lifecycle", "preStop"): "the operator drains the engine there before it ends",
}
"""Paths in the entry `engine` that the operator owns, and the field to set instead."""


def of_engine(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the entry that is merged into the engine's container."""
    return next((each for each in containers if each["name"] == ENGINE), {})


def amounts(container: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the ``requests`` or ``limits`` of a container, by resource."""
    return (container.get("resources") or {}).get(kind) or {}


def _refusal(path: tuple[str, ...], instead: str) -> Rule:
    """Return the rule that the engine's entry has nothing at a path."""

    def check(containers: Sequence[Mapping[str, Any]]) -> bool:
        found: Any = of_engine(containers)
        for key in path:
            if key not in found:
                return True
            found = found[key]
        return False

    is_amount = path[0] == "resources"
    fields = path[:-1] if is_amount else path
    given = [f"has(each.{'.'.join(fields[:end])})" for end in range(1, len(fields) + 1)]
    given += [f"'{path[-1]}' in each.{'.'.join(fields)}"] if is_amount else []
    return Rule(
        cel=f"self.all(each, each.name != '{ENGINE}' || !({' && '.join(given)}))",
        message=f"{'.'.join(path)} of the container {ENGINE} is not yours to set here: {instead}",
        check=check,
    )


def _none_matches(key: str, pattern: str, message: str) -> Rule:
    """Return the rule that no entry of a list has a reserved text under a key."""
    return Rule(
        cel=f"self.all(each, !each.{key}.matches(r'{pattern}'))",
        message=message,
        check=lambda items: not any(re.search(pattern, item[key]) for item in items),
    )


_OWN_LABELS: Final = r"^(kvtier\.dev/.*|app\.kubernetes\.io/(name|instance|component|managed-by))$"
_OWN_MOUNTS: Final = (
    r"^/+(tmp(/+kvtier(/.*)?)?|dev/+shm|((var/+lib|etc|opt)/+kvtier(-keys|-loras|-compiled)?(/.*)?)?)?/*$"
)

_CONTAINER_NAMES: Final = _none_matches(
    "name",
    "^(install-connector|kvtier-.*)$",
    "the container names install-connector and kvtier-… are the operator's; choose another",
)
_VOLUME_NAMES: Final = _none_matches(
    "name",
    "^(blocks|config|connector|shm|scratch|kvtier-.*)$",
    "the volume names blocks, config, connector, shm, scratch and kvtier-… are the operator's; choose another",
)
_MOUNT_RULES: Final = (
    _none_matches(
        "mountPath", "(^|/)[.][.]?(/|$)", "a mountPath has a part that is . or ..: write the directory itself"
    ),
    _none_matches(
        "mountPath",
        _OWN_MOUNTS,
        "a mountPath is taken: /, /tmp, /tmp/kvtier, /dev/shm, and kvtier… in /var/lib, /etc and /opt are the "
        "operator's; mount at another place, such as /tmp/hf for the model cache or /mnt",
    ),
    _none_matches(
        "mountPath",
        "^/+(dev|var(/+lib)?|etc|opt)/*$",
        "a mountPath is too high: in /dev, /var, /var/lib, /etc and /opt are directories of the operator and of the "
        "image; mount below, such as /opt/models",
    ),
)
_LABELS: Final = Rule(
    cel=f"self.all(key, !key.matches(r'{_OWN_LABELS}'))",
    message="labels under kvtier.dev/ and app.kubernetes.io/{name,instance,component,managed-by} are the operator's, "
    "which finds its pods by them; choose another key",
    check=lambda labels: not any(re.match(_OWN_LABELS, key) for key in labels),
)
_INIT_IMAGES: Final = Rule(
    cel=f"self.all(each, each.name != '{ENGINE}' && has(each.image))",
    message=f"every init container needs an image, and another name than {ENGINE}",
    check=lambda containers: all(each["name"] != ENGINE and "image" in each for each in containers),
)
_IMAGES: Final = Rule(
    cel=f"self.all(each, each.name == '{ENGINE}' || has(each.image))",
    message=f"every container needs an image, but for {ENGINE}, which is the engine itself",
    check=lambda containers: all(each["name"] == ENGINE or "image" in each for each in containers),
)

_TOLERATIONS: Final = Rule(
    message="a toleration needs a key, or the operator Exists, which tolerates every taint",
    check=lambda found: all(each.get("key") or each.get("operator") == "Exists" for each in found),
)
_VOLUME_SOURCES: Final = Rule(
    message="a volume needs one source beside its name, such as emptyDir, secret or persistentVolumeClaim",
    check=lambda volumes: all(len(each.keys() - {"name"}) == 1 for each in volumes),
)

_Names = Annotated[tuple[Annotated[dict[str, Any], Pasted(Named)], ...], Field(max_length=32), Keyed("name")]
_Containers = Annotated[tuple[Annotated[dict[str, Any], Pasted(Container)], ...], Field(max_length=16), Keyed("name")]


class PodTemplate(OpenObject):
    """Additions to the engine pods; lists of named things are merged by name.

    The fields are those of a Pod, also those that are not listed here.
    """

    labels: Annotated[Labels, Checked((_LABELS,))] = Field(default_factory=dict)
    """More labels of the pods."""
    annotations: Annotations = Field(default_factory=dict)
    """More annotations of the pods."""
    node_selector: Labels = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[tuple[dict[str, Any], ...], Field(max_length=64), Checked((_TOLERATIONS,))] = ()
    """Taints that the pods put up with."""
    affinity: Annotated[Mapping[str, Anything], Field(max_length=8)] | None = None
    """Nodes and other pods that the pods prefer or need."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods; the cluster's default if left out."""
    scheduler_name: ObjectName | None = None
    """Scheduler that places the pods; the cluster's default if left out."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods, which you make, such as one that a cloud's workload identity knows. Left out, the
    operator makes one without any right."""
    resource_claims: _Names = ()
    """Devices that dynamic resource allocation finds for the pods. For the engine's accelerators, also set
    `accelerator.resource` to `claim`."""
    termination_grace_period_seconds: Annotated[StrictInt, Field(ge=45, le=3600)] | None = None
    """Seconds that a pod has to end; 90 if left out. Ten until no more requests come and 20 for the end of vLLM's
    processes. The rest is for requests that run and blocks that wait to be written: other blocks are computed again
    where they are needed."""
    host_network: StrictBool | None = None
    """Whether the pods use the network of the node: one engine for each node then, at port 8000. Breaks the restricted
    Pod Security Standard, so the namespace must allow it."""
    init_containers: Annotated[_Containers, Checked((_CONTAINER_NAMES, _INIT_IMAGES))] = ()
    """More containers that run before the engine, after the operator's own; with `restartPolicy: Always`, beside it."""
    containers: Annotated[
        _Containers, Checked((_CONTAINER_NAMES, *(_refusal(*each) for each in REFUSED.items()), _IMAGES))
    ] = ()
    """More containers of the pods. The entry named `engine` is merged into the engine's own container: resources,
    thresholds of its probes, security context."""
    image_pull_secrets: _Names = ()
    """Secrets with the registry's credentials."""
    security_context: Annotated[dict[str, Any], Pasted(PodSecurityContext)] | None = None
    """Security context of the pods, such as `fsGroup` for the volume's permissions; merged into the operator's own,
    which satisfies the restricted Pod Security Standard."""
    volumes: Annotated[_Names, Checked((_VOLUME_NAMES, _VOLUME_SOURCES))] = ()
    """More volumes of the pods."""
    volume_mounts: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(VolumeMount)], ...],
        Field(max_length=32),
        Keyed("mountPath"),
        Checked(_MOUNT_RULES),
    ] = ()
    """Where the engine sees those volumes."""

    rules = (
        Rule(
            cel="!has(self.initContainers) || !has(self.containers) || self.initContainers.all(first, "
            "self.containers.all(each, each.name != first.name))",
            message="a container has the name of another one in spec.engine.podTemplate.initContainers: rename it",
            check=lambda template: (
                not {each["name"] for each in template.init_containers} & {each["name"] for each in template.containers}
            ),
            field=".containers",
        ),
    )

    def pod_fields(self) -> dict[str, Any]:
        """Return the given fields of a pod, without those that are merged into the operator's own."""
        return {field: value for field, value in self.to_manifest().items() if value and field not in _MERGED}


_MERGED: Final = frozenset(
    {"labels", "annotations", "securityContext", "containers", "initContainers", "volumes", "volumeMounts"}
)
