# SPDX-License-Identifier: Apache-2.0
"""ReplicaSets: as many pods of one template as asked for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar

from kvtier_localcluster import kinds
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers import loop
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.errors import ApiFailure, NotFound
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import Json, Key, Kind
from kvtier_localcluster.recorder import Happening

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


def deletion_rank(pod: Json) -> tuple[int, ...]:
    """Return a key that sorts pods by how little is lost with them: those that do not serve come first."""
    annotations = pod["metadata"].get("annotations") or {}
    created = pod["metadata"]["creationTimestamp"]
    youth = -int("".join(character for character in created if character.isdigit()))
    return (
        1 if pod["spec"].get("nodeName") else 0,
        1 if kinds.phase_of(pod) == "Running" else 0,
        1 if kinds.is_ready(pod) else 0,
        int(annotations.get(DELETION_COST, 0)),
        youth,
    )


class ReplicaSetController(Controller):
    """Makes and deletes pods."""

    kind: ClassVar[Kind] = kinds.REPLICA_SET

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to ReplicaSets and their pods."""
        super().__init__(client, informers)
        self._pods = informers[kinds.POD]
        self._pods.listen(self.notice_child)

    async def sync(self, key: Key) -> None:
        """Make or delete pods until the number is right, and count them."""
        replica_set = self.own.get(key)
        if replica_set is None or kinds.is_deleting(replica_set):
            return
        await loop.adopt(self.client, kinds.REPLICA_SET, replica_set, self._pods)
        active = self._active_pods(replica_set)
        missing = int(replica_set["spec"].get("replicas", 1)) - len(active)
        for _ in range(missing):
            await self._create_pod(replica_set)
        for pod in sorted(active, key=deletion_rank)[: max(0, -missing)]:
            await self._delete_pod(replica_set, pod)
        await self._report(replica_set, self._active_pods(replica_set))

    def _active_pods(self, replica_set: Json) -> list[Json]:
        pods = self._pods.controlled_by(kinds.uid_of(replica_set))
        return [pod for pod in pods if not kinds.is_deleting(pod) and not kinds.is_finished(pod)]

    async def _create_pod(self, replica_set: Json) -> None:
        template = copy.deepcopy(replica_set["spec"]["template"])
        metadata = {
            "generateName": f"{replica_set['metadata']['name']}-",
            "namespace": replica_set["metadata"]["namespace"],
            "labels": template.get("metadata", {}).get("labels") or {},
            "annotations": template.get("metadata", {}).get("annotations") or {},
            "ownerReferences": [kinds.controlled_by(kinds.REPLICA_SET, replica_set)],
        }
        try:
            pod = await self.client.create(kinds.POD, {"metadata": metadata, "spec": template["spec"]})
        except ApiFailure as problem:
            message = f"Error creating: {problem}"
            self.recorder.record(replica_set, Happening(reason="FailedCreate", message=message, is_warning=True))
            raise
        self._pods.remember(pod)
        message = f"Created pod: {pod['metadata']['name']}"
        self.recorder.record(replica_set, Happening(reason="SuccessfulCreate", message=message))

    async def _delete_pod(self, replica_set: Json, pod: Json) -> None:
        try:
            answer = await self.client.delete(kinds.POD, pod)
        except NotFound:
            return
        if answer.get("kind") == kinds.POD.name and kinds.is_deleting(answer):
            self._pods.remember(answer)
        else:
            self._pods.forget(pod)
        message = f"Deleted pod: {pod['metadata']['name']}"
        self.recorder.record(replica_set, Happening(reason="SuccessfulDelete", message=message))

    async def _report(self, replica_set: Json, pods: Sequence[Json]) -> None:
        grace_seconds = int(replica_set["spec"].get("minReadySeconds") or 0)
        ready_seconds = [kinds.seconds_since(since) for pod in pods if (since := kinds.ready_since(pod)) is not None]
        settled = [seconds for seconds in ready_seconds if seconds >= grace_seconds]
        if len(settled) < len(ready_seconds):
            key = replica_set["metadata"]["namespace"], replica_set["metadata"]["name"]
            self.enqueue_after(key, grace_seconds - min(ready_seconds) + 0.1)
        counts = {
            "fullyLabeledReplicas": len(pods),
            "readyReplicas": len(ready_seconds),
            "availableReplicas": len(settled),
        }
        status = {
            "replicas": len(pods),
            **{name: value for name, value in counts.items() if value},
            "observedGeneration": replica_set["metadata"]["generation"],
        }
        await self.write_status(replica_set, status)
