# SPDX-License-Identifier: Apache-2.0
"""``spec.engine.env`` and ``spec.engine.podTemplate``: what a user may add to the engine pods. Pure.

These are objects of Kubernetes' own API, copied into the pod as they are. The schema here goes as deep as a typing
mistake is likely; below that, any field is kept and the API server judges it when the pods are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, StrictStr

from kvtier_operator.api.containers import Anything, Containers, InitContainers, PortionName
from kvtier_operator.api.rules import ApiModel, Checked, Keyed, Pasted, Rule
from kvtier_operator.api.scalars import LabelKey, LabelValue, ObjectName

_Text = Annotated[StrictStr, Field(max_length=1024)]
_Labels = Annotated[Mapping[LabelKey, LabelValue], Field(max_length=64)]


class KeyOf(ApiModel):
    """One key of a Secret or ConfigMap."""

    name: ObjectName
    """Name of the Secret or ConfigMap."""
    key: Annotated[StrictStr, Field(min_length=1, max_length=253)]
    """Key in it."""
    optional: StrictBool | None = None
    """Whether the pod may start without it."""


class PodField(ApiModel):
    """One field of the pod."""

    api_version: _Text | None = None
    """Version of the API that the path is written for; `v1` if left out."""
    field_path: _Text
    """Path of the field, such as `status.podIP`."""


class ContainerResource(ApiModel):
    """One resource of the container."""

    container_name: _Text | None = None
    """Name of the container; the engine's own if left out."""
    resource: _Text
    """Resource, such as `limits.memory`."""
    divisor: _Text | None = None
    """Unit of the value, as a quantity; `1` if left out."""


class VariableSource(ApiModel):
    """Where the value of an environment variable comes from: exactly one of these."""

    secret_key_ref: KeyOf | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyOf | None = None
    """A key of a ConfigMap."""
    field_ref: PodField | None = None
    """A field of the pod."""
    resource_field_ref: ContainerResource | None = None
    """A resource of the container."""

    rules = (
        Rule(
            cel="[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef), has(self.resourceFieldRef)]"
            ".filter(given, given).size() == 1",
            message="give exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef",
            check=lambda source: len(source.to_manifest()) == 1,
        ),
    )


class Variable(ApiModel):
    """One environment variable."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_.-][A-Za-z0-9_.-]*$")]
    """Name of the variable."""
    value: Annotated[StrictStr, Field(max_length=32768)] | None = None
    """Value; empty if left out. Exactly as vLLM reads it, so numbers need quotes."""
    value_from: VariableSource | None = None
    """Where the value comes from instead."""

    rules = (Rule.not_both("value", "value_from"),)


class Toleration(ApiModel):
    """A taint that the pods put up with."""

    key: _Text | None = None
    """Key of the taint; every key if left out, and then `operator` is `Exists`."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the value is compared; `Equal` if left out."""
    value: _Text | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; every effect if left out."""
    toleration_seconds: Annotated[StrictInt, Field(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    """Seconds until a pod leaves a node with a NoExecute taint; it stays if left out."""


class Affinity(ApiModel):
    """Which nodes and which other pods the pods prefer or need; the fields are those of a Pod."""

    node_affinity: Anything | None = None
    """Rules about nodes."""
    pod_affinity: Anything | None = None
    """Pods to be near to."""
    pod_anti_affinity: Anything | None = None
    """Pods to keep away from."""


class SpreadConstraint(ApiModel):
    """How evenly the pods spread over zones or nodes."""

    max_skew: Annotated[StrictInt, Field(ge=1)]
    """How many pods more than the emptiest a zone may have."""
    topology_key: LabelKey
    """Node label whose values are the zones, such as `topology.kubernetes.io/zone`."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What happens to a pod that would break it."""
    label_selector: Anything | None = None
    """The pods that count."""
    match_label_keys: Annotated[tuple[LabelKey, ...], Field(max_length=16)] | None = None
    """Labels of the pod itself that also select the pods that count."""
    min_domains: Annotated[StrictInt, Field(ge=1, le=(1 << 31) - 1)] | None = None
    """Zones that must exist."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether nodes outside the node affinity count."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether tainted nodes count."""


class SecretName(ApiModel):
    """A Secret by name."""

    name: ObjectName
    """Name of the Secret."""


class PodVolume(ApiModel):
    """A volume of the pod; the fields beside `name` are those of a Pod."""

    # Thirty kinds of volume, more with every release: the pod's own schema knows them.
    model_config = ConfigDict(extra="allow")

    name: PortionName
    """Name of the volume, which `volumeMounts` refer to."""


class VolumeMount(ApiModel):
    """Where the engine sees a volume."""

    name: _Text
    """Name of an entry of `volumes`."""
    mount_path: Annotated[StrictStr, Field(min_length=1, max_length=1024, pattern=r"^/[^:]*$")]
    """Directory in the container."""
    sub_path: _Text | None = None
    """Directory inside the volume; its root if left out."""
    sub_path_expr: _Text | None = None
    """The same with `$(VARIABLE)` references."""
    read_only: StrictBool | None = None
    """Whether the engine may not write."""
    recursive_read_only: Literal["Disabled", "IfPossible", "Enabled"] | None = None
    """Whether what is mounted below is read-only too."""
    mount_propagation: Literal["None", "HostToContainer", "Bidirectional"] | None = None
    """Whether mounts made later show on the other side."""


OWN_MOUNTS: Final = re.compile(
    r"^/+(tmp(/+kvtier(/.*)?)?|dev/+shm|((var/+lib|etc|opt)/+kvtier(-keys|-loras)?(/.*)?)?)?/*$"
)
"""Mount paths that the operator takes."""

ABOVE_OWN_MOUNTS: Final = re.compile(r"^/+(dev|var(/+lib)?|etc|opt)/*$")
"""What lies above them: a volume there hides what every container needs, and one that is read-only has no room for
ours."""

DETOURS: Final = re.compile(r"(^|/)[.][.]?(/|$)")
"""Parts of a path by which it has more spellings than one."""

OWN_VOLUMES: Final = re.compile(r"^(blocks|config|connector|shm|scratch|kvtier-.*)$")
"""Volumes that the operator gives the pods."""

OWN_LABELS: Final = re.compile(r"^(kvtier\.dev/.*|app\.kubernetes\.io/(name|instance|component|managed-by))$")
"""Labels that the operator sets on every pod."""

MOUNTS_ARE_PLAIN: Final = Rule(
    cel=f"self.all(mount, !mount.mountPath.matches('{DETOURS.pattern}'))",
    message="a mountPath has a part that is . or ..: write the directory itself",
    check=lambda mounts: not any(DETOURS.search(mount["mountPath"]) for mount in mounts),
)

MOUNTS_ARE_FREE: Final = Rule(
    cel=f"self.all(mount, !mount.mountPath.matches(r'{OWN_MOUNTS.pattern}'))",
    message="a mountPath is taken: /, /tmp, /tmp/kvtier, /dev/shm, /var/lib/kvtier, /etc/kvtier, /etc/kvtier-keys, "
    "/opt/kvtier and /opt/kvtier-loras are the operator's; mount somewhere else, such as /tmp/hf for the model cache "
    "or /mnt",
    check=lambda mounts: not any(OWN_MOUNTS.match(mount["mountPath"]) for mount in mounts),
)

MOUNTS_ARE_BESIDE: Final = Rule(
    cel=f"self.all(mount, !mount.mountPath.matches('{ABOVE_OWN_MOUNTS.pattern}'))",
    message="a mountPath is too high: in /dev, /var, /var/lib, /etc and /opt are directories of the operator and of "
    "the image; mount below, such as /opt/models",
    check=lambda mounts: not any(ABOVE_OWN_MOUNTS.match(mount["mountPath"]) for mount in mounts),
)

LABELS_ARE_FREE: Final = Rule(
    cel=f"self.all(key, !key.matches(r'{OWN_LABELS.pattern}'))",
    message="labels under kvtier.dev/ and app.kubernetes.io/{name,instance,component,managed-by} are the operator's, "
    "which finds its pods by them; choose another key",
    check=lambda labels: not any(OWN_LABELS.match(key) for key in labels),
)

VOLUME_NAMES_ARE_FREE: Final = Rule(
    cel=f"self.all(volume, !volume.name.matches('{OWN_VOLUMES.pattern}'))",
    message="the volume names blocks, config, connector, shm, scratch and kvtier-… are the operator's; choose another",
    check=lambda volumes: not any(OWN_VOLUMES.match(volume["name"]) for volume in volumes),
)


class PodSecurityContext(ApiModel):
    """Who the pods run as; the fields beside these are those of a Pod."""

    # What there is besides, such as seLinuxOptions and sysctls, is for the pod's own schema to judge.
    model_config = ConfigDict(extra="allow")

    run_as_user: Annotated[StrictInt, Field(ge=0, le=(1 << 31) - 1)] | None = None
    """Number of the user; 10001 if left out."""
    run_as_non_root: StrictBool | None = None
    """Whether the kubelet refuses to start the pods as root; `true` if left out."""

    rules = (
        Rule(
            cel="!has(self.runAsUser) || self.runAsUser != 0 || (has(self.runAsNonRoot) && !self.runAsNonRoot)",
            message="0 is root, whom runAsNonRoot keeps from running, and it is true unless you set it: choose another "
            "user, or set runAsNonRoot to false as well",
            check=lambda context: context.run_as_user != 0 or context.run_as_non_root is False,
            field=".runAsUser",
        ),
    )


class ResourceClaim(ApiModel):
    """Devices that dynamic resource allocation finds for a pod: exactly one of the two names beside its own."""

    name: PortionName
    """Name of the claim within the pod, which `resources.claims` of a container refers to."""
    resource_claim_name: ObjectName | None = None
    """ResourceClaim that all pods share."""
    resource_claim_template_name: ObjectName | None = None
    """ResourceClaimTemplate that each pod gets a claim of its own from."""

    rules = (Rule.exactly_one("resource_claim_name", "resource_claim_template_name"),)


class PodTemplate(ApiModel):
    """What the engine pods have beside what the operator gives them; lists of named things are merged by name.

    The fields are those of a Pod.
    """

    labels: Annotated[_Labels, Checked((LABELS_ARE_FREE,))] = Field(default_factory=dict)
    """More labels of the pods."""
    annotations: Annotated[Mapping[LabelKey, Annotated[StrictStr, Field(max_length=16384)]], Field(max_length=64)] = (
        Field(default_factory=dict)
    )
    """More annotations of the pods."""
    node_selector: _Labels = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: Annotated[tuple[Annotated[dict[str, Any], Pasted(Toleration)], ...], Field(max_length=64)] = ()
    """Taints that the pods put up with."""
    affinity: Annotated[dict[str, Any], Pasted(Affinity)] | None = None
    """Which nodes and which other pods the pods prefer or need."""
    topology_spread_constraints: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(SpreadConstraint)], ...], Field(max_length=16)
    ] = ()
    """How evenly the pods spread over zones or nodes."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods; the cluster's default if left out."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods, such as `nvidia`; the cluster's default if left out."""
    scheduler_name: ObjectName | None = None
    """Scheduler that places the pods; the cluster's default if left out."""
    service_account_name: ObjectName | None = None
    """ServiceAccount of the pods, which you make, such as one that a cloud's workload identity knows. Left out, the
    operator makes one without any right."""
    automount_service_account_token: StrictBool | None = None
    """Whether the pods get a token for the Kubernetes API; not if left out."""
    resource_claims: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(ResourceClaim)], ...],
        Field(max_length=16),
        Keyed("name"),
    ] = ()
    """Devices that dynamic resource allocation finds for the pods. For the engine's accelerators, also set
    `accelerator.resource` to `claim`."""
    termination_grace_period_seconds: Annotated[StrictInt, Field(ge=45, le=3600)] | None = None
    """Seconds that a pod has to end; 90 if left out. Ten until nobody sends it requests any more, 20 for the end of
    vLLM's processes, and the rest for requests that run and blocks that wait to be written: what the volume has not
    taken by then is computed again where it is needed."""
    host_network: StrictBool | None = None
    """Whether the pods use the network of the node: one engine for each node then, at port 8000. Breaks the restricted
    Pod Security Standard, so the namespace must allow it."""
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] | None = None
    """Who resolves names for the pods; `ClusterFirstWithHostNet` with `hostNetwork`, otherwise `ClusterFirst` if left
    out."""
    dns_config: Anything | None = None
    """More about how names are resolved."""
    share_process_namespace: StrictBool | None = None
    """Whether the containers of a pod see each other's processes."""
    init_containers: InitContainers = ()
    """More containers that run before the engine, after the operator's own; with `restartPolicy: Always`, beside it."""
    containers: Containers = ()
    """More containers of the pods. The entry named `engine` is merged into the engine's own container: resources,
    thresholds of its probes, security context."""
    image_pull_secrets: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(SecretName)], ...],
        Field(max_length=16),
        Keyed("name"),
    ] = ()
    """Secrets with the registry's credentials."""
    security_context: Annotated[dict[str, Any], Pasted(PodSecurityContext)] | None = None
    """Security context of the pods, such as `fsGroup` for the volume's permissions; laid over the operator's own, which
    satisfies the restricted Pod Security Standard."""
    volumes: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(PodVolume)], ...],
        Field(max_length=32),
        Keyed("name"),
        Checked((VOLUME_NAMES_ARE_FREE,)),
    ] = ()
    """More volumes of the pods."""
    volume_mounts: Annotated[
        tuple[Annotated[dict[str, Any], Pasted(VolumeMount)], ...],
        Field(max_length=32),
        Keyed("mountPath"),
        Checked((MOUNTS_ARE_PLAIN, MOUNTS_ARE_FREE, MOUNTS_ARE_BESIDE)),
    ] = ()
    """Where the engine sees those volumes."""

    rules = (
        Rule(
            cel="!has(self.volumeMounts) || self.volumeMounts.all(mount, has(self.volumes) && "
            "self.volumes.exists(volume, volume.name == mount.name))",
            message="every volumeMounts[].name must be the name of an entry of volumes",
            check=lambda pod: (
                {mount["name"] for mount in pod.volume_mounts} <= {volume["name"] for volume in pod.volumes}
            ),
            field=".volumeMounts",
        ),
    )

    def pod_fields(self) -> dict[str, Any]:
        """Return what is given of a pod's own fields; containers, volumes and what belongs to them are left out."""
        return {field: value for field, value in self.to_manifest().items() if value and field not in _MERGED}


_MERGED: Final = frozenset(
    {"labels", "annotations", "securityContext", "containers", "initContainers", "volumes", "volumeMounts"}
)
"""Fields that are laid over what the operator gives the pods."""
