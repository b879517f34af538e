# SPDX-License-Identifier: Apache-2.0
"""A node without processes: pods are Running and Ready at once, for tests with many resources.

The annotation `localcluster.kvtier.dev/simulate: NotReady` keeps a pod unready, and may change while the pod runs. A
pod that is never restarted, as those of a Job, succeeds at once.
"""

from __future__ import annotations

from typing import ClassVar

from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import POD, Json, Key, Kind, is_deleting, timestamp, uid_of
from kvtier_localcluster.node.services import NODE_NAME, PodAddresses
from kvtier_localcluster.node.status import ContainerState, PodState, Termination, status_for

SIMULATE = "localcluster.kvtier.dev/simulate"


class SimulatedNode(Controller):
    """Writes the status that pods would have if they ran."""

    kind: ClassVar[Kind] = POD
    component: ClassVar[str] = "kubelet"

    def __init__(self, client: ApiClient, informers: Informers, addresses: PodAddresses) -> None:
        """Listen to pods."""
        super().__init__(client, informers)
        self._addresses = addresses
        self._given: dict[str, str] = {}

    async def sync(self, key: Key) -> None:
        """Let one pod run, or end."""
        pod = self.own.get(key)
        if pod is None:
            self._forget_the_gone()
        elif pod["spec"].get("nodeName") == NODE_NAME and is_deleting(pod):
            await self.client.delete(POD, pod, grace_seconds=0)
        elif pod["spec"].get("nodeName") == NODE_NAME:
            before = pod.get("status") or {}
            await self.write_status(pod, status_for(self._state(pod), before, timestamp()))

    def _state(self, pod: Json) -> PodState:
        uid = uid_of(pod)
        if uid not in self._given:
            self._given[uid] = self._addresses.allocate()
        began = (pod.get("status") or {}).get("startTime") or timestamp()
        runs_once = pod["spec"].get("restartPolicy") == "Never"
        wish = (pod["metadata"].get("annotations") or {}).get(SIMULATE)
        done = Termination(exit_code=0, reason="Completed", started_at=began, finished_at=began)
        return PodState(
            pod_ip=self._given[uid],
            started_at=began,
            init_containers=[
                ContainerState(name=each["name"], image=each.get("image", ""), is_init=True, ended=done)
                for each in pod["spec"].get("initContainers") or []
            ],
            containers=[
                ContainerState(
                    name=each["name"],
                    image=each.get("image", ""),
                    running_since=None if runs_once else began,
                    ended=done if runs_once else None,
                    is_started=True,
                    is_ready=wish is None and not runs_once,
                )
                for each in pod["spec"]["containers"]
            ],
        )

    def _forget_the_gone(self) -> None:
        living = {uid_of(pod) for pod in self.own}
        for uid in [uid for uid in self._given if uid not in living]:
            self._addresses.release(self._given.pop(uid))
