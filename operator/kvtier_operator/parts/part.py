# SPDX-License-Identifier: Apache-2.0
"""The protocol that every part of a tier follows, and the problems that pods of any part can have. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.conditions import ConditionRule, Problem, Status, quoted
from kvtier_operator.errors import ClusterError
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Pod, Snapshot


@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything that a part decides by."""

    plan: TierPlan
    snapshot: Snapshot
    status: Status = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """Parts that others cannot rely on in this reconcile."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a tier: its objects, the parts that it needs, and its conditions."""

    name: str
    keys: Callable[[TierRef], tuple[ObjectKey, ...]] = lambda _tier: ()
    """All objects that it may have. Those that stand and are not wanted are deleted."""
    wants: Callable[[Work], Iterable[Manifest | None]] = lambda _work: ()
    """Its objects, in the order in which they are applied."""
    leaves: Callable[[Work], bool] = lambda _work: False
    """Whether objects that stand and are not wanted stay all the same."""
    why_deleted: Callable[[Work], str] = lambda _work: "the spec does not ask for it any more"
    """End of a sentence that begins with the object."""
    waits: Callable[[Work], bool] = lambda _work: False
    """Whether its objects are not made yet. Those that stand are applied."""
    needs: tuple[str, ...] = ()
    """Parts that must stand before it is applied."""
    serves_as_it_was: bool = False
    """Whether the parts that need it can use its objects of an earlier reconcile."""
    refuse: Callable[[TierSpec, Snapshot], Refusal | None] = lambda _spec, _snapshot: None
    """Returns why it cannot become what the spec asks for."""
    is_read: Callable[[Mapping[str, Any]], bool] = lambda _body: True
    """Whether its objects are read for this tier: a cluster may lack the kind of an optional part."""
    own_problem: Callable[[ClusterError | Refusal, Status], Problem] | None = None
    """Returns what its own condition says of a failure; None where Ready reports the failure."""
    conditions: tuple[ConditionRule[Any], ...] = ()
    """In the order in which Ready reports them."""

    def objects(self, work: Work) -> tuple[Manifest, ...]:
        """Return the objects that it wants."""
        return tuple(each for each in self.wants(work) if each is not None)


IMAGE_PULL: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_BROKEN: Final = frozenset(
    {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)
_MOST_QUOTED: Final = 300
"""Characters of a container's last output that a message repeats."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """A small Deployment beside the engines, as messages about its pods name it."""

    name: str
    effect: str = ""
    """Consequence while it does not run, as the end of a clause."""
    image_fields: str
    """Fields that name its image."""
    resources_field: str
    remedy: str = ""
    """Remedy for a container that ends."""

    def reason(self, what: str) -> Reason:
        """Return a reason of its own, such as `RouterFailing`."""
        return Reason(f"{self.name.capitalize()}{what}")


def component_problem(component: Component, pods: Iterable[Pod], live: Manifest | None) -> Problem | None:
    """Return why the pods of a component do not run, by them and its Deployment; None where they run or start."""
    for pod in pods:
        found = None if pod.is_ready or pod.is_terminating else _pod_problem(component, pod)
        if found is not None:
            return found
    conditions = () if live is None else live.get("status", {}).get("conditions", ())
    failure: Mapping[str, Any] = next((each for each in conditions if each["type"] == "ReplicaFailure"), {})
    if failure.get("status") != "True":
        return None
    return Problem(
        component.reason("Refused"),
        f"pods of the {component.name} cannot be created{quoted(failure.get('message', ''))}; raise the quota, "
        "or change what was refused",
    )


def _pod_problem(component: Component, pod: Pod) -> Problem | None:
    name, effect = component.name, component.effect
    for container in pod.containers:
        said = container.waiting_message
        if container.waiting_reason in IMAGE_PULL:
            return Problem(
                component.reason("ImagePullFailed"),
                f"pod {pod.name} of the {name} cannot pull {container.image} ({container.waiting_reason}"
                f"{quoted(said)}){effect}: correct {component.image_fields}, or give a pull secret in "
                "spec.engine.podTemplate.imagePullSecrets",
            )
        if container.waiting_reason in _BROKEN and container.exit_reason == "OOMKilled":
            return Problem(
                component.reason("Failing"),
                f"the {name} in pod {pod.name} was killed at its limit of memory, {container.restarts} times"
                f"{effect}: raise {component.resources_field}.memory",
            )
        if container.waiting_reason in _BROKEN:
            why = said or container.waiting_reason
            if container.exit_code is not None:
                last = container.exit_message[-_MOST_QUOTED:].strip()
                why = f"it ended with exit code {container.exit_code}{quoted(last)}"
            remedy = f"; {component.remedy}" if component.remedy else ""
            return Problem(
                component.reason("Failing"),
                f"the {name} in pod {pod.name} does not stay up{effect}: {why}; `kubectl logs {pod.name} "
                f"--previous` says more{remedy}",
            )
    if pod.is_scheduled is False:
        return Problem(
            component.reason("NotScheduled"),
            f"no node takes pod {pod.name} of the {name}{effect}{quoted(pod.scheduling_message)}: make room on "
            f"a node, or lower {component.resources_field}",
        )
    return None
