# SPDX-License-Identifier: Apache-2.0
"""Settings that all pods of a tier share, the user's additions to them, and the Pod Security Standard. Pure.

A user's pod template is laid over the rendered pod by the rules of server-side apply. Objects are merged field by
field. Lists that Kubernetes keeps as maps are merged item by item, told apart by their keys; any other list is replaced
as a whole. Fields that must not be replaced were refused with the spec.

Pods satisfy the `restricted` Pod Security Standard by default. A namespace that enforces it creates no other pods, so
`warning` names the parts of a template that break it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.api import pod_template
from kvtier_operator.api.engine_spec import CLAIMED
from kvtier_operator.api.pod_template import PodTemplate
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.plan import TierPlan

_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "claims": ("name",),
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "protocol"),
    "resourceClaims": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists that are maps, and the fields that tell their items apart."""

_DEFAULTS: Final = {"protocol": "TCP"}
"""Of fields that tell items apart."""


def lay_over(base: Mapping[str, Any], added: Mapping[str, Any]) -> Manifest:
    """Return an object with what was added to it; neither is changed."""
    return {
        **base,
        **{field: _merged(field, base[field], value) if field in base else value for field, value in added.items()},
    }


def _merged(field: str, base: Any, added: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(added, Mapping):
        return lay_over(base, added)
    keys = _KEYS.get(field)
    if keys is None or not isinstance(base, (list, tuple)):
        return added
    items = {_key(item, keys): item for item in base}
    for item in added:
        key = _key(item, keys)
        items[key] = lay_over(items[key], item) if key in items else item
    return list(items.values())


def _key(item: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(item.get(key, _DEFAULTS.get(key)) for key in keys)


USER_ID: Final = 10001
"""Any non-root number will do; the volume's files belong to the group of the same number."""


def security_context(template: PodTemplate, *, mounts_volume: bool = True) -> Manifest:
    """Return the security context of every pod of a tier: all are of one user, and of one group on the volume."""
    # Changing the owner of millions of block files at each start would take longer than the start.
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        **({"fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"} if mounts_volume else {}),
        "seccompProfile": {"type": "RuntimeDefault"},
        **(template.security_context or {}),
    }


_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"


def beside_engines(plan: TierPlan, affinity: Mapping[str, Any] | None = None) -> Manifest:
    """Return an affinity, besides what it says already, to the node of the tier's engines."""
    external = plan.spec.engine.external
    labels = names.selector(plan.tier) if external is None else dict(external.selector.match_labels)
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    of_pods = (affinity or {}).get("podAffinity") or {}
    return {**(affinity or {}), "podAffinity": {**of_pods, _REQUIRED: [*(of_pods.get(_REQUIRED) or ()), term]}}


def hardened(added: Mapping[str, Any] | None = None) -> Manifest:
    """Return the security context of every container of ours, before what a user adds is laid over it."""
    return {**unprivileged(added or {}), "readOnlyRootFilesystem": True}


def of_user(container: Manifest) -> Manifest:
    """Return a container of the user's with what it does not say itself: as few rights as the engine."""
    own = {
        "name": container["name"],
        "image": container["image"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": unprivileged(container),
    }
    return lay_over(own, container)


def unprivileged(container: Mapping[str, Any]) -> Manifest:
    """Return what a container may not do, unless it is to do everything: Kubernetes takes no such contradiction."""
    if (container.get("securityContext") or {}).get("privileged"):
        return {}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def account(tier: TierRef, name: str, component: str, *rules: Manifest) -> tuple[Manifest, Manifest, Manifest]:
    """Return the ServiceAccount of a component, its Role and their RoleBinding, all of one name."""

    def metadata() -> Manifest:
        return names.metadata(tier, name, component=component)

    return (
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(),
            # Pods ask for the token by themselves, so that nothing else that uses the account gets one.
            "automountServiceAccountToken": False,
        },
        {"apiVersion": names.RBAC, "kind": "Role", "metadata": metadata(), "rules": list(rules)},
        {
            "apiVersion": names.RBAC,
            "kind": "RoleBinding",
            "metadata": metadata(),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": tier.namespace}],
        },
    )


def port(name: str, number: int, target: str | int) -> Manifest:
    """Return a port of a Service."""
    return {"name": name, "port": number, "targetPort": target, "protocol": "TCP"}


def service(  # noqa: PLR0913  each by its name
    tier: TierRef,
    name: str,
    component: str,
    ports: Iterable[Manifest],
    *,
    kind: str = "ClusterIP",
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the Service in front of the pods of a component."""
    added = {"annotations": dict(annotations)} if annotations else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**names.metadata(tier, name, component=component), **added},
        "spec": {"type": kind, "selector": names.selector(tier, component), "ports": list(ports)},
    }


def disruption_budget(tier: TierRef, name: str, component: str, limits: Manifest) -> Manifest:
    """Return the budget of a component; a pod that does not serve never holds up a drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(tier, name, component=component),
        "spec": {
            **limits,
            "selector": {"matchLabels": names.selector(tier, component)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def deployment(  # noqa: PLR0913  each by its name
    tier: TierRef,
    name: str,
    component: str,
    pod: Manifest,
    *,
    replicas: int = 1,
    strategy: Manifest | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Manifest:
    """Return the Deployment of a small component beside the engines, whose old pod goes before the new one comes."""
    added = {"annotations": dict(annotations)} if annotations else {}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(tier, name, component=component),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": names.selector(tier, component)},
            "strategy": strategy or {"type": "Recreate"},
            "revisionHistoryLimit": 3,
            "template": {"metadata": {"labels": names.labels(tier, component), **added}, "spec": pod},
        },
    }


def pull_secrets(template: PodTemplate) -> Manifest:
    """Return the secrets that images are pulled with, as a field of a pod."""
    return {"imagePullSecrets": list(template.image_pull_secrets)} if template.image_pull_secrets else {}


def service_account(plan: TierPlan) -> str:
    """Return the account of the pods that mount the volume for engines."""
    return plan.spec.engine.pod_template.service_account_name or names.engine(plan.tier)


def engine_resources(plan: TierPlan) -> Manifest:
    """Return the resources of the engine's container."""
    engine = plan.spec.engine
    memory = quantity.format_bytes(plan.sizing.memory_bytes)
    devices = {resource: str(count) for resource, count in engine.accelerator.of_plugin.items()}
    storage = quantity.format_bytes(engine.ephemeral_bytes or plan.sizing.ephemeral_bytes)
    limit = {} if engine.ephemeral_bytes is None else {"ephemeral-storage": storage}
    claims = engine.pod_template.resource_claims if engine.accelerator.resource == CLAIMED else ()
    return {
        **({"claims": [{"name": claim["name"]} for claim in claims]} if claims else {}),
        "requests": {"cpu": engine.cpu, "memory": memory, "ephemeral-storage": storage, **devices},
        # Request equals limit: pinned pages cannot be reclaimed, so a node must never promise them twice.
        "limits": {"memory": memory, **limit, **devices},
    }


def tolerations(plan: TierPlan) -> list[Manifest]:
    """Return the taints that a pod must put up with to run wherever an engine does, though it has no device."""
    given = list(plan.spec.engine.pod_template.tolerations)
    for resource in plan.spec.engine.accelerator.of_plugin:
        # Kubernetes adds this one to pods that ask for the device, so the template need not have it.
        of_devices = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
        given += [] if of_devices in given else [of_devices]
    return given


_VOLUMES: Final = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim"),
        *("projected", "secret"),
    }
)
_PROFILES: Final = frozenset({"RuntimeDefault", "Localhost"})


def warning(template: PodTemplate) -> str:
    """Say what breaks the standard, and what to do; empty where nothing does."""
    found = list(objections(template))
    if not found:
        return ""
    return (
        f"the engine pods leave the restricted Pod Security Standard ({', '.join(found)}): a namespace that enforces "
        "it creates none of them; label it pod-security.kubernetes.io/enforce=privileged, or take this out of "
        "spec.engine.podTemplate"
    )


def objections(template: PodTemplate) -> Iterator[str]:
    """Yield each thing that breaks the standard, by its field."""
    if template.host_network:
        yield "hostNetwork"
    for volume in template.volumes:
        if strange := sorted(volume.keys() - _VOLUMES - {"name"}):
            yield f"{strange[0]} of the volume {volume['name']}"
    pod = security_context(template)
    added = pod_template.of_engine(template.containers)
    engine = lay_over({"name": pod_template.ENGINE, "securityContext": hardened(added)}, added)
    beside = [each for each in template.containers if each["name"] != pod_template.ENGINE]
    for container in (engine, *map(of_user, (*beside, *template.init_containers))):
        for objection in _of_container(container, pod):
            yield f"{objection} of the container {container['name']}"
    if not pod["runAsNonRoot"]:
        yield "runAsNonRoot of the pods"


def _of_container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    context = container.get("securityContext") or {}
    capabilities = context.get("capabilities") or {}
    if context.get("privileged"):
        yield "privileged"
    if context.get("allowPrivilegeEscalation", True):
        yield "allowPrivilegeEscalation"
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities.drop"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if context.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser"
    if (context.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in _PROFILES:
        yield "seccompProfile"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
