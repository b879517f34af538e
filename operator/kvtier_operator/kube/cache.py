# SPDX-License-Identifier: Apache-2.0
"""All watched objects in memory: a reconcile reads from here, and only its writes go to the API server.

Memory may lag behind the cluster. So an object is looked up at the API server before it is made, and each write names
the incarnation that it means: an object that replaced ours is never written.

Thread-safe: informers write, workers read and write.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.kube.client import KubernetesCluster
from kvtier_operator.kube.informer import Informer
from kvtier_operator.kube.object_store import ObjectStore, Scope, WatchedKind
from kvtier_operator.names import Manifest, ObjectKey, TierName

OnChange = Callable[[str, frozenset[TierName]], None]
"""Called with the kind of the objects that changed, and with the tiers that this concerns."""


def _of_neighbours(body: Mapping[str, Any]) -> str:
    """Return the part of a tier that matters to the others on its claim: its budget, its janitor, and that it goes."""
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        return ""
    disk = spec.get("disk")
    budget = disk.get("budget") if isinstance(disk, Mapping) else None
    return str((budget, spec.get("janitor"), spec.get("connector"), "deletionTimestamp" in body["metadata"]))


def _node(body: Manifest) -> Manifest:
    """Keep the fields that decide whether a pod fits; a node that only reports its health has not changed."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    ready = [
        {"type": each["type"], "status": each.get("status")}
        for each in status.get("conditions") or ()
        if each.get("type") == "Ready"
    ]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {name: metadata[name] for name in ("name", "uid", "labels") if name in metadata},
        "spec": {name: spec[name] for name in ("taints", "unschedulable") if name in spec},
        "status": {"allocatable": status.get("allocatable") or {}, "conditions": ready},
    }


TIERS: Final = WatchedKind(
    api_version=names.API_VERSION,
    kind=names.KIND,
    query=(),
    group=names.claim_of,
    matters=_of_neighbours,
    is_followed=False,
)
"""kopf watches them, see `Cache.on_tier_event`; they are listed here, because a watch may miss a deletion."""
NODES: Final = WatchedKind(api_version="v1", kind="Node", query=(), is_namespaced=False, keep=_node)
WATCHED: Final = (
    TIERS,
    # Without a selector: a tier may use a claim that carries no label of ours.
    WatchedKind(api_version="v1", kind=names.CLAIM_KIND, query=()),
    *(
        WatchedKind(api_version=api_version, kind=kind)
        for api_version, kind in (
            ("v1", "ConfigMap"),
            ("v1", "Pod"),
            ("v1", "Service"),
            ("v1", "ServiceAccount"),
            ("apps/v1", "Deployment"),
            ("batch/v1", "Job"),
            ("networking.k8s.io/v1", "NetworkPolicy"),
            ("policy/v1", "PodDisruptionBudget"),
            (names.RBAC, "Role"),
            (names.RBAC, "RoleBinding"),
        )
    ),
    # Their holders renew them all the time, and there is nothing of ours in them but that they are there.
    WatchedKind(api_version=names.COORDINATION, kind=names.LEASE_KIND, is_followed=False),
)
"""The kinds of objects that a tier consists of: each change of one, by any client, is reconciled."""


class Cache:
    """All kinds in memory, and the informers that keep them so."""

    def __init__(
        self,
        source: KubernetesCluster,
        on_change: OnChange,
        *,
        namespaces: tuple[str, ...] = (),
        list_seconds: float = 600.0,
    ) -> None:
        """Store; `start` starts to read: the given namespaces, or else all of them and the nodes."""
        self._on_change = on_change
        self._stores: dict[tuple[str, str], ObjectStore] = {}
        self._informers: dict[tuple[str, str], list[Informer]] = {}
        self.foreign: set[tuple[ObjectKey, TierName]] = set()
        """Objects in the way of a tier that no watch reports: its reconciles look at them themselves."""
        for watched in WATCHED if namespaces else (*WATCHED, NODES):
            key = (watched.api_version, watched.kind)
            store = self._stores[key] = ObjectStore(watched, self._on_change_of(watched.kind))
            if watched is TIERS:
                self.tiers = store
            self._informers[key] = [
                Informer(
                    source,
                    Scope(*key, namespace=each, query=watched.query),
                    store,
                    list_seconds=list_seconds if watched is TIERS else None,
                )
                for each in (namespaces if watched.is_namespaced else ()) or ("",)
            ]

    def start(self) -> None:
        """Start to read everything."""
        for informer in self._all():
            informer.start()

    def wait(self, is_over: Callable[[], bool]) -> bool:
        """Wait until everything was read once, as far as it may be; a part would be taken for the whole.

        False where that is to be given up.
        """
        while not is_over():
            if all(informer.wait(0.05) for informer in self._all()):
                return True
        return False

    def close(self) -> None:
        """Read nothing more."""
        for informer in self._all():
            informer.stop()
        deadline = time.monotonic() + 5
        for informer in self._all():
            informer.join(max(0.0, deadline - time.monotonic()))

    def store(self, api_version: str, kind: str, namespace: str) -> ObjectStore | None:
        """Return the objects of a kind; None where the kind is not kept.

        Raises:
            ClusterError: the kind may not be read.
        """
        for informer in self._informers.get((api_version, kind), ()):
            if informer.scope.namespace in {"", namespace} and (refusal := informer.refusal()) is not None:
                raise refusal
        return self._stores.get((api_version, kind))

    def trouble(self) -> tuple[float, str]:
        """Return for how many seconds a kind could not be followed, and why."""
        return max(informer.trouble() for informer in self._all())

    def on_tier_event(self, tier: Manifest, *, is_deleted: bool) -> None:
        """Take in an event of kopf's watch of the tiers."""
        (self.tiers.on_delete if is_deleted else self.tiers.on_update)(tier)

    def stamp(self, watched: WatchedKind) -> int:
        """Return a number that changes whenever objects of a kind do."""
        return self._stores[watched.api_version, watched.kind].stamp

    def forget_foreign(self, tier: TierName) -> None:
        """Forget what is in the way of a tier that is gone."""
        self.foreign.difference_update([each for each in self.foreign.copy() if each[1] == tier])

    def _all(self) -> list[Informer]:
        return [informer for informers in self._informers.values() for informer in informers]

    def _on_change_of(self, kind: str) -> Callable[[str, str, set[str]], None]:
        def changed(namespace: str, name: str, groups: builtins.set[str]) -> None:
            if not name:
                found = {TierName(namespace=place, name=tier) for place, tier in self.tiers.places()}
            else:
                claims = {names.KIND: groups, names.CLAIM_KIND: {name}}.get(kind, set())
                users = {tier for claim in claims for tier in self.tiers.names_of(namespace, claim)}
                of_it = {name} if kind == names.KIND else groups
                found = {TierName(namespace=namespace, name=tier) for tier in of_it | users if tier}
            self._on_change(kind, frozenset(found))

        return changed
