# SPDX-License-Identifier: Apache-2.0
"""Delete objects: preconditions, finalizers, the grace period of pods, and garbage collection.

An object that cannot be removed at once gets a deletionTimestamp and stays. The write that removes its last finalizer
removes it. A pod is removed by a second delete with grace period 0, which a kubelet sends when the processes are gone.

The garbage collector deletes objects without owners, and empties namespaces and removed kinds.
It listens to commits and works in one task of the server's event loop. Each step reads the present state, so repeating
one changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_localcluster.apiserver.store import objects
from kvtier_localcluster.apiserver.store.api_errors import ApiError, conflict, not_found
from kvtier_localcluster.apiserver.store.memory import Event, EventType, Storage
from kvtier_localcluster.apiserver.store.objects import Json, ObjectKey, StorageKey, field_at
from kvtier_localcluster.apiserver.store.resources import Registry, Resource

CRD_FINALIZER: Final = "customresourcecleanup.apiextensions.k8s.io"

_DEFAULT_GRACE_SECONDS: Final = 30
_ANSWERED_WITH_OBJECT: Final = frozenset(("Pod", "PersistentVolumeClaim", "Service", "ServiceAccount", "StorageClass"))


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
        if resource.kind == "CustomResourceDefinition" and CRD_FINALIZER not in finalizers:
            finalizers += [CRD_FINALIZER] if self._storage.count(crd_storage(current)) else []
        if finalizers:
            metadata["finalizers"] = finalizers
        grace = _grace_seconds(resource, current, options)
        if not metadata.get("deletionTimestamp"):
            metadata["generation"] = metadata.get("generation", 0) + 1
        elif grace >= metadata.get("deletionGracePeriodSeconds", 0):
            return {**current, "metadata": metadata}  # a grace period can only be shortened
        metadata["deletionTimestamp"] = objects.timestamp(grace)
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


_CRDS: Final = ("apiextensions.k8s.io", "customresourcedefinitions")
_NAMESPACES: Final = ("", "namespaces")
_RETRY_SECONDS: Final = 0.5

logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


class GarbageCollector:
    """Turns commits into deletions; `run` is its only task."""

    def __init__(self, storage: Storage, registry: Registry, deleter: Deleter) -> None:
        """Listen to a storage."""
        self._storage = storage
        self._registry = registry
        self._deleter = deleter
        self._work: asyncio.Queue[Work] = asyncio.Queue()
        storage.listeners.append(self._notice)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            work = await self._work.get()
            try:
                await work()
            except ApiError as error:  # the real collector retries as well
                logger.warning("garbage collection will be retried: %s", error)
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._work.put_nowait, work)

    def _notice(self, event: Event) -> None:
        manifest = event.manifest
        metadata = manifest["metadata"]
        name = objects.object_key(manifest)
        owners, owners_before = (objects.owner_uids(each) if each else [] for each in (manifest, event.old))
        if event.type is EventType.DELETED:
            self._notice_deletion(event)
        elif owners and owners != owners_before:
            self._put(self._collect, event.key, name)
        before = {} if event.old is None else event.old["metadata"]
        is_change = event.type is EventType.MODIFIED and before
        if is_change and metadata.get("deletionTimestamp") and not before.get("deletionTimestamp"):
            self._notice_marking(event)

    def _notice_deletion(self, event: Event) -> None:
        uid = event.manifest["metadata"]["uid"]
        for key, dependent in self._storage.dependents(uid):
            self._put(self._collect, key, objects.object_key(dependent))
        namespace = objects.object_key(event.manifest)[0]
        if namespace is not None and self._storage.count_in_namespace(namespace) == 0:
            self._put(self._end_namespace, namespace)
        if event.key[0] and self._storage.count(event.key) == 0:
            self._put(self._end_crd, event.key)

    def _notice_marking(self, event: Event) -> None:
        metadata = event.manifest["metadata"]
        if event.key == _NAMESPACES:
            for key, name in self._storage.in_namespace(metadata["name"]):
                self._put(self._delete, key, name)
            self._put(self._end_namespace, metadata["name"])
        if event.key == _CRDS:
            stored = crd_storage(event.manifest)
            for manifest in self._storage.all(stored):
                self._put(self._delete, stored, objects.object_key(manifest))
            self._put(self._end_crd, stored)

    def _put(self, action: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self._work.put_nowait(lambda: action(*arguments))

    async def _delete(self, key: StorageKey, name: ObjectKey) -> None:
        resource = self._registry.by_storage(key)
        if resource is None or self._storage.get(key, name) is None:
            return
        await self._deleter.delete(resource, name, options=DeleteOptions())

    async def _collect(self, key: StorageKey, name: ObjectKey) -> None:
        """Delete an object whose owners are all gone; else drop the references to those that are."""
        manifest = self._storage.get(key, name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return
        references = manifest["metadata"].get("ownerReferences") or []
        solid = [reference for reference in references if self._has_owner(reference, name[0])]
        if solid and len(solid) < len(references):
            metadata = {**manifest["metadata"], "ownerReferences": solid}
            self._storage.commit(EventType.MODIFIED, key, {**manifest, "metadata": metadata})
        if references and not solid:
            await self._delete(key, name)

    def _has_owner(self, reference: Json, namespace: str | None) -> bool:
        """Tell whether the owner that a reference names is there, in the same namespace or in none."""
        place = self._storage.by_uid(reference.get("uid", ""))
        return place is not None and place[1][0] in (None, namespace)

    async def _end_namespace(self, namespace: str) -> None:
        manifest = self._storage.get(_NAMESPACES, (None, namespace))
        resource = self._registry.by_storage(_NAMESPACES)
        if manifest is not None and resource is not None and self._deleter.is_finished(resource, manifest):
            self._storage.commit(EventType.DELETED, _NAMESPACES, manifest)

    async def _end_crd(self, stored: StorageKey) -> None:
        crd = self._storage.get(_CRDS, (None, f"{stored[1]}.{stored[0]}"))
        resource = self._registry.by_storage(_CRDS)
        is_waiting = crd is not None and CRD_FINALIZER in (crd["metadata"].get("finalizers") or [])
        if crd is not None and resource is not None and is_waiting and self._storage.count(stored) == 0:
            self._deleter.release(resource, crd, CRD_FINALIZER)
