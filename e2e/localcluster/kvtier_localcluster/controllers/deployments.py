# SPDX-License-Identifier: Apache-2.0
"""Deployments: one ReplicaSet for each pod template, rolled from one to the next."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers import adoption, deployment_status, rollout
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.controllers.rollout import HASH_LABEL, Generation
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import (
    DEPLOYMENT,
    POD,
    REPLICA_SET,
    Json,
    Key,
    Kind,
    controlled_by,
    controller_uid,
    is_deleting,
    key_of,
    timestamp,
    uid_of,
)
from kvtier_localcluster.recorder import Happening

REVISION = "deployment.kubernetes.io/revision"
_DEFAULT_HISTORY = 10


class DeploymentController(Controller):
    """Rolls Deployments out."""

    kind: ClassVar[Kind] = DEPLOYMENT

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to Deployments, their ReplicaSets, and pods (a Recreate rollout waits for the last old pod)."""
        super().__init__(client, informers)
        self._sets = informers[REPLICA_SET]
        self._pods = informers[POD]
        self._sets.listen(self.notice_child)
        self._pods.listen(self._notice_pod)

    async def sync(self, key: Key) -> None:
        """Do the next step of the rollout and report."""
        deployment = self.own.get(key)
        if deployment is None or is_deleting(deployment):
            return
        await adoption.claim(self.client, DEPLOYMENT, deployment, self._sets)
        sets = sorted(self._sets.controlled_by(uid_of(deployment)), key=_revision)
        new = _set_for(deployment, sets)
        if not deployment["spec"].get("paused"):
            new = await self._roll(deployment, sets, new)
        else:
            await self._scale_while_paused(deployment, sets)
        await self._report(deployment, new)

    async def _roll(self, deployment: Json, sets: Sequence[Json], new: Json | None) -> Json:
        old = [each for each in sets if new is None or uid_of(each) != uid_of(new)]
        name = f"{deployment['metadata']['name']}-{rollout.template_hash(deployment['spec']['template'])}"
        sizes = self._decide(deployment, _generation(new, name), old)
        revision = max((_revision(each) for each in old), default=0) + 1
        if new is None:
            new = await self._create_set(deployment, revision=revision, replicas=sizes[name])
        elif _revision(new) < revision:
            change = {"metadata": {"annotations": {REVISION: str(revision)}}}
            new = await self.client.patch(REPLICA_SET, new, change)
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
            old_pods = sum(len(self._pods.controlled_by(uid_of(each))) for each in old)
            return rollout.recreate_step(replicas, new=new, old=generations, old_pods=old_pods)
        return rollout.rolling_step(replicas, rollout.bounds(strategy, replicas), new=new, old=generations)

    async def _scale_while_paused(self, deployment: Json, sets: Sequence[Json]) -> None:
        active = [each for each in sets if each["spec"].get("replicas", 1)]
        if len(active) == 1:  # scaling is allowed while paused; a half-done rollout stays as it is
            await self._scale(deployment, active[0], int(deployment["spec"].get("replicas", 1)))

    async def _create_set(self, deployment: Json, *, revision: int, replicas: int) -> Json:
        metadata = deployment["metadata"]
        template = copy.deepcopy(deployment["spec"]["template"])
        digest = rollout.template_hash(template)
        template.setdefault("metadata", {}).setdefault("labels", {})[HASH_LABEL] = digest
        selector = copy.deepcopy(deployment["spec"]["selector"])
        selector.setdefault("matchLabels", {})[HASH_LABEL] = digest
        manifest: Json = {
            "metadata": {
                "name": f"{metadata['name']}-{digest}",
                "namespace": metadata["namespace"],
                "labels": template["metadata"]["labels"],
                "annotations": {REVISION: str(revision)},
                "ownerReferences": [controlled_by(DEPLOYMENT, deployment)],
            },
            "spec": {"replicas": replicas, "selector": selector, "template": template},
        }
        if deployment["spec"].get("minReadySeconds"):
            manifest["spec"]["minReadySeconds"] = deployment["spec"]["minReadySeconds"]
        created = await self.client.create(REPLICA_SET, manifest)
        self._sets.remember(created)
        self._tell(deployment, f"Scaled up replica set {created['metadata']['name']} from 0 to {replicas}")
        return created

    async def _copy_revision(self, deployment: Json, new: Json) -> None:
        revision = str(_revision(new))
        if (deployment["metadata"].get("annotations") or {}).get(REVISION) != revision:
            change = {"metadata": {"annotations": {REVISION: revision}}}
            self.own.remember(await self.client.patch(DEPLOYMENT, deployment, change))

    async def _scale(self, deployment: Json, replica_set: Json, replicas: int) -> None:
        before = replica_set["spec"].get("replicas", 1)
        if before == replicas:
            return
        self._sets.remember(await self.client.patch(REPLICA_SET, replica_set, {"spec": {"replicas": replicas}}))
        direction = "up" if replicas > before else "down"
        name = replica_set["metadata"]["name"]
        self._tell(deployment, f"Scaled {direction} replica set {name} from {before} to {replicas}")

    async def _drop_history(self, deployment: Json, old: Sequence[Json]) -> None:
        limit = int(deployment["spec"].get("revisionHistoryLimit", _DEFAULT_HISTORY))
        empty = [each for each in old if not each["spec"].get("replicas", 1) and not _count(each, "replicas")]
        for each in empty[: max(0, len(empty) - limit)]:
            await self.client.delete(REPLICA_SET, each)
            self._sets.forget(each)

    async def _report(self, deployment: Json, new: Json | None) -> None:
        """Report about the Deployment that was synced: what came meanwhile was not observed."""
        sets = self._sets.controlled_by(uid_of(deployment))
        fresh = None if new is None else self._sets.get(key_of(new))
        status = deployment_status.status_of(deployment, sets=sets, new=fresh, now=timestamp())
        await self.write_status(deployment, status)
        if (seconds := deployment_status.seconds_to_deadline(deployment, status)) is not None:
            self.enqueue_after(key_of(deployment), seconds)

    def _tell(self, deployment: Json, message: str) -> None:
        self.recorder.record(deployment, Happening(reason="ScalingReplicaSet", message=message))

    def _notice_pod(self, change: Change) -> None:
        if change.is_gone:
            owner = controller_uid(change.object)
            for replica_set in self._sets:
                if uid_of(replica_set) == owner:
                    self.enqueue_controller_of(replica_set)


def _set_for(deployment: Json, sets: Sequence[Json]) -> Json | None:
    """Return the ReplicaSet of the present template, whichever label value it got when it was made."""
    wanted = rollout.template_hash(deployment["spec"]["template"])
    for each in sets:
        if each["metadata"].get("labels", {}).get(HASH_LABEL) == wanted:
            return each
    return None


def _generation(replica_set: Json | None, name: str) -> Generation:
    if replica_set is None:
        return Generation(name=name, replicas=0, available=0)
    replicas = int(replica_set["spec"].get("replicas", 1))
    return Generation(name=name, replicas=replicas, available=_count(replica_set, "availableReplicas"))


def _revision(replica_set: Json) -> int:
    return int((replica_set["metadata"].get("annotations") or {}).get(REVISION, 0))


def _count(replica_set: Json, field: str) -> int:
    return int((replica_set.get("status") or {}).get(field) or 0)
