# SPDX-License-Identifier: Apache-2.0
"""What a tier says about itself: conditions, sizes, counts, and which Events a change of them deserves.

Pure. There is no phase: `Ready` summarises the conditions after it, and `Reconciling` and `Stalled` mean what kstatus
takes them to mean. Nothing in it changes when nothing happened, so that writing it never wakes us for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec, model_spec
from kvtier_operator.api.reasons import CONDITIONS, Reason
from kvtier_operator.conditions import Problem, View, look_of, met
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.parts import PARTS, disk, observations, preflight, routing, serving
from kvtier_operator.parts.capabilities import not_applicable
from kvtier_operator.parts.claim import SHARING
from kvtier_operator.parts.preflight import CHECKED
from kvtier_operator.plan import CacheGeneration
from kvtier_operator.plan import report as plan_report

__all__ = ["Problem", "Reason", "Transition", "View", "changes", "report", "transitions"]

_NORMAL: Final = frozenset(
    reason.value
    for reason in (
        Reason.READY,
        Reason.PAUSED,
        Reason.ACTIVE,
        Reason.ENGINES_STARTING,
        Reason.CLAIM_MISSING,
        Reason.CLAIM_PENDING,
        Reason.SERVING,
        Reason.SCALED_TO_ZERO,
        Reason.CURRENT,
        Reason.ENGINES_OUTDATED,
        Reason.ENGINES_REPLACED,
        Reason.JANITOR_RUNS,
        Reason.JANITOR_STARTING,
        Reason.JANITOR_DISABLED,
        Reason.CLAIM_ALONE,
        Reason.BUDGETS_FIT,
        Reason.ROUTER_STARTING,
    )
)
"""Reasons that a healthy tier passes through; every other one is a Warning."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """News about a tier, in the words of an Event."""

    level: str
    """Normal or Warning."""
    reason: str
    message: str


def report(view: View, previous: Mapping[str, Any], *, now: str) -> dict[str, Any]:
    """Return the whole status; times of conditions whose status did not flip stay as they were."""
    told = {
        each.kind: not_applicable(each.kind, view.spec, view.snapshot)
        or _as_growth(each.judge(view, previous), is_growing=serving.is_growing(view, previous))
        for part in PARTS
        for each in part.conditions
    }
    has_engines = view.snapshot is not None and view.snapshot.engines.generation > 0
    judged = [
        # What keeps engines from starting stands before what they have not done yet; those that run are not judged.
        *(() if has_engines else (CHECKED.kind,)),
        *(each.kind for part in PARTS for each in part.conditions if each.counts and each is not CHECKED),
    ]
    blocker = _blocker(view)
    first = blocker or next((told[kind] for kind in judged if _counts(told[kind])), None)
    is_paused = view.spec is not None and view.spec.paused
    stalled = _stalled(view, blocker=blocker, first=first)
    moving = first if stalled is None and not is_paused else None
    ready = met(Reason.READY, "all engines serve and share the volume")
    paused = Problem(reason=Reason.PAUSED, message=Reason.PAUSED.doc, is_met=True)
    told |= {
        "Ready": first or ready,
        "Paused": paused if is_paused else _no(Reason.ACTIVE, Reason.ACTIVE.doc),
        "Reconciling": _no(Reason.IDLE, _rest(stalled, is_paused=is_paused))
        if moving is None
        else met(Reason.PROGRESSING, moving.message),
        "Stalled": _no(Reason.NOT_STALLED, Reason.NOT_STALLED.doc)
        if stalled is None
        else met(stalled.reason, stalled.message),
    }
    conditions = [_condition(kind, told[kind]) for kind in CONDITIONS]
    engines = None if view.snapshot is None else view.snapshot.engines
    # What is not known in this pass was true in an earlier one.
    kept = {field: previous[field] for field in _KEPT if field in previous}
    usage = _usage(view, previous)
    return {
        **kept,
        "observedGeneration": view.generation,
        "selector": names.selector_text(view.tier),
        "replicas": previous.get("replicas", 0) if engines is None else engines.replicas,
        "readyReplicas": previous.get("readyReplicas", 0) if engines is None else engines.ready,
        "conditions": _timed(conditions, previous.get("conditions", ()), generation=view.generation, now=now),
        **_proof(view, previous),
        **(
            {}
            if view.sizing is None
            else {"sizing": plan_report.terms(view.sizing, view.capacity, node_bytes=view.node_bytes)}
        ),
        **({} if view.current is None else {"generation": _generation(view.current, view.spec)}),
        **usage,
        **({"routing": routed} if (routed := routing.document(view, previous)) else {}),
        **_loras(view),
    }


_KEPT: Final = ("sizing", "generation")


def _loras(view: View) -> dict[str, Any]:
    """Return the adapters, in the order of the spec; nothing where there are none."""
    served = () if view.spec is None else view.spec.model.loras
    found = [{"name": lora["name"], "source": model_spec.describe_source(lora["source"])} for lora in served]
    return {"loras": found} if found else {}


def _usage(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the volume holds, or held when somebody last counted."""
    look = look_of(view)
    if look is None or view.current is None:
        return {field: previous[field] for field in ("tiers", "generations") if field in previous}
    found, tiers = disk.generations(look, current=view.current.digest), disk.tiers(look)
    if found is not None:
        return {"tiers": tiers, "generations": found}
    if not look.spec.janitor.enabled or not look.spec.connector.has_janitor:
        # Nobody counts any more, and what was counted is not how it is.
        return {"tiers": tiers}
    known = next((each for each in previous.get("tiers", ()) if each["name"] == "disk"), None)
    counted = disk.with_roles(previous.get("generations", ()), current=view.current.digest)
    return {"tiers": [tiers[0], known or tiers[1]], **({"generations": counted} if counted else {})}


def _proof(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    rollout, kept = observations.rollout(view, previous), preflight.document(view, previous)
    return {
        **({} if rollout is None else {"proof": {"rollout": rollout}}),
        **({"storage": kept} if kept else {}),
    }


def changes(previous: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merge patch from one status to the other: empty when nothing moved."""
    patch: dict[str, Any] = {field: None for field in previous if field not in wanted}
    for field, value in wanted.items():
        found = previous.get(field)
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            patch.update({field: nested} if (nested := changes(found, value)) else {})
        elif found != value:
            patch[field] = value
    return patch


def transitions(previous: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Transition]:
    """Return what deserves an Event: news of Ready, and pausing and resuming."""
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
    told: list[Transition] = []
    for condition in wanted["conditions"]:
        old = before.get(condition["type"], {})
        overlap = Reason.BUDGETS_OVERLAP.value
        is_news = {
            SHARING.kind: (old.get("reason") == overlap) != (condition["reason"] == overlap),
            "Ready": (old.get("status"), old.get("reason")) != (condition["status"], condition["reason"]),
            # A tier that was never paused is no news.
            "Paused": old.get("status", "False") != condition["status"],
            "Available": old.get("status") == "True" != condition["status"],
            "JanitorHealthy": (old.get("status") == "False") != (condition["status"] == "False"),
            "UpToDate": (old.get("status") == "False") != (condition["status"] == "False"),
        }.get(condition["type"], False)
        if is_news and condition["reason"] not in {each.reason for each in told}:
            level = "Normal" if condition["reason"] in _NORMAL else "Warning"
            told.append(Transition(level=level, reason=condition["reason"], message=condition["message"]))
    return told


def _blocker(view: View) -> Problem | None:
    """Return what kept the spec from being carried out, before any engine is looked at."""
    if isinstance(view.invalid, SpecInvalid):
        runs = "" if view.spec is None else "; engines stay as they are, and fields that replace none are followed"
        return Problem(reason=Reason.SPEC_INVALID, message=f"{view.invalid}{runs}")
    if view.refusal is not None:
        also = "" if view.failure is None else f"; {view.failure}"
        return Problem(reason=view.refusal.reason, message=view.refusal.message + also)
    if view.failure is not None:
        return Problem(reason=Reason.APPLY_FAILED, message=str(view.failure))
    return None


def _counts(problem: Problem) -> bool:
    return problem.is_known and not problem.is_met and problem.reason is not Reason.ENGINES_ADDED


def _as_growth(problem: Problem, *, is_growing: bool) -> Problem:
    """Return the same problem, told as one that a ready tier has while it gets more engines."""
    if not is_growing or problem.reason is not Reason.ENGINES_STARTING:
        return problem
    return replace(problem, reason=Reason.ENGINES_ADDED)


def _rest(stalled: Problem | None, *, is_paused: bool) -> str:
    """Say why nothing goes on."""
    if stalled is not None:
        return "nothing goes on until a person acts: see Stalled"
    return "nothing goes on while the tier is paused" if is_paused else "nothing is left to do for this spec"


def _stalled(view: View, *, blocker: Problem | None, first: Problem | None) -> Problem | None:
    """Return the problem that only a person can solve, or None."""
    if view.failure is not None and blocker is not None:
        is_hopeless = view.failure.retry_after is None or view.failure.retry_after > _SOON_SECONDS
        return blocker if is_hopeless else None
    if blocker is not None:
        return None if blocker.reason in _ENDS_BY_ITSELF else blocker
    return first if first is not None and first.reason in _NEEDS_A_PERSON else None


_NEEDS_A_PERSON: Final = frozenset(
    {Reason.ROLLOUT_STALLED, Reason.CLAIM_LOST, Reason.CANARY_MISSED, Reason.CANARY_NOT_STORED, Reason.PREFLIGHT_FAILED}
)


_ENDS_BY_ITSELF: Final = frozenset({Reason.CLAIM_MISSING, Reason.OBJECT_NOT_OURS})
"""Refusals that end without an edit of the resource: whoever makes the claim, or removes what stands in the way, is
noticed."""

_SOON_SECONDS: Final = 30.0
"""What is worth retrying sooner than this passes by itself."""


def _condition(kind: str, problem: Problem) -> dict[str, Any]:
    status = "True" if problem.is_met else "False" if problem.is_known else "Unknown"
    return {"type": kind, "status": status, "reason": problem.reason.value, "message": problem.message}


def _no(reason: Reason, message: str) -> Problem:
    """Return what is said of a condition that is True only while something out of the ordinary holds."""
    return Problem(reason=reason, message=message)


def _timed(
    conditions: Iterable[Mapping[str, Any]], previous: Iterable[Mapping[str, Any]], *, generation: int, now: str
) -> list[dict[str, Any]]:
    before = {condition["type"]: condition for condition in previous}
    timed = []
    for condition in conditions:
        old = before.get(condition["type"], {})
        has_flipped = old.get("status") != condition["status"] or "lastTransitionTime" not in old
        time = now if has_flipped else old["lastTransitionTime"]
        message = condition["message"][:LONGEST_MESSAGE]
        timed.append({**condition, "message": message, "observedGeneration": generation, "lastTransitionTime": time})
    return timed


LONGEST_MESSAGE: Final = 4096
"""Characters of a condition's message. Some quote others at length, and the API server takes no status with one that is
longer than 32768."""


def _generation(current: CacheGeneration, spec: TierSpec | None) -> dict[str, str]:
    is_on_volume = spec is None or spec.connector.uses_volume
    return {"current": current.digest, **({"root": current.root} if is_on_volume else {})}
