# SPDX-License-Identifier: Apache-2.0
"""A cluster that is read from memory.

One for each reconcile. Before its first write the tier is read anew, so that no reconcile acts for a tier that was
deleted or edited since. Before an object is made, it is looked for. A reconcile without a change sends no request,
unless an object of another owner is in the way, or the janitor waits for its Lease.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.errors import ClusterConflict
from kvtier_operator.kube.cache import Cache
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.kube.object_store import ObjectStore
from kvtier_operator.names import Manifest, ObjectKey, TierName, TierRef


class CachedCluster:
    """The cluster as one reconcile of one tier sees it. One thread."""

    def __init__(self, cluster: Cluster, cache: Cache, tier: TierName) -> None:
        """Stand before that cluster, with what is known of it."""
        self._cluster = cluster
        self._cache = cache
        self._tier = tier
        self._tier_key = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name)
        self._given: Manifest | None = None
        self._is_confirmed = False
        self.post_event = cluster.post_event
        self.try_apply = cluster.try_apply
        self.events = cluster.events
        self.pages = cluster.pages

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object as it stands, as far as is known."""
        store = self._cache.store(key.api_version, key.kind, namespace)
        if store is None:
            return self._cluster.get(key, namespace)
        found = store.get(namespace, key.name)
        if (key, self._tier) in self._cache.foreign or (found is not None and not self._is_watched(store, found)):
            return self.refresh(key, namespace)
        if key == self._tier_key:
            self._given = found
        return found

    def refresh(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object as it stands at this moment, and remember that."""
        store = self._cache.store(key.api_version, key.kind, namespace)
        if store is None:
            return self._cluster.get(key, namespace)
        known, _ = store.state(namespace, key.name)
        found = self._cluster.get(key, namespace)
        is_watched = found is not None and self._is_watched(store, found)
        if found is not None and is_watched:
            store.enter(found)
        else:
            store.forget(namespace, key.name, uid=known)
        (self._cache.foreign.discard if found is None or is_watched else self._cache.foreign.add)((key, self._tier))
        return found

    def _is_watched(self, store: ObjectStore, found: Manifest) -> bool:
        """Tell whether the deletion of an object will be noticed.

        Leases are not watched, but the Lease of the tier's own janitor goes with the tier.
        """
        metadata = found["metadata"]
        if found["kind"] in _WATCHED_WHOLE:
            return True
        if names.LABEL_TIER not in (metadata.get("labels") or {}):
            return False
        owners = {each.get("uid") for each in metadata.get("ownerReferences") or ()}
        return store.is_followed or self._given is None or self._given["metadata"]["uid"] in owners

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> builtins.list[Manifest]:
        """Return the objects that carry the labels of the selector, as far as is known."""
        store = self._cache.store(api_version, kind, namespace)
        if store is None:
            return self._cluster.list(api_version, kind, namespace=namespace, selector=selector)
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        if wanted and names.LABEL_TIER not in wanted:
            # Pods of other owners are not kept in memory.
            return self._cluster.list(api_version, kind, namespace=namespace, selector=selector)
        found: Iterable[Manifest] = store.of(namespace, wanted[names.LABEL_TIER]) if wanted else store.all()
        return [each for each in found if wanted.items() <= (each["metadata"].get("labels") or {}).items()]

    def tiers_on(self, claim: str, namespace: str) -> builtins.list[Manifest]:
        """Return the other tiers that keep their blocks on a claim, as far as is known."""
        tiers = self._cache.tiers
        others = (name for name in tiers.names_of(namespace, claim) if name != self._tier.name)
        return [found for found in (tiers.get(namespace, name) for name in others) if found is not None]

    def apply(self, manifest: Manifest, *, over: str | None) -> Manifest:
        """Create or update an object."""
        key, namespace = names.key_of(manifest), manifest["metadata"]["namespace"]
        store = self._cache.store(key.api_version, key.kind, namespace)
        self._confirm()
        if over is None and self.refresh(key, namespace) is not None:
            raise ClusterConflict(f"cannot make {key}: meanwhile there is one")
        result = self._cluster.apply(manifest, over=over)
        if store is not None:
            store.enter(result)
        return result

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        """Delete that incarnation of the object; when it is gone, its watch tells."""
        self._confirm()
        self._cluster.delete(key, namespace, uid=uid)

    def patch_status(self, tier: TierRef, changes: Mapping[str, Any], *, resource_version: str) -> Manifest | None:
        """Merge changes into the status of that incarnation of a tier, in that version."""
        found = self._cluster.patch_status(tier, changes, resource_version=resource_version)
        if found is None:
            self._cache.tiers.forget(tier.namespace, tier.name, uid=tier.uid)
        else:
            self._cache.tiers.enter(found)
        return found

    def _confirm(self) -> None:
        """Check that the tier is still as this reconcile has read it."""
        if self._is_confirmed:
            return
        found = self.refresh(self._tier_key, self._tier.namespace)
        if found is None or self._given is None or _intent(found) != _intent(self._given):
            raise ClusterConflict(f"{self._tier} was changed or deleted meanwhile")
        self._is_confirmed = True


_WATCHED_WHOLE: Final = frozenset({names.KIND, names.CLAIM_KIND})
"""Kinds whose objects are all watched, whatever their labels."""


def _intent(tier: Manifest) -> tuple[object, ...]:
    """Return what a person says with a tier."""
    metadata = tier["metadata"]
    return metadata["uid"], "deletionTimestamp" in metadata, tier.get("spec"), metadata.get("annotations")
