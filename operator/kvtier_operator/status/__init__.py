# SPDX-License-Identifier: Apache-2.0
"""What a tier says about itself: conditions, sizes, counts, and which Events a change of them deserves.

Pure. There is no phase: `Ready` summarises the conditions after it, and `Reconciling` and `Stalled` mean what kstatus
(kubectl wait, Argo CD, Flux) takes them to mean. Nothing in it changes when nothing happened, so that writing it never
wakes us for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.plan import Generation, RefusalReason, terms
from kvtier_operator.status import disk, proofs, storage
from kvtier_operator.status.checks import SUMMARY
from kvtier_operator.status.problems import Check, Look, Problem, View, as_before
from kvtier_operator.status.reasons import Reason

__all__ = ["SUMMARY", "Problem", "Reason", "Transition", "View", "changes", "report", "transitions"]

_NORMAL: Final = frozenset(
    reason.value
    for reason in (
        Reason.READY,
        Reason.PAUSED,
        Reason.ACTIVE,
        Reason.ENGINES_STARTING,
        Reason.CLAIM_MISSING,
        Reason.CLAIM_PENDING,
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


_REFUSED: Final = {
    RefusalReason.OBJECT_NOT_OURS: Reason.OBJECT_NOT_OURS,
    RefusalReason.CLAIM_MISSING: Reason.CLAIM_MISSING,
    RefusalReason.CLAIM_NOT_SHARED: Reason.CLAIM_NOT_SHARED,
    RefusalReason.CLAIM_IMMUTABLE: Reason.CLAIM_IMMUTABLE,
    RefusalReason.CLAIM_CANNOT_SHRINK: Reason.CLAIM_CANNOT_SHRINK,
    RefusalReason.BLOCKS_NOT_WHOLE: Reason.BLOCKS_NOT_WHOLE,
    RefusalReason.NODES_UNKNOWN: Reason.NODES_UNKNOWN,
    RefusalReason.NO_NODE_MATCHES: Reason.NO_NODE_MATCHES,
    RefusalReason.DOES_NOT_FIT: Reason.DOES_NOT_FIT,
}


def report(view: View, previous: Mapping[str, Any], *, now: str) -> dict[str, Any]:
    """Return the whole status; times of conditions whose status did not flip stay as they were."""
    found = [
        (kind, _or_as_before(kind, _first(view, checks), view, previous), ok, _remarked(kind, text, view))
        for kind, checks, ok, text in SUMMARY
    ]
    proven = proofs.judge(view, previous)
    # Whether loading pays is advice: the engines serve, whatever the volume is worth to them.
    tried = storage.judge(view, previous)
    has_engines = view.snapshot is not None and view.snapshot.engines.generation > 0
    judged = [
        # What keeps engines from starting stands before what they have not done yet; those that run are not judged.
        *(() if has_engines else (tried,)),
        *(problem for _, problem, _, _ in found),
        *(each.problem for each in proven if each.kind == proofs.SHARED),
    ]
    blocker = _blocker(view)
    first = blocker or next((problem for problem in judged if problem is not None and _counts(problem)), None)
    is_paused = view.spec is not None and view.spec.paused
    stalled = _stalled(view, blocker=blocker, first=first)
    moving = first if stalled is None and not is_paused else None
    conditions = [
        _condition("Ready", problem=first, ok=Reason.READY, text="all engines serve and share the volume"),
        *(_condition(kind, problem=problem, ok=ok, text=text) for kind, problem, ok, text in found),
        _condition(storage.KIND, problem=tried, ok=Reason.READY, text=""),
        *(_condition(each.kind, problem=each.problem, ok=Reason.READY, text="") for each in proven),
        _flag("Paused", Problem(reason=Reason.PAUSED, message=Reason.PAUSED.doc) if is_paused else None, Reason.ACTIVE),
        _flag(
            "Reconciling",
            None if moving is None else Problem(reason=Reason.PROGRESSING, message=moving.message),
            Reason.IDLE,
        ),
        _flag("Stalled", stalled, Reason.NOT_STALLED),
    ]
    engines = None if view.snapshot is None else view.snapshot.engines
    # What is not known in this pass was true in an earlier one.
    kept = {field: previous[field] for field in _KEPT if field in previous}
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
            else {"sizing": terms.terms(view.sizing, view.capacity, node_bytes=view.node_bytes)}
        ),
        **({} if view.current is None else {"generation": _generation(view.current)}),
        **_usage(view, previous),
    }


_KEPT: Final = ("sizing", "generation", "generations", "tiers")


def _usage(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the volume holds, or held when somebody last counted."""
    look = _look(view)
    if look is None or view.current is None:
        return {}
    found = disk.generations(look, current=view.current.digest)
    tiers = disk.tiers(look)
    if found is not None:
        return {"tiers": tiers, "generations": found}
    known = next((each for each in previous.get("tiers", ()) if each["name"] == "disk"), None)
    return {"tiers": [tiers[0], known or tiers[1]] if look.spec.janitor.enabled else tiers}


def _proof(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    rollout, kept = proofs.rollout(view, previous), storage.document(view, previous)
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
    told = []
    for condition in wanted["conditions"]:
        old = before.get(condition["type"], {})
        is_news = {
            "Ready": (old.get("status"), old.get("reason")) != (condition["status"], condition["reason"]),
            # A tier that was never paused is no news.
            "Paused": old.get("status", "False") != condition["status"],
        }.get(condition["type"], False)
        if is_news:
            level = "Normal" if condition["reason"] in _NORMAL else "Warning"
            told.append(Transition(level=level, reason=condition["reason"], message=condition["message"]))
    return told


def _look(view: View) -> Look | None:
    if view.spec is None or view.snapshot is None or view.sizing is None:
        return None
    return Look(spec=view.spec, snapshot=view.snapshot, sizing=view.sizing)


def _first(view: View, checks: Sequence[Check]) -> Problem | None:
    look = _look(view)
    if look is None:
        return Problem(reason=Reason.NOT_CHECKED, message="not checked: see Ready", is_known=False)
    for check in checks:
        problem = check(look)
        if problem is not None:
            return problem
    return None


def _or_as_before(kind: str, found: Problem | None, view: View, previous: Mapping[str, Any]) -> Problem | None:
    """Return what was told of the volume while somebody is still to answer: a new operator's not knowing is no news."""
    is_told = previous.get("observedGeneration") == view.generation
    if not is_told or view.snapshot is None or (found is not None and found.is_known):
        return found
    janitor, pods = view.snapshot.janitor, view.snapshot.pods
    is_awaited = {
        disk.WITHIN_BUDGET: janitor.is_awaited,
        disk.HEALTHY: janitor.is_awaited or any(pod.is_awaited for pod in pods),
    }
    return (as_before(kind, previous) or found) if is_awaited.get(kind, False) else found


def _remarked(kind: str, text: str, view: View) -> str:
    """Add what a person should know of sizes that fit."""
    notes = () if kind != "SizingFits" or view.capacity is None else view.capacity.notes
    return "; ".join((text, *notes))


def _blocker(view: View) -> Problem | None:
    """Return what kept the spec from being carried out, before any engine is looked at."""
    if isinstance(view.invalid, SpecInvalid):
        return Problem(reason=Reason.SPEC_INVALID, message=str(view.invalid))
    if view.refusal is not None:
        return Problem(reason=_REFUSED[view.refusal.reason], message=view.refusal.message)
    if view.failure is not None:
        return Problem(reason=Reason.APPLY_FAILED, message=str(view.failure))
    return None


def _counts(problem: Problem) -> bool:
    return problem.is_known and not problem.is_met


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


def _condition(kind: str, *, problem: Problem | None, ok: Reason, text: str) -> dict[str, Any]:
    """Return a condition that is good when True."""
    if problem is None:
        return {"type": kind, "status": "True", "reason": ok.value, "message": text}
    status = "True" if problem.is_met else "False" if problem.is_known else "Unknown"
    return {"type": kind, "status": status, "reason": problem.reason.value, "message": problem.message}


def _flag(kind: str, problem: Problem | None, otherwise: Reason) -> dict[str, Any]:
    """Return a condition that is True while something out of the ordinary holds."""
    if problem is None:
        return {"type": kind, "status": "False", "reason": otherwise.value, "message": otherwise.doc}
    return {"type": kind, "status": "True", "reason": problem.reason.value, "message": problem.message}


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


def _generation(current: Generation) -> dict[str, str]:
    return {"current": current.digest, "root": current.root}
