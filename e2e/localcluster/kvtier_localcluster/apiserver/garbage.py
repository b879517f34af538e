# SPDX-License-Identifier: Apache-2.0
"""The garbage collector: deletes what has lost its owners, empties namespaces and removed kinds, ends foreground waits.

It listens to commits and works in one task on the server's event loop; each piece of work looks at the present state,
so that doing one twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from kvtier_localcluster.apiserver.api_errors import ApiError
from kvtier_localcluster.apiserver.deletion import (
    CRD_FINALIZER,
    FOREGROUND_FINALIZER,
    DeleteOptions,
    Deleter,
    crd_storage,
)
from kvtier_localcluster.apiserver.objects import Json, ObjectKey, StorageKey, object_key, owner_uids
from kvtier_localcluster.apiserver.resources import Registry
from kvtier_localcluster.apiserver.storage import Event, EventType, Storage

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
        name = object_key(manifest)
        if event.type is EventType.DELETED:
            self._notice_deletion(event)
        elif owner_uids(manifest) and (event.old is None or owner_uids(event.old) != owner_uids(manifest)):
            self._put(self._collect, event.key, name)
        if event.type is EventType.MODIFIED and event.old is not None:
            for uid in set(owner_uids(event.old)) - set(owner_uids(manifest)):
                self._put(self._end_foreground, uid)
            if metadata.get("deletionTimestamp") and not event.old["metadata"].get("deletionTimestamp"):
                self._notice_marking(event)

    def _notice_deletion(self, event: Event) -> None:
        uid = event.manifest["metadata"]["uid"]
        for key, dependent in self._storage.dependents(uid):
            self._put(self._collect, key, object_key(dependent))
        for owner in owner_uids(event.manifest):
            self._put(self._end_foreground, owner)
        namespace = object_key(event.manifest)[0]
        if namespace is not None and self._storage.count_in_namespace(namespace) == 0:
            self._put(self._end_namespace, namespace)
        if event.key[0] and self._storage.count(event.key) == 0:
            self._put(self._end_crd, event.key)

    def _notice_marking(self, event: Event) -> None:
        metadata = event.manifest["metadata"]
        if FOREGROUND_FINALIZER in (metadata.get("finalizers") or []):
            for key, dependent in self._storage.dependents(metadata["uid"]):
                self._put(self._collect, key, object_key(dependent))
            self._put(self._end_foreground, metadata["uid"])
        if event.key == _NAMESPACES:
            for key, name in self._storage.in_namespace(metadata["name"]):
                self._put(self._delete, key, name)
            self._put(self._end_namespace, metadata["name"])
        if event.key == _CRDS:
            stored = crd_storage(event.manifest)
            for manifest in self._storage.all(stored):
                self._put(self._delete, stored, object_key(manifest))
            self._put(self._end_crd, stored)

    def _put(self, action: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self._work.put_nowait(lambda: action(*arguments))

    async def _delete(self, key: StorageKey, name: ObjectKey, propagation: str = "Background") -> None:
        resource = self._registry.by_storage(key)
        if resource is None or self._storage.get(key, name) is None:
            return
        await self._deleter.delete(resource, name, options=DeleteOptions(propagation=propagation))

    async def _collect(self, key: StorageKey, name: ObjectKey) -> None:
        """Delete an object whose owners are all gone or going; else drop the references to those that are."""
        manifest = self._storage.get(key, name)
        if manifest is None or manifest["metadata"].get("deletionTimestamp"):
            return
        references = manifest["metadata"].get("ownerReferences") or []
        owners = [(reference, self._owner(reference, name[0])) for reference in references]
        solid = [reference for reference, owner in owners if owner is not None and not _awaits_dependents(owner)]
        if solid and len(solid) < len(references):
            metadata = {**manifest["metadata"], "ownerReferences": solid}
            self._storage.commit(EventType.MODIFIED, key, {**manifest, "metadata": metadata})
        if solid or not references:
            return
        is_waited_for = any(owner is not None for _, owner in owners)
        has_dependents = any(self._storage.dependents(manifest["metadata"]["uid"]))
        await self._delete(key, name, "Foreground" if is_waited_for and has_dependents else "Background")

    def _owner(self, reference: Json, namespace: str | None) -> Json | None:
        """Return the owner that a reference names: it must live in the same namespace, or in none."""
        place = self._storage.by_uid(reference.get("uid", ""))
        if place is None or place[1][0] not in (None, namespace):
            return None
        return self._storage.get(*place)

    async def _end_foreground(self, uid: str) -> None:
        place = self._storage.by_uid(uid)
        owner = self._storage.get(*place) if place else None
        resource = self._registry.by_storage(place[0]) if place else None
        if owner is None or resource is None or not _awaits_dependents(owner):
            return
        for _, dependent in self._storage.dependents(uid):
            for reference in dependent["metadata"]["ownerReferences"]:
                if reference.get("uid") == uid and reference.get("blockOwnerDeletion"):
                    return
        self._deleter.release(resource, owner, FOREGROUND_FINALIZER)

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


def _awaits_dependents(owner: Json) -> bool:
    metadata = owner["metadata"]
    return bool(metadata.get("deletionTimestamp")) and FOREGROUND_FINALIZER in (metadata.get("finalizers") or [])
