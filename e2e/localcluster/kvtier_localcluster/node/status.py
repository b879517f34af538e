# SPDX-License-Identifier: Apache-2.0
"""The status of a pod, made from the states of its containers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier_localcluster import conditions
from kvtier_localcluster.conditions import Condition
from kvtier_localcluster.kinds import Json

CREATING = "ContainerCreating"
INITIALIZING = "PodInitializing"


@dataclass(frozen=True, kw_only=True)
class Termination:
    """How a container ended."""

    exit_code: int
    reason: str
    started_at: str
    finished_at: str
    message: str = ""

    def written(self) -> Json:
        """Return it as the API has it."""
        written: Json = {"exitCode": self.exit_code, "reason": self.reason}
        if self.message:
            written["message"] = self.message
        return {**written, "startedAt": self.started_at, "finishedAt": self.finished_at}


@dataclass(kw_only=True)
class ContainerState:
    """The state of one container; its runner changes it, the status is made from it."""

    name: str
    image: str
    is_init: bool = False
    waiting_reason: str = CREATING
    waiting_message: str = ""
    running_since: str | None = None
    ended: Termination | None = None
    """Set while the container is over and not waiting for a restart."""
    last_ended: Termination | None = None
    restarts: int = 0
    is_started: bool = False
    is_ready: bool = False
    process_id: int = 0

    @property
    def is_running(self) -> bool:
        """Tell whether it runs now."""
        return self.running_since is not None

    def written(self) -> Json:
        """Return the container status as the API has it."""
        written: Json = {
            "name": self.name,
            "state": self._state(),
            "lastState": {"terminated": self.last_ended.written()} if self.last_ended else {},
            "ready": self.is_initialized if self.is_init else self.is_ready,
            "restartCount": self.restarts,
            "image": self.image,
            "imageID": "",
            "started": self.is_started and self.is_running,
        }
        if self.process_id:
            written["containerID"] = f"process://{self.process_id}"
        return written

    @property
    def is_initialized(self) -> bool:
        """Tell whether an init container has done what the next one waits for."""
        return self.ended is not None and self.ended.exit_code == 0

    def _state(self) -> Json:
        if self.running_since is not None:
            return {"running": {"startedAt": self.running_since}}
        if self.ended is not None:
            return {"terminated": self.ended.written()}
        waiting = {"reason": self.waiting_reason}
        return {"waiting": {**waiting, "message": self.waiting_message} if self.waiting_message else waiting}


@dataclass(frozen=True, kw_only=True)
class PodState:
    """The state of one pod on the node."""

    pod_ip: str
    started_at: str
    containers: Sequence[ContainerState]
    init_containers: Sequence[ContainerState] = field(default_factory=tuple)
    is_ending: bool = False


def phase_for(state: PodState) -> str:
    """Return the phase."""
    if any(not each.is_initialized and each.ended is not None for each in state.init_containers):
        return "Failed"
    if all(each.ended is not None for each in state.containers):
        codes = [each.ended.exit_code for each in state.containers if each.ended is not None]
        return "Succeeded" if not any(codes) else "Failed"
    seen = [each.is_running or each.ended or each.last_ended for each in state.containers]
    return "Running" if all(seen) else "Pending"


def status_for(state: PodState, before: Json, now: str) -> Json:
    """Return the status of a pod; times of conditions that stay as they were are kept from the status before."""
    phase = phase_for(state)
    present = before.get("conditions") or []
    status: Json = {
        "phase": phase,
        "conditions": conditions.updated(present, _claims(state, phase), now),
        "hostIP": "127.0.0.1",
        "podIP": state.pod_ip,
        "podIPs": [{"ip": state.pod_ip}],
        "startTime": state.started_at,
        "containerStatuses": [each.written() for each in sorted(state.containers, key=lambda each: each.name)],
    }
    if state.init_containers:
        status["initContainerStatuses"] = [each.written() for each in state.init_containers]
    return status


def _claims(state: PodState, phase: str) -> list[Condition]:
    uninitialized = [each.name for each in state.init_containers if not each.is_initialized]
    unready = [each.name for each in state.containers if not each.is_ready]
    initialized, readiness = Condition("Initialized", holds=True), ("", "")
    if uninitialized and phase != "Running":
        text = f"containers with incomplete status: [{' '.join(uninitialized)}]"
        initialized = Condition("Initialized", holds=False, reason="ContainersNotInitialized", message=text)
    if phase == "Succeeded":
        readiness = ("PodCompleted", "")
    elif unready:
        readiness = ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
    is_ready = not unready and phase == "Running"
    return [
        initialized,
        Condition("Ready", is_ready and not state.is_ending, *readiness),
        Condition("ContainersReady", is_ready, *readiness),
        Condition("PodScheduled", holds=True),
    ]
