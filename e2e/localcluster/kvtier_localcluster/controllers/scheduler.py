# SPDX-License-Identifier: Apache-2.0
"""The scheduler: gives pods to the one node, or says why it cannot take them."""

from __future__ import annotations

from typing import ClassVar

from kvtier_localcluster import conditions
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.controllers import placement
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import (
    NODE,
    PERSISTENT_VOLUME_CLAIM,
    POD,
    Json,
    Key,
    Kind,
    is_deleting,
    key_of,
    phase_of,
    timestamp,
)
from kvtier_localcluster.recorder import Happening

_FINISHED = ("Succeeded", "Failed")


class Scheduler(Controller):
    """Binds pods."""

    kind: ClassVar[Kind] = POD
    component: ClassVar[str] = "default-scheduler"

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to whatever may make room: pods that end, claims that are bound, a node that changes."""
        super().__init__(client, informers)
        self._nodes = informers[NODE]
        self._claims = informers[PERSISTENT_VOLUME_CLAIM]
        self._nodes.listen(self._notice_room)
        self._claims.listen(self._notice_room)
        self.own.listen(self._notice_end)

    async def sync(self, key: Key) -> None:
        """Bind one pod, or say why not."""
        pod = self.own.get(key)
        node = next(iter(self._nodes), None)
        if pod is None or node is None or not _is_waiting(pod):
            return
        claims = {claim["metadata"]["name"]: claim for claim in self._claims if key_of(claim)[0] == key[0]}
        placed = [
            other
            for other in self.own
            if other["spec"].get("nodeName") == node["metadata"]["name"] and phase_of(other) not in _FINISHED
        ]
        reasons = placement.problems(pod, node=node, placed=placed, claims=claims)
        if reasons:
            await self._refuse(pod, f"0/1 nodes are available: {', '.join(reasons)}.")
        else:
            await self._bind(pod, node)

    async def _bind(self, pod: Json, node: Json) -> None:
        name = node["metadata"]["name"]
        self.own.remember(await self.client.patch(POD, pod, {"spec": {"nodeName": name}}))
        namespace, pod_name = key_of(pod)
        message = f"Successfully assigned {namespace}/{pod_name} to {name}"
        self.recorder.record(pod, Happening(reason="Scheduled", message=message))

    async def _refuse(self, pod: Json, message: str) -> None:
        status = pod.get("status") or {}
        claim = Condition("PodScheduled", holds=False, reason="Unschedulable", message=message)
        present = status.get("conditions") or []
        known = conditions.find(present, claim.type)
        if known is None or known.get("message") != message:
            self.recorder.record(pod, Happening(reason="FailedScheduling", message=message, is_warning=True))
        written = conditions.updated(present, [claim], timestamp())
        await self.write_status(pod, {**status, "phase": "Pending", "conditions": written})

    def _notice_room(self, change: Change) -> None:
        del change  # whatever it was, every waiting pod is looked at again
        for pod in self.own:
            if _is_waiting(pod):
                self.enqueue(key_of(pod))

    def _notice_end(self, change: Change) -> None:
        if change.is_gone or phase_of(change.object) in _FINISHED:
            self._notice_room(change)


def _is_waiting(pod: Json) -> bool:
    is_ours = pod["spec"].get("schedulerName", "default-scheduler") == "default-scheduler"
    return is_ours and not pod["spec"].get("nodeName") and not is_deleting(pod) and phase_of(pod) not in _FINISHED
