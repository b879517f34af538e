# SPDX-License-Identifier: Apache-2.0
"""Create, replace, patch and apply objects: all writes into storage except deletions.

The order is that of a real server: merge, prune and default, validate, note field managers, compare, commit. No
admission plugin or webhook is called. Stored objects are copied before they are changed.
"""

from __future__ import annotations

import copy
import ipaddress
import itertools
import random
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_localcluster.apiserver.admission.validation import Validator
from kvtier_localcluster.apiserver.registry import apply, patches
from kvtier_localcluster.apiserver.registry.deletion import Deleter
from kvtier_localcluster.apiserver.registry.patches import APPLY, JSON_PATCH, MERGE, STRATEGIC, Patch
from kvtier_localcluster.apiserver.store import api_errors
from kvtier_localcluster.apiserver.store.api_errors import ApiError, bad_request
from kvtier_localcluster.apiserver.store.memory import EventType, Storage
from kvtier_localcluster.apiserver.store.objects import Json, ObjectKey, object_key, timestamp, without_nulls
from kvtier_localcluster.apiserver.store.resources import Resource, crd_status

CLAIM_FINALIZER: Final = "kubernetes.io/pvc-protection"
"""Keeps a claim that is deleted until no pod uses it."""

# Clients with typed models refuse a status that lacks its required counters, so those start at 0 as in a real server.
_STATUS: Final[dict[str, Json]] = {
    "PersistentVolumeClaim": {"phase": "Pending"},
    "Namespace": {"phase": "Active"},
    "Service": {"loadBalancer": {}},
    "ReplicaSet": {"replicas": 0},
    "HorizontalPodAutoscaler": {"currentMetrics": [], "desiredReplicas": 0},
    "PodDisruptionBudget": {"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0},
}
_WITH_GENERATION: Final = (
    "apps",
    "batch",
    "policy",
    "autoscaling",
    "networking.k8s.io",
    "apiextensions.k8s.io",
    "admissionregistration.k8s.io",
)


def counts_generations(resource: Resource) -> bool:
    """Tell whether writes to the spec of this kind move metadata.generation."""
    return resource.is_custom or resource.group in _WITH_GENERATION or resource.kind == "Pod"


def reset_status(resource: Resource, manifest: Json) -> None:
    """Replace, in place, the status that a client sent along with a create."""
    if resource.kind == "CustomResourceDefinition":
        manifest["status"] = crd_status(manifest, None)
    elif resource.kind == "Pod" and not resource.is_custom:
        manifest["status"] = {"phase": "Pending"}
    elif resource.kind == "Node" or not resource.has_status:
        return  # a node registers with its status
    elif resource.is_custom:
        manifest.pop("status", None)
    else:
        manifest["status"] = copy.deepcopy(_STATUS.get(resource.kind, {}))


_SERVER_OWNED: Final = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "namespace",
    "name",
)


def check_identity(resource: Resource, manifest: Json, *, current: Json) -> None:
    """Refuse a write that is based on another state or another object."""
    metadata, known = manifest.get("metadata") or {}, current["metadata"]
    if metadata.get("resourceVersion") not in (None, "", known["resourceVersion"]):
        raise api_errors.conflict(resource.plural, resource.group, known["name"])
    if metadata.get("uid") not in (None, "", known["uid"]):
        why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {known['uid']}"
        raise api_errors.conflict(resource.plural, resource.group, known["name"], why)
    if metadata.get("name") not in (None, known["name"]):
        raise bad_request(
            f"the name of the object ({metadata['name']}) does not match the name on the URL ({known['name']})"
        )


def check_finalizers(resource: Resource, new: Json, *, current: Json) -> None:
    """Refuse new finalizers on an object that is being deleted."""
    metadata = new["metadata"]
    added = set(metadata.get("finalizers") or []) - set(current["metadata"].get("finalizers") or [])
    if added and metadata.get("deletionTimestamp"):
        problem = (
            "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, "
            f"found new finalizers {sorted(added)}"
        )
        raise api_errors.invalid(resource.kind, resource.group, metadata["name"], [problem])


def desired_part(manifest: Json) -> Json:
    """Return what counts for the generation."""
    return {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "metadata", "status")}


def carried_over(resource: Resource, manifest: Json, *, current: Json, subresource: str | None, is_apply: bool) -> Json:
    """Return the new state with everything that this write may not change taken from the current one."""
    written = copy.deepcopy(manifest) if resource.is_custom else without_nulls(manifest)
    metadata = written.setdefault("metadata", {})
    if subresource == "status":
        new = copy.deepcopy(current)
        new["status"] = written.get("status") or {}
        if is_apply:
            new["metadata"]["managedFields"] = metadata.get("managedFields", [])
        return resource.view(new)
    if resource.has_status:
        written.pop("status", None)
        if "status" in current:
            written["status"] = copy.deepcopy(current["status"])
    for name in _SERVER_OWNED:
        metadata.pop(name, None)
        if name in current["metadata"]:
            metadata[name] = current["metadata"][name]
    if "managedFields" not in metadata and "managedFields" in current["metadata"]:
        metadata["managedFields"] = current["metadata"]["managedFields"]
    for name in ("finalizers", "ownerReferences", "labels", "annotations"):
        if name in metadata and not metadata[name]:
            del metadata[name]
    return resource.view(written)


def patched_object(resource: Resource, current: Json, patch: Patch) -> Json:
    """Return what a patch makes of an object; its resourceVersion stays in only where the patch itself changed it.

    Raises:
        ApiError: the patch cannot be applied (400, 422) or its media type is not known for the kind (415).
    """
    media_type, body = patch.media_type, patch.body
    base = resource.view(current)
    version = base["metadata"]["resourceVersion"]
    if media_type == JSON_PATCH:
        result = patches.json_patch(base, body)
    elif not isinstance(body, dict):
        raise bad_request("a merge patch must be an object")
    elif media_type == MERGE:
        result = patches.merge_patch(base, body)
    elif media_type == STRATEGIC and not resource.is_custom:
        result = patches.strategic_merge_patch(base, body, resource.schema)
    else:
        accepted = [JSON_PATCH, MERGE, APPLY] + ([] if resource.is_custom else [STRATEGIC])
        message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(
            accepted
        )
        raise ApiError(415, "UnsupportedMediaType", message)
    if not isinstance(result.get("metadata"), dict):
        raise bad_request("a patch may not remove metadata")
    if result["metadata"].get("resourceVersion") != version:
        return result
    metadata = {name: value for name, value in result["metadata"].items() if name != "resourceVersion"}
    return {**result, "metadata": metadata}


_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH: Final = 5


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Who writes, and how."""

    manager: str = "unknown"
    subresource: str | None = None
    is_dry_run: bool = False
    is_forced: bool = False
    field_validation: str = "Warn"
    warnings: list[str] = field(default_factory=list)
    """Filled by the write; the client gets them as Warning headers."""


class ClusterIps:
    """Allocates addresses in turn, so that an address which just became free is the last to be given again."""

    def __init__(self, cidr: str, storage: Storage) -> None:
        """Use the addresses of `cidr`, except its first and last. The stored Services record which are taken."""
        self._storage = storage
        self.use(cidr)

    def use(self, cidr: str) -> None:
        """Take the addresses from another range from now on."""
        self._network = ipaddress.ip_network(cidr)
        self._turn = itertools.cycle(range(1, self._network.num_addresses - 1))

    def assign(self, service: Json, old: Json | None) -> None:
        """Set, in place, the cluster IP of a Service that is being written; an update keeps the one it has.

        Raises:
            ApiError: another address is asked for than None, or than the one that the Service has; 422.
        """
        spec = service["spec"]
        if spec.get("type") == "ExternalName":
            return
        current = (old or {}).get("spec", {}).get("clusterIP")
        asked = spec.get("clusterIP") or current
        if asked not in (current, None, "None"):
            problem = "may not change once set" if current else "only None can be chosen in the local cluster"
            problems = [f'spec.clusterIPs[0]: Invalid value: "{asked}": {problem}']
            raise api_errors.invalid("Service", "", service["metadata"]["name"], problems)
        spec["clusterIP"] = asked or self._free()
        spec.setdefault("clusterIPs", [spec["clusterIP"]])

    def _free(self) -> str:
        taken = {service["spec"].get("clusterIP", "") for service in self._storage.all(("", "services"))}
        for offset in itertools.islice(self._turn, self._network.num_addresses):
            candidate = str(self._network[offset])
            if candidate not in taken:
                return candidate
        raise ApiError(500, "InternalError", f"failed to allocate a serviceIP: range {self._network} is full")


class Writer:
    """Writes objects. Used from the server's event loop only, where nothing comes between two steps of a write."""

    def __init__(self, storage: Storage, deleter: Deleter, cluster_ips: ClusterIps, *, protects_claims: bool) -> None:
        """Write into one storage."""
        self._storage = storage
        self._deleter = deleter
        self._cluster_ips = cluster_ips
        self._protects_claims = protects_claims
        self._validator = Validator()

    def find(self, resource: Resource, namespace: str | None, name: str) -> Json:
        """Return a stored object; raise ApiError (404) where there is none."""
        found = self._storage.get(resource.key, (namespace if resource.is_namespaced else None, name))
        if found is None:
            raise api_errors.not_found(resource.plural, resource.group, name)
        return found

    def create(
        self,
        resource: Resource,
        manifest: Json,
        *,
        options: WriteOptions,
        namespace: str | None = None,
        is_apply: bool = False,
    ) -> Json:
        """Store a new object and return it.

        Raises:
            ApiError: the name is taken, the namespace is missing or going, or the object is invalid.
        """
        new = copy.deepcopy(manifest) if resource.is_custom else without_nulls(manifest)
        new["apiVersion"], new["kind"] = resource.group_version, resource.kind
        metadata = new.setdefault("metadata", {})
        self._place(resource, namespace, metadata)
        for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
            metadata.pop(name, None)
        if self._storage.get(resource.key, object_key(new)) is not None:
            raise api_errors.already_exists(resource.plural, resource.group, metadata["name"])
        reset_status(resource, new)
        metadata = new["metadata"]
        if not resource.is_custom and resource.kind == "Namespace":
            new.setdefault("spec", {"finalizers": ["kubernetes"]})
        if self._protects_claims and not resource.is_custom and resource.kind == "PersistentVolumeClaim":
            metadata["finalizers"] = sorted({*(metadata.get("finalizers") or []), CLAIM_FINALIZER})
        self._settle(resource, new, old=None, options=options)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp()}
        metadata.pop("generation", None)
        if counts_generations(resource):
            metadata["generation"] = 1
        if not is_apply:
            metadata.pop("managedFields", None)
            metadata["managedFields"] = apply.record_update(new, None, resource.schema, _manager(resource, options))
        if options.is_dry_run:
            return new
        return self._storage.commit(EventType.ADDED, resource.key, new)

    def replace(
        self, resource: Resource, manifest: Json, *, current: Json, options: WriteOptions, is_apply: bool = False
    ) -> Json:
        """Store a changed object and return it; a write that changes nothing leaves the resourceVersion alone.

        Raises:
            ApiError: the object is based on an older one, or is invalid.
        """
        check_identity(resource, manifest, current=current)
        new = carried_over(resource, manifest, current=current, subresource=options.subresource, is_apply=is_apply)
        check_finalizers(resource, new, current=current)
        if resource.kind == "CustomResourceDefinition" and options.subresource is None:
            new["status"] = crd_status(new, current)
        self._settle(resource, new, old=current, options=options)
        metadata = new["metadata"]
        if desired_part(new) != desired_part(current) and "generation" in current["metadata"]:
            metadata["generation"] = current["metadata"]["generation"] + 1
        if not is_apply:
            manager = _manager(resource, options)
            metadata["managedFields"] = apply.record_update(new, current, resource.schema, manager)
        metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
        if options.is_dry_run or new == resource.view(current):
            return new
        event_type = EventType.DELETED if self._deleter.is_finished(resource, new) else EventType.MODIFIED
        return self._storage.commit(event_type, resource.key, new)

    def patch(self, resource: Resource, key: ObjectKey, *, patch: Patch, options: WriteOptions) -> tuple[Json, bool]:
        """Patch or apply; return the object, and whether an apply has created it.

        Raises:
            ApiError: as `create` and `replace`; 415 for a media type that the kind does not know.
        """
        if patch.media_type == APPLY:
            return self._apply(resource, key, body=patch.body, options=options)
        current = self.find(resource, *key)
        patched = patched_object(resource, current, patch)
        return self.replace(resource, patched, current=current, options=options), False

    def _apply(self, resource: Resource, key: ObjectKey, *, body: Any, options: WriteOptions) -> tuple[Json, bool]:
        if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
            raise bad_request("an applied configuration must be an object")
        namespace, name = key
        current = self._storage.get(resource.key, key)
        applied = body if resource.is_custom else without_nulls(body)
        metadata = applied.get("metadata") or {}
        if metadata.get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        if metadata.get("name") not in (None, name):
            raise bad_request(f"name in URL does not match name in {resource.kind} object: {metadata.get('name')}")
        manager = _manager(resource, options)
        if current is not None:
            merged = apply.apply_configuration(current, applied, resource.schema, manager, is_forced=options.is_forced)
            return self.replace(resource, merged, current=current, options=options, is_apply=True), False
        if options.subresource is not None:
            raise api_errors.not_found(resource.plural, resource.group, name)
        entry = apply.first_entry(applied, resource.schema, manager)
        new = {**applied, "metadata": {**metadata, "name": name, "managedFields": [entry]}}
        return self.create(resource, new, namespace=namespace, options=options, is_apply=True), True

    def _place(self, resource: Resource, namespace: str | None, metadata: Json) -> None:
        """Set namespace and name, and check that the namespace takes objects."""
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise api_errors.invalid(
                    resource.kind,
                    resource.group,
                    "",
                    ["metadata.name: Required value: name or generateName is required"],
                )
            metadata["name"] = metadata["generateName"] + "".join(random.choices(_SUFFIX_LETTERS, k=_SUFFIX_LENGTH))
        if not resource.is_namespaced:
            metadata.pop("namespace", None)
            return
        asked = metadata.get("namespace")
        metadata["namespace"] = namespace or asked or "default"
        if asked not in (None, "", metadata["namespace"]):
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        found = self._storage.get(("", "namespaces"), (None, metadata["namespace"]))
        if found is None:
            raise api_errors.not_found("namespaces", "", metadata["namespace"])
        if found["metadata"].get("deletionTimestamp"):
            where = metadata["namespace"]
            message = f"unable to create new content in namespace {where} because it is being terminated"
            raise ApiError(403, "Forbidden", message, causes=[{"reason": "NamespaceTerminating", "message": message}])

    def _settle(self, resource: Resource, new: Json, *, old: Json | None, options: WriteOptions) -> None:
        """Prune, default, validate and complete a new state."""
        validation = options.field_validation
        options.warnings.extend(self._validator.settle(resource, new, old, field_validation=validation))
        if resource.kind == "Service" and not resource.is_custom:
            self._cluster_ips.assign(new, old)


def _manager(resource: Resource, options: WriteOptions) -> apply.FieldManager:
    return apply.FieldManager(
        name=options.manager, group_version=resource.group_version, subresource=options.subresource
    )
