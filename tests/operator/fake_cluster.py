# SPDX-License-Identifier: Apache-2.0
"""A cluster in a dict: server-side apply with one field manager, owner references, and calls that fail on demand."""

from __future__ import annotations

import builtins
import copy
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tiers import CLAIM, DEPLOYMENT, NAMESPACE, NOON, TIER, TIER_KEY, merge, pod, ready_deployment, tier

from kvtier_operator import names
from kvtier_operator.errors import ClusterConflict, ClusterError, ClusterRejected
from kvtier_operator.inventory import Inventory
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.reconcile import Inputs, ReconcileResult, reconcile

READS = frozenset({"get", "list", "events", "try"})


class FakeCluster:
    """Behaves like the API server as far as a reconcile can see; the garbage collector runs when asked to."""

    def __init__(self, *objects: Manifest) -> None:
        self._objects: dict[ObjectKey, Manifest] = {}
        self._applied: dict[ObjectKey, Manifest] = {}
        self._versions = itertools.count(1)
        self.calls: list[tuple[str, str]] = []
        self.posted: list[Manifest] = []
        self._told: dict[str, list[Manifest]] = {}
        self.fail: tuple[int, ClusterError] | None = None
        self.refuse: Callable[[Manifest], str] | None = None
        self.broken: dict[str, tuple[Collection[str], ClusterError]] = {}
        """Of a kind, the verbs that fail each time, and how."""
        for manifest in objects:
            self.put(manifest)

    # What tests do behind the operator's back.

    def put(self, manifest: Manifest) -> Manifest:
        body = copy.deepcopy(manifest)
        version = str(next(self._versions))
        defaults = {"uid": f"uid-{version}", "resourceVersion": version, "generation": 1}
        body["metadata"] = {**defaults, **body["metadata"]}
        self._objects[names.key_of(body)] = body
        return body

    def edit(self, key: ObjectKey, patch: Mapping[str, Any]) -> None:
        self._store(key, merge(self._objects[key], dict(patch)))

    def look(self, key: ObjectKey) -> Manifest | None:
        return copy.deepcopy(self._objects.get(key))

    def remove(self, key: ObjectKey) -> None:
        """Delete an object and, as the garbage collector does, what it controls."""
        gone = self._objects.pop(key)
        self._applied.pop(key, None)
        for other, body in list(self._objects.items()):
            references = body["metadata"].get("ownerReferences", ())
            if any(reference["uid"] == gone["metadata"]["uid"] for reference in references):
                self.remove(other)

    def existing(self) -> set[ObjectKey]:
        return set(self._objects)

    def writes(self) -> list[tuple[str, str]]:
        return [call for call in self.calls if call[0] not in READS]

    # What the operator calls.

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        self._count("get", key)
        return self.look(key) if namespace == NAMESPACE else None

    def refresh(self, key: ObjectKey, namespace: str) -> Manifest | None:
        return self.get(key, namespace)

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> list[Manifest]:
        self._count("list", kind)
        wanted = dict(part.split("=") for part in selector.split(",")) if selector else {}
        return [
            copy.deepcopy(body)
            for key, body in sorted(self._objects.items())
            if (key.api_version, key.kind) == (api_version, kind)
            and wanted.items() <= body["metadata"].get("labels", {}).items()
        ]

    def tiers_on(self, claim: str, namespace: str) -> builtins.list[Manifest]:
        self._count("list", names.KIND)
        tiers = [body for key, body in sorted(self._objects.items()) if key.kind == names.KIND]
        return [copy.deepcopy(each) for each in tiers if names.claim_of(each) == claim]

    def pages(self, api_version: str, kind: str, *, namespace: str) -> Iterator[builtins.list[Manifest]]:
        yield self.list(api_version, kind, namespace=namespace, selector="")

    def apply(self, manifest: Manifest, *, over: str | None) -> Manifest:
        key = names.key_of(manifest)
        self._count("apply", key)
        if self.refuse is not None and (why := self.refuse(manifest)):
            raise ClusterRejected(why)
        live = self._objects.get(key)
        if over != (None if live is None else live["metadata"]["uid"]):
            raise ClusterConflict(f"cannot apply {key}: another incarnation stands there")
        if live is None:
            self.put(manifest)
        else:
            self._store(key, merge(_without(live, self._applied.get(key, {}), manifest), manifest))
        self._applied[key] = copy.deepcopy(manifest)
        return copy.deepcopy(self._objects[key])

    def try_apply(self, manifest: Manifest, *, over: str | None) -> None:
        self._count("try", names.key_of(manifest))
        if self.refuse is not None and (why := self.refuse(manifest)):
            raise ClusterRejected(why)

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        self._count("delete", key)
        if key in self._objects:
            if self._objects[key]["metadata"]["uid"] != uid:
                raise ClusterConflict(f"cannot delete {key}: another incarnation stands there")
            self.remove(key)

    def patch_status(self, tier: TierRef, changes: Mapping[str, Any], *, resource_version: str) -> Manifest | None:
        key = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name)
        self._count("patch_status", key)
        metadata = self._objects[key]["metadata"]
        if (metadata["uid"], metadata["resourceVersion"]) != (tier.uid, resource_version):
            raise ClusterConflict(f"cannot write the status of {tier}: it changed meanwhile")
        self._store(key, merge(self._objects[key], {"status": dict(changes)}))
        return self.look(key)

    def post_event(self, event: Manifest) -> None:
        self._count("post_event", event["reason"])
        self.posted.append(copy.deepcopy(event))

    def events_about(self, uid: str, *events: Manifest) -> None:
        """Say what the kubelet and the controllers told of an object."""
        self._told[uid] = list(events)

    def events(self, namespace: str, *, uid: str) -> builtins.list[Manifest]:
        self._count("events", uid)
        return copy.deepcopy(self._told.get(uid, []))

    def _count(self, verb: str, what: object) -> None:
        self.calls.append((verb, str(what)))
        if self.fail is not None and len(self.calls) == self.fail[0]:
            raise self.fail[1]
        verbs, error = self.broken.get(str(what).partition("/")[0], ((), None))
        if error is not None and verb in verbs:
            raise error

    def _store(self, key: ObjectKey, body: Manifest) -> None:
        old = self._objects[key]
        if body != old:
            body["metadata"]["resourceVersion"] = str(next(self._versions))
            if body.get("spec") != old.get("spec"):
                body["metadata"]["generation"] += 1
            self._objects[key] = body


def _without(live: Manifest, before: Manifest, now: Manifest) -> Manifest:
    """Return the live object less the fields that were applied before and are not now."""
    result = {}
    for field, value in live.items():
        if field in before and field not in now:
            continue
        is_nested = all(isinstance(side.get(field), dict) for side in (live, before, now))
        result[field] = _without(value, before[field], now[field]) if is_nested else value
    return result


def run(
    cluster: FakeCluster,
    *,
    attempt: int = 1,
    inventory: Inventory | None = None,
    image: str = "connector:test",
    listen_host: str = names.EVERY_IPV4_ADDRESS,
) -> ReconcileResult:
    """Reconcile the tier once; the calls of the cluster are then those of this time."""
    cluster.calls.clear()
    inputs = Inputs(connector_image=image, clock=lambda: NOON, inventory=inventory, listen_host=listen_host)
    return reconcile(cluster, TIER, inputs, attempt=attempt)


def reconciled(**spec: Any) -> FakeCluster:
    """Return a cluster in which a tier was reconciled once."""
    cluster = FakeCluster(tier(**spec))
    run(cluster)
    return cluster


def serving(cluster: FakeCluster) -> None:
    """Let the claim be bound, and both engines of the tier serve."""
    template = cluster.look(DEPLOYMENT)["spec"]["template"]
    if CLAIM in cluster.existing():
        cluster.edit(CLAIM, {"status": {"phase": "Bound"}})
    cluster.edit(DEPLOYMENT, {"status": ready_deployment()})
    for name in ("a", "b"):
        cluster.put(pod(name, template))


def edited(cluster: FakeCluster, **spec: Any) -> ReconcileResult:
    """Merge these fields into the spec of the tier, and reconcile it."""
    cluster.edit(TIER_KEY, {"spec": spec})
    return run(cluster)


def status(cluster: FakeCluster) -> dict[str, Any]:
    return dict(cluster.look(TIER_KEY)["status"])


def condition(cluster: FakeCluster, kind: str) -> dict[str, Any]:
    return next(each for each in status(cluster)["conditions"] if each["type"] == kind)
