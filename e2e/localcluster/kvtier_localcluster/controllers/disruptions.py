# SPDX-License-Identifier: Apache-2.0
"""PodDisruptionBudgets: counts healthy pods and says how many may be evicted now; the API server counts down from that.

How many pods are expected is asked of what controls them, through Deployments; a pod without a controller is expected
only where the budget names a number of pods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

from kvtier_localcluster import conditions
from kvtier_localcluster.apiserver.store.selectors import labels_match
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import (
    DEPLOYMENT,
    POD,
    POD_DISRUPTION_BUDGET,
    REPLICA_SET,
    Json,
    Key,
    Kind,
    controller_uid,
    is_deleting,
    is_ready,
    key_of,
    merge_difference,
    phase_of,
    seconds_since,
    timestamp,
    uid_of,
)

_EVICTION_SECONDS: Final = 120
_FINISHED: Final = ("Succeeded", "Failed")


class DisruptionController(Controller):
    """Keeps the status of budgets."""

    kind: ClassVar[Kind] = POD_DISRUPTION_BUDGET

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to budgets, pods, and what says how many pods there should be."""
        super().__init__(client, informers)
        self._pods, self._sets, self._deployments = informers[POD], informers[REPLICA_SET], informers[DEPLOYMENT]
        for informer in (self._pods, self._sets, self._deployments):
            informer.listen(self._notice)

    async def sync(self, key: Key) -> None:
        """Count and report."""
        budget = self.own.get(key)
        if budget is None or is_deleting(budget):
            return
        selector = budget["spec"].get("selector")
        pods = [
            pod
            for pod in self._pods
            if key_of(pod)[0] == key[0]
            and phase_of(pod) not in _FINISHED
            and labels_match(selector, pod["metadata"].get("labels") or {})
        ]
        expected, desired = self._wanted(budget["spec"], pods)
        before = budget.get("status") or {}
        disrupted = _still_leaving(before.get("disruptedPods") or {}, pods)
        healthy = [
            pod for pod in pods if is_ready(pod) and not is_deleting(pod) and pod["metadata"]["name"] not in disrupted
        ]
        allowed = max(0, len(healthy) - desired) if expected > 0 else 0
        verdict = Condition(
            "DisruptionAllowed", holds=allowed > 0, reason="SufficientPods" if allowed > 0 else "InsufficientPods"
        )
        status = {
            "currentHealthy": len(healthy),
            "desiredHealthy": desired,
            "disruptionsAllowed": allowed,
            "expectedPods": expected,
            "observedGeneration": budget["metadata"]["generation"],
        }
        written = conditions.updated(before.get("conditions") or [], [verdict], timestamp())
        status["conditions"] = [{"message": "", **each} for each in written]
        if disrupted:
            status["disruptedPods"] = disrupted
            self.enqueue_after(key, _EVICTION_SECONDS)
        await self._report(budget, status)

    async def _report(self, budget: Json, status: Json) -> None:
        """Write the status over the one that was counted from, and no other: an eviction may have come meanwhile."""
        if difference := merge_difference(budget.get("status"), status):
            version = {"resourceVersion": budget["metadata"]["resourceVersion"]}
            change = {"metadata": version, "status": difference}
            self.own.remember(await self.client.patch(self.kind, budget, change, subresource="status"))

    def _wanted(self, spec: Json, pods: Sequence[Json]) -> tuple[int, int]:
        """Return how many pods there should be and how many of them must stay healthy."""
        least, most = spec.get("minAvailable"), spec.get("maxUnavailable")
        if most is None and isinstance(least, int):
            return len(pods), least
        expected = sum({uid: replicas for pod in pods for uid, replicas in [self._scale_of(pod)]}.values())
        if most is not None:
            return expected, max(0, expected - _share(most, expected))
        return expected, _share("1" if least is None else least, expected)

    def _scale_of(self, pod: Json) -> tuple[str, int]:
        """Return the uid and the replicas of what controls a pod in the end."""
        for replica_set in self._sets:
            if uid_of(replica_set) == controller_uid(pod):
                for deployment in self._deployments:
                    if uid_of(deployment) == controller_uid(replica_set):
                        return uid_of(deployment), int(deployment["spec"].get("replicas", 1))
                return uid_of(replica_set), int(replica_set["spec"].get("replicas", 1))
        return uid_of(pod), 0

    def _notice(self, change: Change) -> None:
        for budget in self.own:
            if key_of(budget)[0] == key_of(change.object)[0]:
                self.enqueue(key_of(budget))


def _share(wanted: int | str, of: int) -> int:
    """Return a number of pods, or that share of them, rounded up."""
    text = str(wanted)
    return math.ceil(int(text[:-1]) * of / 100) if text.endswith("%") else int(text)


def _still_leaving(disrupted: Json, pods: Sequence[Json]) -> Json:
    """Return the evictions whose pods are yet to be marked, unless that takes so long that they must have failed."""
    waiting = {pod["metadata"]["name"] for pod in pods if not is_deleting(pod)}
    return {
        name: since for name, since in disrupted.items() if name in waiting and seconds_since(since) < _EVICTION_SECONDS
    }
