# SPDX-License-Identifier: Apache-2.0
"""The kinds that the server knows: built-in ones, and those of CustomResourceDefinitions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtier_localcluster.apiserver.store import schemas
from kvtier_localcluster.apiserver.store.objects import Json, StorageKey, timestamp

CLUSTER_SCOPED = "c"

# plural:Kind:group/version:scope(:short name)
_BUILTIN = """
namespaces:Namespace:v1:c:ns nodes:Node:v1:c:no persistentvolumes:PersistentVolume:v1:c:pv pods:Pod:v1:n:po
services:Service:v1:n:svc configmaps:ConfigMap:v1:n:cm secrets:Secret:v1:n serviceaccounts:ServiceAccount:v1:n:sa
events:Event:v1:n:ev endpoints:Endpoints:v1:n:ep persistentvolumeclaims:PersistentVolumeClaim:v1:n:pvc
limitranges:LimitRange:v1:n:limits resourcequotas:ResourceQuota:v1:n:quota
events:Event:events.k8s.io/v1:n:ev deployments:Deployment:apps/v1:n:deploy statefulsets:StatefulSet:apps/v1:n:sts
daemonsets:DaemonSet:apps/v1:n:ds replicasets:ReplicaSet:apps/v1:n:rs
controllerrevisions:ControllerRevision:apps/v1:n jobs:Job:batch/v1:n cronjobs:CronJob:batch/v1:n:cj
leases:Lease:coordination.k8s.io/v1:n poddisruptionbudgets:PodDisruptionBudget:policy/v1:n:pdb
horizontalpodautoscalers:HorizontalPodAutoscaler:autoscaling/v2:n:hpa ingresses:Ingress:networking.k8s.io/v1:n:ing
networkpolicies:NetworkPolicy:networking.k8s.io/v1:n:netpol endpointslices:EndpointSlice:discovery.k8s.io/v1:n
roles:Role:rbac.authorization.k8s.io/v1:n rolebindings:RoleBinding:rbac.authorization.k8s.io/v1:n
clusterroles:ClusterRole:rbac.authorization.k8s.io/v1:c
clusterrolebindings:ClusterRoleBinding:rbac.authorization.k8s.io/v1:c
storageclasses:StorageClass:storage.k8s.io/v1:c:sc priorityclasses:PriorityClass:scheduling.k8s.io/v1:c:pc
customresourcedefinitions:CustomResourceDefinition:apiextensions.k8s.io/v1:c:crd
mutatingwebhookconfigurations:MutatingWebhookConfiguration:admissionregistration.k8s.io/v1:c
validatingwebhookconfigurations:ValidatingWebhookConfiguration:admissionregistration.k8s.io/v1:c
"""

_IN_CATEGORY_ALL = {"Pod", "Service", "Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "CronJob"} | {
    "HorizontalPodAutoscaler"
}


@dataclass(frozen=True)
class ScalePaths:
    """Where the scale subresource finds its numbers."""

    spec: str = ".spec.replicas"
    status: str = ".status.replicas"
    selector: str | None = None


_BUILTIN_SCALE = {kind: ScalePaths() for kind in ("Deployment", "StatefulSet", "ReplicaSet")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Resource:
    """One served kind in one version."""

    plural: str
    kind: str
    group: str
    version: str
    is_namespaced: bool
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = False
    scale: ScalePaths | None = None
    crd_version: Json | None = None
    """The version's entry in the CustomResourceDefinition; None for a built-in kind."""
    custom_schema: Json = field(default_factory=dict)
    """The structural schema, as the CustomResourceDefinition has it; empty for a built-in kind."""

    @property
    def group_version(self) -> str:
        """Return `apps/v1`, or `v1` in the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def key(self) -> StorageKey:
        """Return the key of the storage that all versions share."""
        return self.group, self.plural

    @property
    def is_custom(self) -> bool:
        """Tell whether a CustomResourceDefinition made this kind."""
        return self.crd_version is not None

    @functools.cached_property
    def schema(self) -> Json:
        """Return the schema that patches and server-side apply walk."""
        if self.is_custom:
            return schemas.with_object_meta(self.custom_schema)
        return schemas.builtin_schema(self.group, self.version, self.kind)

    def view(self, stored: Json) -> Json:
        """Return a stored object as this version shows it; metadata and below are shared, so do not change them."""
        return {**stored, "apiVersion": self.group_version, "kind": self.kind}

    def json(self, fields: bytes) -> bytes:
        """Return the JSON of a stored object as this version shows it."""
        return f'{{"apiVersion":"{self.group_version}","kind":"{self.kind}",'.encode() + fields


def _builtin_resources() -> Iterator[Resource]:
    for line in _BUILTIN.split():
        plural, kind, group_version, scope, *short = line.split(":")
        group, _, version = group_version.rpartition("/")
        schema = schemas.builtin_schema(group, version, kind)
        yield Resource(
            plural=plural,
            kind=kind,
            group=group,
            version=version,
            is_namespaced=scope != CLUSTER_SCOPED,
            singular=kind.lower(),
            short_names=tuple(short),
            categories=("all",) if kind in _IN_CATEGORY_ALL else (),
            has_status="status" in schema.get("properties", {}),
            scale=_BUILTIN_SCALE.get(kind),
        )


def _custom_resources(crd: Json) -> Iterator[Resource]:
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served"):
            continue
        subresources = version.get("subresources") or {}
        scale = None
        if "scale" in subresources:
            paths = subresources["scale"]
            scale = ScalePaths(
                spec=paths["specReplicasPath"],
                status=paths["statusReplicasPath"],
                selector=paths.get("labelSelectorPath"),
            )
        yield Resource(
            plural=names["plural"],
            kind=names["kind"],
            group=spec["group"],
            version=version["name"],
            is_namespaced=spec["scope"] == "Namespaced",
            singular=names.get("singular") or names["kind"].lower(),
            short_names=tuple(names.get("shortNames") or ()),
            categories=tuple(names.get("categories") or ()),
            has_status="status" in subresources,
            scale=scale,
            crd_version=version,
            custom_schema=(version.get("schema") or {}).get("openAPIV3Schema") or {},
        )


def crd_status(crd: Json, old: Json | None) -> Json:
    """Return the status of a CustomResourceDefinition: accepted and established at once."""
    stored = list(((old or {}).get("status") or {}).get("storedVersions") or [])
    stored += [v["name"] for v in crd["spec"]["versions"] if v.get("storage") and v["name"] not in stored]
    conditions = ((old or {}).get("status") or {}).get("conditions") or [
        {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": timestamp()}
        for kind, reason, message in (
            ("NamesAccepted", "NoConflicts", "no conflicts found"),
            ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        )
    ]
    return {"acceptedNames": crd["spec"]["names"], "storedVersions": stored, "conditions": conditions}


class Registry:
    """Which resources are served now. Used from the server's event loop only."""

    def __init__(self) -> None:
        """Start with the built-in kinds."""
        self._resources = {(r.group_version, r.plural): r for r in _builtin_resources()}
        self.revision = 0
        """Moves when a CustomResourceDefinition comes, changes or goes, so that caches know."""

    def __iter__(self) -> Iterator[Resource]:
        """Iterate over every served resource in every version."""
        return iter(list(self._resources.values()))

    def get(self, group_version: str, plural: str) -> Resource | None:
        """Return a resource as a request path names it."""
        return self._resources.get((group_version, plural))

    def named(self, name: str) -> Resource:
        """Return a resource by `plural` or `plural.group`; raise KeyError where it is not served."""
        for resource in self:
            if name in (resource.plural, f"{resource.plural}.{resource.group}"):
                return resource
        raise KeyError(name)

    def for_manifest(self, manifest: Json) -> Resource:
        """Return the resource of a manifest by its apiVersion and kind; raise KeyError where it is not served."""
        for resource in self:
            if (resource.group_version, resource.kind) == (manifest.get("apiVersion"), manifest.get("kind")):
                return resource
        raise KeyError(f"{manifest.get('apiVersion')} {manifest.get('kind')}")

    def by_storage(self, key: StorageKey) -> Resource | None:
        """Return one served version of a storage, or None where its CustomResourceDefinition is gone."""
        return next((r for r in self if r.key == key), None)

    def sync_crd(self, crd: Json, *, is_deleted: bool) -> None:
        """Serve what a CustomResourceDefinition says, no more and no less."""
        key = (crd["spec"]["group"], crd["spec"]["names"]["plural"])
        self._resources = {name: r for name, r in self._resources.items() if r.key != key}
        if not is_deleted:
            self._resources |= {(r.group_version, r.plural): r for r in _custom_resources(crd)}
        self.revision += 1
