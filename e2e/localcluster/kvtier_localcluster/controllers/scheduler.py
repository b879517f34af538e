# SPDX-License-Identifier: Apache-2.0
"""The scheduler: binds pods to the one node, or says why they do not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from kvtier_localcluster import conditions, kinds
from kvtier_localcluster.apiserver.store.objects import parse_quantity
from kvtier_localcluster.apiserver.store.selectors import labels_match
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import Json, Key, Kind
from kvtier_localcluster.recorder import Happening

Amounts = Mapping[str, float]


def requests_of(pod: Json) -> Counter[str]:
    """Return what a pod needs: the sum of its containers, or its largest init container where that is more."""
    spec = pod["spec"]
    total: Counter[str] = Counter(pods=1)
    for container in spec["containers"]:
        total.update(_container_requests(container))
    largest: Counter[str] = Counter()
    for container in spec.get("initContainers") or []:
        largest |= _container_requests(container)
    return total | largest


def shortages(pod: Json, *, allocatable: Amounts, placed: Iterable[Json]) -> list[str]:
    """Return the names of the resources that the node lacks for this pod."""
    used: Counter[str] = Counter()
    for other in placed:
        used.update(requests_of(other))
    wanted = requests_of(pod)
    return sorted(name for name, amount in wanted.items() if amount > allocatable.get(name, 0) - used[name])


def placement_problems(pod: Json, *, node: Json, placed: Sequence[Json], claims: Mapping[str, Json]) -> list[str]:
    """Return why the pod cannot run on the node, in the scheduler's words; empty means that it can."""
    spec = pod["spec"]
    for volume in spec.get("volumes") or []:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if name is None:
            continue
        if name not in claims:
            return [f'persistentvolumeclaim "{name}" not found']
        if (claims[name].get("status") or {}).get("phase") != "Bound":
            return ["pod has unbound immediate PersistentVolumeClaims"]
    if node["spec"].get("unschedulable"):
        return ["1 node(s) were unschedulable"]
    if not labels_match({"matchLabels": spec.get("nodeSelector")}, node["metadata"].get("labels") or {}):
        return ["1 node(s) didn't match Pod's node selector"]
    amounts = {name: parse_quantity(text) for name, text in node["status"]["allocatable"].items()}
    lacking = shortages(pod, allocatable=amounts, placed=placed)
    return ["1 Too many pods" if name == "pods" else f"1 Insufficient {name}" for name in lacking]


def _container_requests(container: Json) -> Counter[str]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    amounts: Counter[str] = Counter()
    for name, text in wanted.items():
        amounts[name] = parse_quantity(text)  # type: ignore[assignment]  # a Counter of floats adds up as well
    return amounts


class Scheduler(Controller):
    """Binds pods."""

    kind: ClassVar[Kind] = kinds.POD
    component: ClassVar[str] = "default-scheduler"

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to whatever may make room: pods that end, claims that are bound, a node that changes."""
        super().__init__(client, informers)
        self._nodes = informers[kinds.NODE]
        self._claims = informers[kinds.PERSISTENT_VOLUME_CLAIM]
        self._nodes.listen(self._notice_room)
        self._claims.listen(self._notice_room)
        self.own.listen(self._notice_end)

    async def sync(self, key: Key) -> None:
        """Bind one pod, or say why not."""
        pod = self.own.get(key)
        node = next(iter(self._nodes), None)
        if pod is None or node is None or not _is_waiting(pod):
            return
        claims = {claim["metadata"]["name"]: claim for claim in self._claims if kinds.key_of(claim)[0] == key[0]}
        placed = [
            other
            for other in self.own
            if other["spec"].get("nodeName") == node["metadata"]["name"] and not kinds.is_finished(other)
        ]
        reasons = placement_problems(pod, node=node, placed=placed, claims=claims)
        if reasons:
            await self._refuse(pod, f"0/1 nodes are available: {', '.join(reasons)}.")
        else:
            await self._bind(pod, node)

    async def _bind(self, pod: Json, node: Json) -> None:
        name = node["metadata"]["name"]
        self.own.remember(await self.client.patch(kinds.POD, pod, {"spec": {"nodeName": name}}))
        namespace, pod_name = kinds.key_of(pod)
        message = f"Successfully assigned {namespace}/{pod_name} to {name}"
        self.recorder.record(pod, Happening(reason="Scheduled", message=message))

    async def _refuse(self, pod: Json, message: str) -> None:
        status = pod.get("status") or {}
        claim = Condition("PodScheduled", holds=False, reason="Unschedulable", message=message)
        present = status.get("conditions") or []
        known = conditions.find(present, claim.type)
        if known is None or known.get("message") != message:
            self.recorder.record(pod, Happening(reason="FailedScheduling", message=message, is_warning=True))
        written = conditions.updated(present, [claim], kinds.timestamp())
        await self.write_status(pod, {**status, "phase": "Pending", "conditions": written})

    def _notice_room(self, change: Change) -> None:
        del change  # whatever it was, every waiting pod is looked at again
        for pod in self.own:
            if _is_waiting(pod):
                self.enqueue(kinds.key_of(pod))

    def _notice_end(self, change: Change) -> None:
        if change.is_gone or kinds.is_finished(change.object):
            self._notice_room(change)


def _is_waiting(pod: Json) -> bool:
    is_over = kinds.is_deleting(pod) or kinds.is_finished(pod)
    return not is_over and not pod["spec"].get("nodeName")
