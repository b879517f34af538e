# SPDX-License-Identifier: Apache-2.0
"""Every name the operator gives: objects, labels, selectors, annotations, paths in the pod.

Pure. A name is spelt once, here, because a label typed twice is a selector that one day matches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

GROUP: Final = "kvtier.dev"
VERSION: Final = "v1beta1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "KVCacheTier"
PLURAL: Final = "kvcachetiers"

FIELD_MANAGER: Final = "kvtier-operator"
"""Owner of the fields we apply, and value of ``app.kubernetes.io/managed-by``."""

LABEL_TIER: Final = f"{GROUP}/tier"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_TEMPLATE_HASH: Final = "pod-template-hash"
"""Given to pods by the controller of Deployments."""
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
ANNOTATION_DECISIONS: Final = f"{GROUP}/decisions"
ANNOTATION_IMAGE: Final = f"{GROUP}/connector-image"
"""On the ConfigMap of engines of another owner: image that installs the connector in them."""
ANNOTATION_CONFIG_DIGEST: Final = f"{GROUP}/config-digest"
ANNOTATION_FILES_DIGEST: Final = f"{GROUP}/files-digest"
"""On the pods: digest of the files that only another connector than kvtier's own reads."""
ANNOTATION_RENDERED: Final = f"{GROUP}/rendered"
"""On the Deployment: what its pods were made from, so that another operator version leaves them alone."""
ANNOTATION_PREFLIGHT: Final = f"{GROUP}/preflight"
"""On the Job: which claim, used by whom, it tries."""
ANNOTATION_RESTART: Final = f"{GROUP}/restart"
"""On the resource, for people: any new value rolls the engines once. On the pods: the value they were made for."""
ANNOTATION_PAUSED: Final = f"{GROUP}/paused"
"""On the resource, for people: ``true`` is the same as ``spec.paused``."""

COMPONENT_ENGINE: Final = "engine"
COMPONENT_JANITOR: Final = "janitor"
COMPONENT_STORE: Final = "store"
COMPONENT_PREFLIGHT: Final = "preflight"
COMPONENT_ROUTER: Final = "router"
COMPONENT_VOLUME: Final = "volume"

ENGINE_CONTAINER: Final = "engine"
PREFLIGHT_CONTAINER: Final = "preflight"
JANITOR_CONTAINER: Final = "janitor"
ROUTER_CONTAINER: Final = "router"
INSTALL_CONTAINER: Final = "install-connector"
REDIS_CHECK_CONTAINER: Final = "kvtier-redis-check"
HTTP_PORT: Final = 8000
EVERY_IPV4_ADDRESS: Final = "0.0.0.0"  # noqa: S104  of a pod: its Service and the kubelet must reach it
EVERY_ADDRESS: Final = "::"
"""Of a pod, of IPv4 as well as of IPv6; a node without IPv6 has no such thing."""

VOLUME_MOUNT: Final = "/var/lib/kvtier"
CONFIG_MOUNT: Final = "/etc/kvtier"
KEYS_MOUNT: Final = "/etc/kvtier-keys"
JANITOR_CONFIG_MOUNT: Final = "/etc/kvtier-janitor"
CONNECTOR_MOUNT: Final = "/opt/kvtier"
LORA_MOUNT: Final = "/opt/kvtier-loras"
COMPILED_MOUNT: Final = "/var/lib/kvtier-compiled"
SHM_MOUNT: Final = "/dev/shm"  # noqa: S108  the path inside the pod that vLLM maps its CPU tier from
SCRATCH_MOUNT: Final = "/tmp"  # noqa: S108  an emptyDir of the pod: no other pod can write there


@dataclass(frozen=True, kw_only=True, order=True)
class TierName:
    """Which KVCacheTier to look at, whatever its incarnation."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Return ``namespace/name``, as kubectl and people write it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True, order=True)
class TierRef(TierName):
    """Which KVCacheTier, with the uid that tells it from a namesake created later."""

    uid: str


@dataclass(frozen=True, kw_only=True, order=True)
class ObjectKey:
    """One object by what the API server knows it by; its namespace is its tier's."""

    api_version: str
    kind: str
    name: str

    def __str__(self) -> str:
        """Return ``Kind/name`` for messages."""
        return f"{self.kind}/{self.name}"


RBAC: Final = "rbac.authorization.k8s.io/v1"
COORDINATION: Final = "coordination.k8s.io/v1"
LEASE_KIND: Final = "Lease"
ENGINE_STATE: Final = f"{SCRATCH_MOUNT}/kvtier"
"""Where an engine says, for its startup probe, whether it serves with the volume."""
CONFIG_VARIABLE: Final = "KVTIER_CONFIG_DIGEST"
"""Variable of an attached engine: digest of the configuration that it was attached with; another restarts it."""
MODEL_CACHE: Final = f"{SCRATCH_MOUNT}/hf"
"""Where engines keep what they download; a volume of the user's mounted there outlives the pod."""

CLAIM_KIND: Final = "PersistentVolumeClaim"
INFERENCE_POOL: Final = "inference.networking.k8s.io/v1"
POOL_KIND: Final = "InferencePool"


def tier_ref(body: Mapping[str, Any]) -> TierRef:
    """Return the reference of a KVCacheTier body; a body that never saw a cluster gets an empty uid."""
    metadata = body["metadata"]
    return TierRef(namespace=metadata.get("namespace", "default"), name=metadata["name"], uid=metadata.get("uid", ""))


def _suffixed(suffix: str) -> Callable[[TierName], str]:
    return lambda tier: f"{tier.name}-{suffix}"


engine: Final = _suffixed("engine")
"""Name of the Deployment, its Service, ServiceAccount and PodDisruptionBudget."""
config: Final = _suffixed("connector")
"""Name of the ConfigMap with the connector's settings."""
preflight: Final = _suffixed("preflight")
"""Name of the Job that tries a new claim."""
janitor: Final = _suffixed("janitor")
"""Name of the janitor's Deployment, ConfigMap, Service, ServiceAccount, Role, RoleBinding and Lease."""
router: Final = _suffixed("router")
"""Name of the router's Deployment, Service, ServiceAccount, Role, RoleBinding and PodDisruptionBudget."""
redis: Final = _suffixed("redis")
"""Name of the Deployment and Service of the Redis that the operator makes for trying LMCache out."""
mooncake_master: Final = _suffixed("mooncake")
"""Name of the Deployment and Service of Mooncake's master."""
claim: Final = _suffixed("blocks")
"""Name of the claim the operator makes when the tier does not bring one."""


def _volume_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = body.get("spec")
    volume = spec.get("volume") if isinstance(spec, Mapping) else None
    return volume if isinstance(volume, Mapping) else {}


def existing_claim_of(body: Mapping[str, Any]) -> str | None:
    """Return the claim of the user's own that a KVCacheTier body names, whatever else is wrong with it."""
    existing = _volume_of(body).get("existingClaim")
    return str(existing) if existing else None


def deletes_claim(body: Mapping[str, Any]) -> bool:
    """Tell whether a claim of the operator's goes with its KVCacheTier, whatever else is wrong with the body."""
    return bool(_volume_of(body).get("deletionPolicy") == "Delete")


def claim_of(body: Mapping[str, Any]) -> str:
    """Return the name of the claim that a KVCacheTier body uses, whatever else is wrong with it."""
    return existing_claim_of(body) or claim(tier_ref(body))


def deployment_key(name: str) -> ObjectKey:
    """Return a Deployment by its name."""
    return ObjectKey(api_version="apps/v1", kind="Deployment", name=name)


def claim_key(name: str) -> ObjectKey:
    """Return a claim by its name."""
    return ObjectKey(api_version="v1", kind=CLAIM_KIND, name=name)


def preflight_key(tier: TierRef) -> ObjectKey:
    """Return the Job that tries a claim."""
    return ObjectKey(api_version="batch/v1", kind="Job", name=preflight(tier))


def pool_key(tier: TierRef) -> ObjectKey:
    """Return the InferencePool: of a kind that a cluster need not have, and read only where it is asked for."""
    return ObjectKey(api_version=INFERENCE_POOL, kind=POOL_KIND, name=engine(tier))


def selector(tier: TierRef, component: str = COMPONENT_ENGINE) -> dict[str, str]:
    """Labels that find the pods of one component; never a user's label, because selectors cannot change."""
    return {LABEL_TIER: tier.name, LABEL_COMPONENT: component}


def selector_text(tier: TierRef) -> str:
    """Return the selector as the scale subresource and kubectl write it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector(tier).items()))


def labels(tier: TierRef, component: str) -> dict[str, str]:
    """Labels of every object the operator makes; the last two say that the object is ours."""
    return {
        "app.kubernetes.io/name": "kvtier",
        "app.kubernetes.io/instance": tier.name,
        LABEL_COMPONENT: component,
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_TIER: tier.name,
    }


def owner_reference(tier: TierRef) -> dict[str, Any]:
    """Return the reference that lets the garbage collector delete a child with its tier, operator up or down."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": tier.name,
        "uid": tier.uid,
        "controller": True,
        # A tier must go at once even while a child waits for something.
        "blockOwnerDeletion": False,
    }


def metadata(tier: TierRef, name: str, *, component: str, is_owned: bool = True) -> dict[str, Any]:
    """Return the metadata of one child.

    An object that is not owned survives its tier; neither is one rendered for a tier that no cluster holds yet, since
    there is no uid to refer to.
    """
    return {
        "name": name,
        "namespace": tier.namespace,
        "labels": labels(tier, component),
        **({"ownerReferences": [owner_reference(tier)]} if is_owned and tier.uid else {}),
    }


def key_of(manifest: Mapping[str, Any]) -> ObjectKey:
    """Return what the API server knows an object by."""
    return ObjectKey(api_version=manifest["apiVersion"], kind=manifest["kind"], name=manifest["metadata"]["name"])


def is_ours(manifest: Mapping[str, Any], tier: TierRef) -> bool:
    """Tell whether a live object under one of the tier's own names may be written.

    The tier controls it, or nothing does and it carries our labels: a claim that an earlier tier left, or an object
    that a backup has restored.
    """
    if controllers := _controllers(manifest):
        return controllers == [tier.uid]
    of_object = manifest.get("metadata", {}).get("labels") or {}
    return of_object.get(LABEL_MANAGED_BY) == FIELD_MANAGER and of_object.get(LABEL_TIER) == tier.name


def is_pod_of(pod: Mapping[str, Any], deployment: str) -> bool:
    """Tell whether a pod is one of a Deployment's: a copy of its template in other hands has the same labels.

    The name of its ReplicaSet tells: the name of the Deployment and the hash of the template that the pod carries. A
    pod whose ReplicaSet is not there is deleted by the garbage collector.
    """
    metadata = pod.get("metadata", {})
    template_hash = (metadata.get("labels") or {}).get(LABEL_TEMPLATE_HASH, "")
    return bool(template_hash) and any(
        (reference.get("kind"), reference.get("name")) == ("ReplicaSet", f"{deployment}-{template_hash}")
        for reference in metadata.get("ownerReferences", ())
        if reference.get("controller")
    )


def is_controlled(manifest: Mapping[str, Any], tier: TierRef) -> bool:
    """Tell whether the tier controls a live object. Labels do not count: `kubectl expose` and people copy them."""
    return tier.uid in _controllers(manifest)


def _controllers(manifest: Mapping[str, Any]) -> list[str]:
    references = manifest.get("metadata", {}).get("ownerReferences", ())
    return [reference.get("uid", "") for reference in references if reference.get("controller")]
