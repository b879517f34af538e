# SPDX-License-Identifier: Apache-2.0
"""Jobs that run one pod to completion: enough for hooks of charts. No parallelism, no indexes, no time to live."""

from __future__ import annotations

import copy
from typing import ClassVar

from kvtier_localcluster import conditions, kinds
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import Json, Key, Kind

_DEFAULT_BACKOFF_LIMIT = 6


class JobController(Controller):
    """Makes pods until one succeeds or too many failed."""

    kind: ClassVar[Kind] = kinds.JOB

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to Jobs and their pods."""
        super().__init__(client, informers)
        self._pods = informers[kinds.POD]
        self._pods.listen(lambda change: self.enqueue_controller_of(change.object))

    async def sync(self, key: Key) -> None:
        """Make the next pod where one is needed, and report."""
        job = self.own.get(key)
        if job is None or kinds.is_deleting(job) or job["spec"].get("suspend"):
            return
        if not _is_finished(job):
            pods = self._pods.controlled_by(kinds.uid_of(job))
            failed = sum(kinds.phase_of(pod) == "Failed" for pod in pods)
            is_done = any(kinds.phase_of(pod) == "Succeeded" for pod in pods)
            is_lost = failed > int(job["spec"].get("backoffLimit", _DEFAULT_BACKOFF_LIMIT))
            active = [pod for pod in pods if not kinds.is_finished(pod) and not kinds.is_deleting(pod)]
            if not active and not is_done and not is_lost:
                created = await self.client.create(kinds.POD, _pod(job))
                self._pods.remember(created)
                active = [created]
            await self.write_status(job, _status(job, active=len(active), failed=failed, is_done=is_done))


def _is_finished(job: Json) -> bool:
    return any(
        condition["type"] in ("Complete", "Failed") and condition["status"] == "True"
        for condition in (job.get("status") or {}).get("conditions") or []
    )


def _pod(job: Json) -> Json:
    template = copy.deepcopy(job["spec"]["template"])
    name = job["metadata"]["name"]
    labels = {
        **(template.get("metadata", {}).get("labels") or {}),
        "batch.kubernetes.io/controller-uid": kinds.uid_of(job),
        "batch.kubernetes.io/job-name": name,
        "job-name": name,
    }
    metadata = {
        "generateName": f"{name}-",
        "namespace": job["metadata"]["namespace"],
        "labels": labels,
        "annotations": template.get("metadata", {}).get("annotations") or {},
        "ownerReferences": [kinds.controlled_by(kinds.JOB, job)],
    }
    return {"metadata": metadata, "spec": template["spec"]}


def _status(job: Json, *, active: int, failed: int, is_done: bool) -> Json:
    before = job.get("status") or {}
    now = kinds.timestamp()
    status: Json = {
        "startTime": before.get("startTime", now),
        "ready": 0,
        "terminating": 0,
        "uncountedTerminatedPods": {},
    }
    counts = {"active": active, "failed": failed, "succeeded": int(is_done)}
    status.update({name: count for name, count in counts.items() if count})
    wanted = []
    if is_done:
        status["completionTime"] = before.get("completionTime", now)
        wanted = [
            Condition(kind, holds=True, reason="CompletionsReached") for kind in ("SuccessCriteriaMet", "Complete")
        ]
    elif failed and not active:
        message = "Job has reached the specified backoff limit"
        wanted = [Condition("Failed", holds=True, reason="BackoffLimitExceeded", message=message)]
    if wanted:
        status["conditions"] = conditions.updated(before.get("conditions") or [], wanted, now)
    return status
