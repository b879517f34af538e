# SPDX-License-Identifier: Apache-2.0
"""Deployments: one ReplicaSet for each pod template, rolled from one to the next.

`rolling_step` decides how many pods each generation has next; `status_of` makes the counts and conditions that `kubectl
rollout status` reads. Both are pure, except that deadlines are compared with the clock.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvtier_localcluster import conditions, kinds
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.controllers import loop
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import Json, Key, Kind
from kvtier_localcluster.recorder import Happening

HASH_LABEL = "pod-template-hash"
_DEFAULT_SHARE = "25%"


@dataclass(frozen=True)
class Generation:
    """One ReplicaSet of a Deployment, as a rollout sees it."""

    name: str
    replicas: int
    """How many pods it was told to have."""
    available: int


@dataclass(frozen=True)
class Bounds:
    """How far a rollout may deviate from the wanted number of pods."""

    surge: int
    unavailable: int


def template_hash(template: Json) -> str:
    """Return a short text that identifies a pod template."""
    canonical = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def rolling_bounds(strategy: Json, replicas: int) -> Bounds:
    """Read maxSurge (rounded up) and maxUnavailable (rounded down); at least one of them lets the rollout move."""
    rolling = strategy.get("rollingUpdate") or {}
    surge = math.ceil(_share(rolling.get("maxSurge", _DEFAULT_SHARE), replicas))
    unavailable = math.floor(_share(rolling.get("maxUnavailable", _DEFAULT_SHARE), replicas))
    if surge == 0 and unavailable == 0:
        unavailable = 1
    return Bounds(surge=surge, unavailable=min(unavailable, replicas))


def rolling_step(replicas: int, limits: Bounds, *, new: Generation, old: Sequence[Generation]) -> dict[str, int]:
    """Return the next size of every generation: new pods within the surge, old ones end when others are available."""
    sizes = {new.name: _grown(replicas, limits, new=new, old=old), **{each.name: each.replicas for each in old}}
    total = new.replicas + sum(each.replicas for each in old)
    available = new.available + sum(each.available for each in old)
    minimum = replicas - limits.unavailable
    budget = total - minimum - max(0, new.replicas - new.available)
    for each in old:  # pods that do not serve go first
        removed = min(max(0, each.replicas - each.available), max(0, budget))
        sizes[each.name] -= removed
        budget -= removed
    spare = min(budget, available - minimum)
    for each in old:
        removed = min(sizes[each.name], max(0, spare))
        sizes[each.name] -= removed
        spare -= removed
    return sizes


def recreate_step(replicas: int, *, new: Generation, old: Sequence[Generation], old_pods: int) -> dict[str, int]:
    """Return the next sizes where no two generations may overlap: old ones end before the new one starts."""
    waits = old_pods > 0 or any(each.replicas for each in old)
    return {new.name: new.replicas if waits else replicas, **{each.name: 0 for each in old}}


def _grown(replicas: int, limits: Bounds, *, new: Generation, old: Sequence[Generation]) -> int:
    if new.replicas >= replicas:
        return replicas
    room = replicas + limits.surge - new.replicas - sum(each.replicas for each in old)
    return min(replicas, new.replicas + max(0, room))


def _share(value: Any, replicas: int) -> float:
    if isinstance(value, str) and value.endswith("%"):
        return replicas * int(value[:-1]) / 100
    return float(value)


_DONE = "NewReplicaSetAvailable"
_LATE = "ProgressDeadlineExceeded"
_DEFAULT_DEADLINE_SECONDS = 600
_COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "unavailableReplicas")


def status_of(deployment: Json, *, sets: Sequence[Json], new: Json | None, now: str) -> Json:
    """Return the status; counts of zero are left out, as the API does."""
    spec = deployment["spec"]
    before = deployment.get("status") or {}
    replicas = int(spec.get("replicas", 1))
    counts = {
        "replicas": _total(sets, "replicas"),
        "updatedReplicas": _total([new] if new else [], "replicas"),
        "readyReplicas": _total(sets, "readyReplicas"),
        "availableReplicas": _total(sets, "availableReplicas"),
    }
    counts["unavailableReplicas"] = max(0, _wanted(sets) - counts["availableReplicas"])
    limits = rolling_bounds(spec.get("strategy") or {}, replicas)
    is_recreated = (spec.get("strategy") or {}).get("type") == "Recreate"
    minimum = replicas - (0 if is_recreated else limits.unavailable)
    claims = (_available(counts["availableReplicas"] >= minimum), _progressing(deployment, counts, new))
    written = conditions.updated(before.get("conditions") or [], claims, now)
    for condition in written:
        condition["lastUpdateTime"] = _update_time(before, condition, counts, now)
    return {
        "observedGeneration": deployment["metadata"]["generation"],
        **{name: value for name, value in counts.items() if value},
        "conditions": written,
    }


def seconds_to_deadline(deployment: Json, status: Json) -> float | None:
    """Return when to look again for a rollout that does not progress; None where there is nothing to wait for."""
    condition = conditions.find(status["conditions"], "Progressing")
    if condition is None or condition["reason"] in (_DONE, _LATE):
        return None
    return max(1.0, _deadline_seconds(deployment) - kinds.seconds_since(condition["lastUpdateTime"]) + 1)


def _available(has_minimum: bool) -> Condition:
    reason = "MinimumReplicasAvailable" if has_minimum else "MinimumReplicasUnavailable"
    verb = "has" if has_minimum else "does not have"
    return Condition("Available", has_minimum, reason, f"Deployment {verb} minimum availability.")


def _progressing(deployment: Json, counts: dict[str, int], new: Json | None) -> Condition:
    replicas = int(deployment["spec"].get("replicas", 1))
    before = deployment.get("status") or {}
    known = conditions.find(before.get("conditions") or [], "Progressing") or {}
    subject = f'ReplicaSet "{new["metadata"]["name"] if new else ""}"'
    is_updated = counts["replicas"] == counts["updatedReplicas"]
    is_complete = is_updated and counts["replicas"] == counts["availableReplicas"] == replicas
    was_done = known.get("reason") == _DONE and subject in known.get("message", "")
    if is_complete or (was_done and is_updated):  # a pod that fails later is no new rollout
        return Condition("Progressing", holds=True, reason=_DONE, message=f"{subject} has successfully progressed.")
    if not _has_moved(before, counts) and known and known.get("reason") != _DONE:
        since = known.get("lastUpdateTime")
        if known["reason"] == _LATE or (since and kinds.seconds_since(since) > _deadline_seconds(deployment)):
            return Condition("Progressing", holds=False, reason=_LATE, message=f"{subject} has timed out progressing.")
    return Condition("Progressing", holds=True, reason="ReplicaSetUpdated", message=f"{subject} is progressing.")


def _update_time(before: Json, condition: Json, counts: dict[str, int], now: str) -> str:
    known = conditions.find(before.get("conditions") or [], condition["type"]) or {}
    is_same = all(known.get(field) == condition.get(field) for field in ("status", "reason", "message"))
    has_moved = condition.get("reason") == "ReplicaSetUpdated" and _has_moved(before, counts)
    return now if has_moved or not is_same else str(known.get("lastUpdateTime", now))


def _has_moved(before: Json, counts: dict[str, int]) -> bool:
    return any(int(before.get(name) or 0) != counts[name] for name in _COUNTS)


def _deadline_seconds(deployment: Json) -> int:
    return int(deployment["spec"].get("progressDeadlineSeconds", _DEFAULT_DEADLINE_SECONDS))


def _total(sets: Sequence[Json], field: str) -> int:
    return sum(_count(each, field) for each in sets)


def _wanted(sets: Sequence[Json]) -> int:
    return sum(int(each["spec"].get("replicas", 1)) for each in sets)


REVISION = "deployment.kubernetes.io/revision"
_DEFAULT_HISTORY = 10


class DeploymentController(Controller):
    """Rolls Deployments out."""

    kind: ClassVar[Kind] = kinds.DEPLOYMENT

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to Deployments, their ReplicaSets, and pods (a Recreate rollout waits for the last old pod)."""
        super().__init__(client, informers)
        self._sets = informers[kinds.REPLICA_SET]
        self._pods = informers[kinds.POD]
        self._sets.listen(self.notice_child)
        self._pods.listen(self._notice_pod)

    async def sync(self, key: Key) -> None:
        """Do the next step of the rollout and report."""
        deployment = self.own.get(key)
        if deployment is None or kinds.is_deleting(deployment):
            return
        await loop.adopt(self.client, kinds.DEPLOYMENT, deployment, self._sets)
        sets = sorted(self._sets.controlled_by(kinds.uid_of(deployment)), key=_revision)
        new = _set_for(deployment, sets)
        await self._report(deployment, await self._roll(deployment, sets, new))

    async def _roll(self, deployment: Json, sets: Sequence[Json], new: Json | None) -> Json:
        old = [each for each in sets if new is None or kinds.uid_of(each) != kinds.uid_of(new)]
        name = f"{deployment['metadata']['name']}-{template_hash(deployment['spec']['template'])}"
        sizes = self._decide(deployment, _generation(new, name), old)
        revision = max((_revision(each) for each in old), default=0) + 1
        if new is None:
            new = await self._create_set(deployment, revision=revision, replicas=sizes[name])
        elif _revision(new) < revision:
            change = {"metadata": {"annotations": {REVISION: str(revision)}}}
            new = await self.client.patch(kinds.REPLICA_SET, new, change)
            self._sets.remember(new)
        await self._copy_revision(deployment, new)
        for each in (new, *old):
            await self._scale(deployment, each, sizes[each["metadata"]["name"]])
        await self._drop_history(deployment, old)
        return new

    def _decide(self, deployment: Json, new: Generation, old: Sequence[Json]) -> dict[str, int]:
        spec = deployment["spec"]
        replicas = int(spec.get("replicas", 1))
        strategy = spec.get("strategy") or {}
        generations = [_generation(each, each["metadata"]["name"]) for each in old]
        if strategy.get("type") == "Recreate":
            old_pods = sum(len(self._pods.controlled_by(kinds.uid_of(each))) for each in old)
            return recreate_step(replicas, new=new, old=generations, old_pods=old_pods)
        return rolling_step(replicas, rolling_bounds(strategy, replicas), new=new, old=generations)

    async def _create_set(self, deployment: Json, *, revision: int, replicas: int) -> Json:
        metadata = deployment["metadata"]
        template = copy.deepcopy(deployment["spec"]["template"])
        digest = template_hash(template)
        template.setdefault("metadata", {}).setdefault("labels", {})[HASH_LABEL] = digest
        selector = copy.deepcopy(deployment["spec"]["selector"])
        selector.setdefault("matchLabels", {})[HASH_LABEL] = digest
        manifest: Json = {
            "metadata": {
                "name": f"{metadata['name']}-{digest}",
                "namespace": metadata["namespace"],
                "labels": template["metadata"]["labels"],
                "annotations": {REVISION: str(revision)},
                "ownerReferences": [kinds.controlled_by(kinds.DEPLOYMENT, deployment)],
            },
            "spec": {"replicas": replicas, "selector": selector, "template": template},
        }
        if deployment["spec"].get("minReadySeconds"):
            manifest["spec"]["minReadySeconds"] = deployment["spec"]["minReadySeconds"]
        created = await self.client.create(kinds.REPLICA_SET, manifest)
        self._sets.remember(created)
        self._tell(deployment, f"Scaled up replica set {created['metadata']['name']} from 0 to {replicas}")
        return created

    async def _copy_revision(self, deployment: Json, new: Json) -> None:
        revision = str(_revision(new))
        if (deployment["metadata"].get("annotations") or {}).get(REVISION) != revision:
            change = {"metadata": {"annotations": {REVISION: revision}}}
            self.own.remember(await self.client.patch(kinds.DEPLOYMENT, deployment, change))

    async def _scale(self, deployment: Json, replica_set: Json, replicas: int) -> None:
        before = replica_set["spec"].get("replicas", 1)
        if before == replicas:
            return
        self._sets.remember(await self.client.patch(kinds.REPLICA_SET, replica_set, {"spec": {"replicas": replicas}}))
        direction = "up" if replicas > before else "down"
        name = replica_set["metadata"]["name"]
        self._tell(deployment, f"Scaled {direction} replica set {name} from {before} to {replicas}")

    async def _drop_history(self, deployment: Json, old: Sequence[Json]) -> None:
        limit = int(deployment["spec"].get("revisionHistoryLimit", _DEFAULT_HISTORY))
        empty = [each for each in old if not each["spec"].get("replicas", 1) and not _count(each, "replicas")]
        for each in empty[: max(0, len(empty) - limit)]:
            await self.client.delete(kinds.REPLICA_SET, each)
            self._sets.forget(each)

    async def _report(self, deployment: Json, new: Json | None) -> None:
        """Report about the Deployment that was synced: what came meanwhile was not observed."""
        sets = self._sets.controlled_by(kinds.uid_of(deployment))
        fresh = None if new is None else self._sets.get(kinds.key_of(new))
        status = status_of(deployment, sets=sets, new=fresh, now=kinds.timestamp())
        await self.write_status(deployment, status)
        if (seconds := seconds_to_deadline(deployment, status)) is not None:
            self.enqueue_after(kinds.key_of(deployment), seconds)

    def _tell(self, deployment: Json, message: str) -> None:
        self.recorder.record(deployment, Happening(reason="ScalingReplicaSet", message=message))

    def _notice_pod(self, change: Change) -> None:
        if change.is_gone:
            owner = kinds.controller_uid(change.object)
            for replica_set in self._sets:
                if kinds.uid_of(replica_set) == owner:
                    self.enqueue_controller_of(replica_set)


def _set_for(deployment: Json, sets: Sequence[Json]) -> Json | None:
    """Return the ReplicaSet of the present template, whichever label value it got when it was made."""
    wanted = template_hash(deployment["spec"]["template"])
    return next((each for each in sets if each["metadata"].get("labels", {}).get(HASH_LABEL) == wanted), None)


def _generation(replica_set: Json | None, name: str) -> Generation:
    if replica_set is None:
        return Generation(name=name, replicas=0, available=0)
    replicas = int(replica_set["spec"].get("replicas", 1))
    return Generation(name=name, replicas=replicas, available=_count(replica_set, "availableReplicas"))


def _revision(replica_set: Json) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(REVISION, 0))


def _count(replica_set: Json, field: str) -> int:
    return int((replica_set.get("status") or {}).get(field) or 0)
