# SPDX-License-Identifier: Apache-2.0
"""Delete objects: preconditions, finalizers, the grace period of pods, and what waits for its dependents.

An object that cannot go at once gets a deletionTimestamp and stays. It goes with the write that removes its last
finalizer or (pods) with a second delete of grace period 0, which is what a kubelet sends when the processes are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_localcluster.apiserver.api_errors import conflict, not_found
from kvtier_localcluster.apiserver.objects import Json, ObjectKey, field_at, timestamp
from kvtier_localcluster.apiserver.resources import Registry, Resource
from kvtier_localcluster.apiserver.storage import EventType, Storage

FOREGROUND_FINALIZER: Final = "foregroundDeletion"
CRD_FINALIZER: Final = "customresourcecleanup.apiextensions.k8s.io"

_DEFAULT_GRACE_SECONDS: Final = 30
_ANSWERED_WITH_OBJECT: Final = frozenset(
    ("Pod", "PersistentVolumeClaim", "PersistentVolume", "Service", "ServiceAccount", "LimitRange", "ResourceQuota")
) | {"StorageClass"}


@dataclass(frozen=True, kw_only=True)
class DeleteOptions:
    """How to delete."""

    grace_seconds: int | None = None
    propagation: str | None = None
    uid: str | None = None
    version: str | None = None
    is_dry_run: bool = False

    @classmethod
    def parse(cls, body: Json, query: Mapping[str, str]) -> DeleteOptions:
        """Read the options of a request; the body wins over the query."""
        preconditions = body.get("preconditions") or {}
        grace = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        return cls(
            grace_seconds=None if grace is None else int(grace),
            propagation=body.get("propagationPolicy") or query.get("propagationPolicy"),
            uid=preconditions.get("uid"),
            version=preconditions.get("resourceVersion"),
            is_dry_run=bool(body.get("dryRun")) or query.get("dryRun") == "All",
        )


def crd_storage(crd: Json) -> tuple[str, str]:
    """Return where the custom resources of a CustomResourceDefinition are stored."""
    return crd["spec"]["group"], crd["spec"]["names"]["plural"]


class Deleter:
    """Deletes objects on behalf of clients and of the garbage collector."""

    def __init__(self, storage: Storage, registry: Registry) -> None:
        """Use one storage."""
        self._storage = storage
        self._registry = registry

    def is_finished(self, resource: Resource, manifest: Json) -> bool:
        """Tell whether an object that is being deleted has nothing left to wait for."""
        metadata = manifest["metadata"]
        if not metadata.get("deletionTimestamp") or metadata.get("finalizers"):
            return False
        if resource.kind == "Namespace" and self._storage.count_in_namespace(metadata["name"]):
            return False
        return not metadata.get("deletionGracePeriodSeconds")

    async def delete(self, resource: Resource, key: ObjectKey, *, options: DeleteOptions) -> Json:
        """Delete one object, or mark it as being deleted; return what the client sees.

        Raises:
            ApiError: it does not exist, or a precondition does not hold.
        """
        current = self._storage.get(resource.key, key)
        if current is None:
            raise not_found(resource.plural, resource.group, key[1])
        self._check_preconditions(resource, current, options)
        if options.is_dry_run:
            return resource.view(current)
        if options.propagation == "Orphan":
            self._orphan_dependents(current)
        marked = self._marked(resource, current, options)
        if self.is_finished(resource, marked):
            removed = self._storage.commit(EventType.DELETED, resource.key, marked)
            return resource.view(removed) if resource.kind in _ANSWERED_WITH_OBJECT else _success(resource, removed)
        if marked != current:
            marked = self._storage.commit(EventType.MODIFIED, resource.key, marked)
        return resource.view(marked)

    def release(self, resource: Resource, manifest: Json, finalizer: str) -> None:
        """Take a finalizer off an object, which may be the end of it."""
        metadata = manifest["metadata"]
        left = [name for name in metadata.get("finalizers") or [] if name != finalizer]
        changed = {**manifest, "metadata": {**metadata, "finalizers": left}}
        if not left:
            del changed["metadata"]["finalizers"]
        event_type = EventType.DELETED if self.is_finished(resource, changed) else EventType.MODIFIED
        self._storage.commit(event_type, resource.key, changed)

    def _check_preconditions(self, resource: Resource, current: Json, options: DeleteOptions) -> None:
        metadata = current["metadata"]
        for asked, field, what in (
            (options.uid, "uid", "UID"),
            (options.version, "resourceVersion", "ResourceVersion"),
        ):
            if asked is not None and asked != metadata[field]:
                why = f"Precondition failed: {what} in precondition: {asked}, {what} in object meta: {metadata[field]}"
                raise conflict(resource.plural, resource.group, metadata["name"], why)

    def _orphan_dependents(self, owner: Json) -> None:
        uid = owner["metadata"]["uid"]
        for key, dependent in self._storage.dependents(uid):
            metadata = dependent["metadata"]
            left = [reference for reference in metadata["ownerReferences"] if reference.get("uid") != uid]
            orphan = {**dependent, "metadata": {**metadata, "ownerReferences": left}}
            if not left:
                del orphan["metadata"]["ownerReferences"]
            self._storage.commit(EventType.MODIFIED, key, orphan)

    def _marked(self, resource: Resource, current: Json, options: DeleteOptions) -> Json:
        """Return the object with its deletionTimestamp, grace period and the server's own finalizers."""
        metadata: dict[str, Any] = dict(current["metadata"])
        finalizers = list(metadata.get("finalizers") or [])
        if options.propagation == "Foreground" and FOREGROUND_FINALIZER not in finalizers:
            finalizers += [FOREGROUND_FINALIZER] if any(self._storage.dependents(metadata["uid"])) else []
        if resource.kind == "CustomResourceDefinition" and CRD_FINALIZER not in finalizers:
            finalizers += [CRD_FINALIZER] if self._storage.count(crd_storage(current)) else []
        if finalizers:
            metadata["finalizers"] = finalizers
        grace = _grace_seconds(resource, current, options)
        if not metadata.get("deletionTimestamp"):
            metadata["generation"] = metadata.get("generation", 0) + 1
        elif grace >= metadata.get("deletionGracePeriodSeconds", 0):
            return {**current, "metadata": metadata}  # a grace period can only be shortened
        metadata["deletionTimestamp"] = timestamp(grace)
        metadata["deletionGracePeriodSeconds"] = grace
        marked = {**current, "metadata": metadata}
        if resource.kind == "Namespace":
            marked["status"] = {**(current.get("status") or {}), "phase": "Terminating"}
        return marked


def _grace_seconds(resource: Resource, current: Json, options: DeleteOptions) -> int:
    if resource.kind != "Pod" or resource.group:
        return 0
    phase = field_at(current, "status.phase")
    has_processes = field_at(current, "spec.nodeName") or phase == "Running"
    if not has_processes or phase in ("Succeeded", "Failed"):
        return 0
    if options.grace_seconds is not None:
        return max(0, options.grace_seconds)
    asked = field_at(current, "spec.terminationGracePeriodSeconds")
    return _DEFAULT_GRACE_SECONDS if asked is None else int(asked)


def _success(resource: Resource, removed: Json) -> Json:
    metadata = removed["metadata"]
    details = {"name": metadata["name"], "group": resource.group, "kind": resource.plural, "uid": metadata["uid"]}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
