# SPDX-License-Identifier: Apache-2.0
"""Create, replace, patch and apply objects: the one way into storage for everything that is not a deletion.

The order is that of the real server: merge, prune and default, validate, note field managers, compare, commit.
No admission plugin or webhook is called.
"""

from __future__ import annotations

import copy
import random
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_localcluster.apiserver import apply, updates
from kvtier_localcluster.apiserver.api_errors import ApiError, already_exists, bad_request, conflict, invalid, not_found
from kvtier_localcluster.apiserver.cluster_ips import ClusterIps
from kvtier_localcluster.apiserver.deletion import Deleter
from kvtier_localcluster.apiserver.initial_state import CLAIM_FINALIZER, counts_generations, reset_status
from kvtier_localcluster.apiserver.objects import Json, ObjectKey, field_at, object_key, timestamp, without_nulls
from kvtier_localcluster.apiserver.patches import APPLY, Patch
from kvtier_localcluster.apiserver.resources import Resource, crd_status
from kvtier_localcluster.apiserver.storage import EventType, Storage
from kvtier_localcluster.apiserver.validation import Validator

_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH: Final = 5
_PATCH_ATTEMPTS: Final = 5
_CONFLICT: Final = 409


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


class Writer:
    """Writes objects. Used from the server's event loop only."""

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
            raise not_found(resource.plural, resource.group, name)
        return found

    async def create(
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
            raise already_exists(resource.plural, resource.group, metadata["name"])
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
        if self._storage.get(resource.key, object_key(new)) is not None:
            raise already_exists(resource.plural, resource.group, metadata["name"])
        if options.is_dry_run:
            return new
        return self._storage.commit(EventType.ADDED, resource.key, new)

    async def replace(
        self, resource: Resource, manifest: Json, *, current: Json, options: WriteOptions, is_apply: bool = False
    ) -> Json:
        """Store a changed object and return it; a write that changes nothing leaves the resourceVersion alone.

        Raises:
            ApiError: the object is based on an older one, or is invalid.
        """
        updates.check_identity(resource, manifest, current=current)
        new = updates.carried_over(
            resource, manifest, current=current, subresource=options.subresource, is_apply=is_apply
        )
        updates.check_finalizers(resource, new, current=current)
        if resource.kind == "CustomResourceDefinition" and options.subresource is None:
            new["status"] = crd_status(new, current)
        self._settle(resource, new, old=current, options=options)
        metadata = new["metadata"]
        if updates.desired_part(new) != updates.desired_part(current) and "generation" in current["metadata"]:
            metadata["generation"] = current["metadata"]["generation"] + 1
        if not is_apply:
            manager = _manager(resource, options)
            metadata["managedFields"] = apply.record_update(new, current, resource.schema, manager)
        metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
        if self._storage.get(resource.key, object_key(current)) is not current:
            raise conflict(resource.plural, resource.group, metadata["name"])
        if options.is_dry_run or new == resource.view(current):
            return new
        event_type = EventType.DELETED if self._deleter.is_finished(resource, new) else EventType.MODIFIED
        return self._storage.commit(event_type, resource.key, new)

    async def patch(
        self, resource: Resource, key: ObjectKey, *, patch: Patch, options: WriteOptions
    ) -> tuple[Json, bool]:
        """Patch or apply; return the object, and whether an apply has created it.

        Raises:
            ApiError: as `create` and `replace`; 415 for a media type that the kind does not know.
        """
        for attempt in range(1, _PATCH_ATTEMPTS + 1):
            current = self._storage.get(resource.key, key)
            try:
                if patch.media_type == APPLY:
                    return await self._apply(resource, key, body=patch.body, options=options)
                if current is None:
                    raise not_found(resource.plural, resource.group, key[1])
                patched = updates.patched(resource, current, patch)
                return await self.replace(resource, patched, current=current, options=options), False
            except ApiError as error:
                has_moved = self._storage.get(resource.key, key) is not current
                if error.code != _CONFLICT or patch.names_version or not has_moved or attempt == _PATCH_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt raises")

    async def _apply(
        self, resource: Resource, key: ObjectKey, *, body: Any, options: WriteOptions
    ) -> tuple[Json, bool]:
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
            return await self.replace(resource, merged, current=current, options=options, is_apply=True), False
        if options.subresource is not None:
            raise not_found(resource.plural, resource.group, name)
        entry = apply.first_entry(applied, resource.schema, manager)
        new = {**applied, "metadata": {**metadata, "name": name, "managedFields": [entry]}}
        return await self.create(resource, new, namespace=namespace, options=options, is_apply=True), True

    def _place(self, resource: Resource, namespace: str | None, metadata: Json) -> None:
        """Set namespace and name, and check that the namespace takes objects."""
        if not metadata.get("name"):
            if not metadata.get("generateName"):
                raise invalid(
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
            raise not_found("namespaces", "", metadata["namespace"])
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
        if resource.kind == "PersistentVolumeClaim" and old is not None:
            self._check_resize(new, old)

    def _check_resize(self, new: Json, old: Json) -> None:
        """Refuse growth where the claim's StorageClass is known and does not allow it."""
        size = "spec.resources.requests.storage"
        storage_class = self._storage.get(
            ("storage.k8s.io", "storageclasses"), (None, field_at(new, "spec.storageClassName") or "")
        )
        if (
            storage_class is None
            or storage_class.get("allowVolumeExpansion")
            or field_at(new, size) == field_at(old, size)
        ):
            return
        name = new["metadata"]["name"]
        message = (
            f'persistentvolumeclaims "{name}" is forbidden: only dynamically provisioned pvc can be resized and the '
            "storageclass that provisions the pvc must support resize"
        )
        raise ApiError(403, "Forbidden", message, name=name, kind="persistentvolumeclaims")


def _manager(resource: Resource, options: WriteOptions) -> apply.FieldManager:
    return apply.FieldManager(
        name=options.manager, group_version=resource.group_version, subresource=options.subresource
    )
