# SPDX-License-Identifier: Apache-2.0
"""The status of a tier: conditions, sizes, counts, and the Events that a change of them deserves. Pure.

There is no phase: `Ready` summarises the conditions after it. `Reconciling` and `Stalled` have their meaning of
kstatus. The status changes only when something happened, so writing it does not wake the tier for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import CONDITIONS, Reason
from kvtier_operator.conditions import PlannedStage, Problem, Progress, ReadStage, Status, listed, met, unknown
from kvtier_operator.parts import PARTS, crash_causes, janitor, observations, preflight, routing
from kvtier_operator.parts.claim import SHARING
from kvtier_operator.parts.preflight import CHECKED
from kvtier_operator.plan import report as plan_report
from kvtier_operator.snapshot import Snapshot, last_words

_OF_OUR_ENGINES: Final = frozenset({"SizingFits", "RoutingReady"})
_OF_THE_VOLUME: Final = frozenset({"VolumeBound", "ClaimShared", "StorageChecked"})
_OF_THE_JANITOR: Final = frozenset({"DiskHealthy", "DiskWithinBudget", "JanitorHealthy"})
_SHARED: Final = "SharedCacheVerified"
_OF_KVTIER: Final = frozenset({_SHARED, "DiskEffective"})


def not_applicable(kind: str, spec: TierSpec | None, snapshot: Snapshot | None = None) -> Problem | None:
    """Return the judgement of a condition that does not apply to the connector of a tier; None where it applies."""
    if spec is None:
        return None
    if kind == _SHARED and snapshot is not None and (found := _redis_is_silent(spec, snapshot)) is not None:
        return found
    if kind in _OF_OUR_ENGINES and spec.engine.external is not None:
        return _says("spec.engine.external: another owner makes, sizes and reaches these engines")
    connector = spec.connector
    label = f"spec.connector.type {connector.label}"
    if kind in _OF_THE_VOLUME and not connector.uses_volume:
        unused = "; spec.volume is kept and not mounted" if spec.volume.is_there else ""
        return _says(f"{label} keeps nothing on a shared volume{unused}")
    if kind in _OF_THE_JANITOR and snapshot is not None and (found := _is_orphaned(spec, snapshot)) is not None:
        return found if kind == "JanitorHealthy" else _says("engines may not store: see JanitorHealthy")
    if kind in _OF_THE_JANITOR and not connector.has_janitor:
        return _says(f"{label} has no janitor: {connector.cleaner}")
    if kind in _OF_KVTIER and not connector.is_ours:
        return _says(
            f"{label} does not report its loads, so nothing can be proven or judged here: `kvtier bench` measures them"
        )
    return None


def _redis_is_silent(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return that engines found no Redis when they started; None where they found one, or need none."""
    lmcache = spec.connector.used_lmcache
    if lmcache is None or lmcache.redis is None:
        return None
    checks = {
        pod.name: str(last_words(container.exit_message).get("problem", ""))[:200]
        for pod in snapshot.pods
        for container in pod.containers
        if container.name == names.REDIS_CHECK_CONTAINER and not pod.is_terminating
    }
    silent = {name: problem for name, problem in checks.items() if problem}
    if not silent:
        return None
    name, why = min(silent.items())
    where = "spec.connector.lmcache.redis" if spec.connector.hybrid is None else "spec.connector.hybrid.lmcache.redis"
    return unknown(
        Reason.STORE_UNREACHABLE,
        f"pod {listed(sorted(silent))} found no Redis when it started ({name}: {why}), and serves without the blocks "
        f"of others. Correct {where}, or see that the Redis runs and the pods can reach it. Then set the annotation "
        f"{names.ANNOTATION_RESTART}, unless the log says that LMCache has connected since",
    )


def _is_orphaned(spec: TierSpec, snapshot: Snapshot) -> Problem | None:
    """Return that no janitor permits these engines to store into the blocks of the other tier."""
    owner, janitors = spec.connector.blocks_of, {each.name: each.has_janitor for each in snapshot.neighbours}
    if owner is None or janitors.get(owner):
        return None
    why, remedy = f"there is no tier {owner} on this claim", "create it, correct the name"
    if owner in janitors:
        why = f"the tier {owner} has no janitor"
        remedy = "set its spec.janitor.enabled to true and give it a connector that a janitor clears"
    return Problem(
        Reason.JANITOR_MISSING,
        f"spec.connector.hybrid.nixl.blocksOf: {why}, so these engines get no permit and store nothing: "
        f"{remedy}, or leave the field out",
    )


def _says(message: str) -> Problem:
    return unknown(Reason.NOT_APPLICABLE, message)


_NORMAL: Final = frozenset(
    reason.value
    for reason in (
        *(Reason.READY, Reason.PAUSED, Reason.ACTIVE, Reason.ENGINES_STARTING, Reason.CLAIM_MISSING),
        *(Reason.CLAIM_PENDING, Reason.SERVING, Reason.SCALED_TO_ZERO, Reason.CURRENT, Reason.ENGINES_OUTDATED),
        *(Reason.ENGINES_REPLACED, Reason.JANITOR_RUNS, Reason.JANITOR_STARTING, Reason.JANITOR_DISABLED),
        *(Reason.CLAIM_ALONE, Reason.BUDGETS_FIT, Reason.ROUTER_STARTING, Reason.STORE_READY),
        Reason.STORE_STARTING,
    )
)
"""Reasons that a healthy tier passes through; every other one is a Warning."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change of a tier, as an Event."""

    level: str
    """Normal or Warning."""
    reason: str
    message: str


def report(progress: Progress, previous: Status, *, now: str) -> dict[str, Any]:
    """Return the whole status; times of conditions whose status did not flip stay as they were."""
    stage, spec = progress.stage, progress.spec
    snapshot = None if stage is None else stage.snapshot
    is_growing = routing.is_growing(stage, previous)
    judged = {
        rule.kind: not_applicable(rule.kind, spec, snapshot)
        or _as_growth(rule.of(stage, previous), is_growing=is_growing)
        for part in PARTS
        for rule in part.conditions
    }
    counted = [
        # The preflight keeps first engines from starting, so it is reported before them; running engines ignore it.
        *(() if snapshot is not None and snapshot.engines.generation > 0 else (CHECKED.kind,)),
        *(rule.kind for part in PARTS for rule in part.conditions if rule.counts and rule is not CHECKED),
    ]
    blocker = _blocker(progress)
    first = blocker or next((judged[kind] for kind in counted if _counts(judged[kind])), None)
    is_paused = spec is not None and spec.paused
    stalled = _stalled(progress, blocker=blocker, first=first)
    moving = first if stalled is None and not is_paused else None
    judged |= {
        "Ready": first or met(Reason.READY, _ready_text(spec)),
        "Paused": met(Reason.PAUSED, "spec.paused or the annotation kvtier.dev/paused is true: nothing is changed.")
        if is_paused
        else Problem(Reason.ACTIVE, "The operator acts on changes."),
        "Reconciling": Problem(Reason.IDLE, _rest(stalled, is_paused=is_paused))
        if moving is None
        else met(Reason.PROGRESSING, moving.message),
        "Stalled": Problem(Reason.NOT_STALLED, "No problem is known that stays until a person acts.")
        if stalled is None
        else met(stalled.reason, stalled.message),
    }
    engines = None if snapshot is None else snapshot.engines
    rollout, storage = observations.rollout(stage, previous), preflight.document(stage, previous)
    return {
        **{field: previous[field] for field in _KEPT if field in previous},
        "observedGeneration": progress.generation,
        "selector": names.selector_text(progress.tier),
        "replicas": previous.get("replicas", 0) if engines is None else engines.replicas,
        "readyReplicas": previous.get("readyReplicas", 0) if engines is None else engines.ready,
        "conditions": _conditions(judged, previous, generation=progress.generation, now=now),
        **({} if rollout is None else {"proof": {"rollout": rollout}}),
        **({"storage": storage} if storage else {}),
        **_of_plan(stage),
        **_usage(stage, previous),
        **({"routing": routed} if (routed := routing.document(stage, previous)) else {}),
    }


_KEPT: Final = ("sizing", "generation", "idleDigest")
"""Fields that stay as they are where no plan could be made, and one that is written apart."""


def _ready_text(spec: TierSpec | None) -> str:
    """Return the message of Ready where nothing is wrong."""
    if spec is None or spec.replicas == 0:
        return "spec.replicas is 0: no engine is asked for"
    engines = "the engine serves" if spec.replicas == 1 else "all engines serve"
    if not spec.connector.uses_volume:
        return f"{engines} with spec.connector.type {spec.connector.label}"
    return f"{engines} with the volume" if spec.replicas == 1 else f"{engines} and share the volume"


def _of_plan(stage: ReadStage | None) -> dict[str, Any]:
    if not isinstance(stage, PlannedStage):
        return {}
    plan = stage.plan
    generation = {"current": plan.generation.digest}
    if stage.spec.connector.uses_volume:
        generation["root"] = plan.generation.root
    sizing = plan_report.terms(plan.sizing, stage.capacity, node_bytes=plan.decisions.node_bytes)
    return {"sizing": sizing, "generation": generation}


def _usage(stage: ReadStage | None, previous: Status) -> dict[str, Any]:
    """Return the contents of the volume, as of the last count."""
    if not isinstance(stage, PlannedStage):
        return {field: previous[field] for field in ("tiers", "generations") if field in previous}
    current = stage.plan.generation.digest
    found, tiers = janitor.generations(stage, current=current), janitor.tiers(stage)
    if found is not None:
        return {"tiers": tiers, "generations": found}
    if not stage.spec.janitor.enabled or not stage.spec.connector.has_janitor:
        return {"tiers": tiers}  # nothing counts any more, and the last count is out of date
    known = next((each for each in previous.get("tiers", ()) if each["name"] == "disk"), None)
    counted = janitor.with_roles(previous.get("generations", ()), current=current)
    return {"tiers": [tiers[0], known or tiers[1]], **({"generations": counted} if counted else {})}


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
    """Return the Events: changes of Ready, pausing and resuming, and a few conditions beside Ready."""
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
    found: list[Transition] = []
    for condition in wanted["conditions"]:
        old = before.get(condition["type"], {})
        overlap = Reason.BUDGETS_OVERLAP.value
        is_reported = {
            SHARING.kind: (old.get("reason") == overlap) != (condition["reason"] == overlap),
            "Ready": (old.get("status"), old.get("reason")) != (condition["status"], condition["reason"]),
            # A tier that was never paused deserves no Event.
            "Paused": old.get("status", "False") != condition["status"],
            "Available": old.get("status") == "True" != condition["status"],
            "JanitorHealthy": (old.get("status") == "False") != (condition["status"] == "False"),
            "UpToDate": (old.get("status") == "False") != (condition["status"] == "False"),
        }.get(condition["type"], False)
        if is_reported and condition["reason"] not in {each.reason for each in found}:
            level = "Normal" if condition["reason"] in _NORMAL else "Warning"
            found.append(Transition(level=level, reason=condition["reason"], message=condition["message"]))
    return found


def _blocker(progress: Progress) -> Problem | None:
    """Return what kept the spec from being carried out; it is reported before any problem of the engines."""
    refusal, failure = progress.refusal, progress.failure
    if progress.invalid is not None:
        runs = "" if progress.spec is None else "; engines stay as they are, and fields that replace none are followed"
        return Problem(Reason.SPEC_INVALID, f"{progress.invalid}{runs}")
    if refusal is not None:
        return Problem(refusal.reason, refusal.message + ("" if failure is None else f"; {failure}"))
    if failure is not None:
        return Problem(Reason.APPLY_FAILED, str(failure))
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


def _stalled(progress: Progress, *, blocker: Problem | None, first: Problem | None) -> Problem | None:
    """Return the problem that stays until a person acts; None where the first problem may pass by itself."""
    if progress.failure is not None and blocker is not None:
        return blocker if progress.failure.retry_after > _SOON_SECONDS else None
    if blocker is not None:
        return None if blocker.reason is Reason.CLAIM_MISSING else blocker
    return first if first is not None and first.reason in _LASTING else None


_LASTING: Final = frozenset(
    (
        Reason.ROLLOUT_STALLED,
        Reason.CLAIM_LOST,
        Reason.CANARY_MISSED,
        Reason.CANARY_NOT_STORED,
        Reason.PREFLIGHT_FAILED,
        Reason.CONFIG_MISSING,
        Reason.KEY_MISSING,
        Reason.RUNTIME_CLASS_MISSING,
        *crash_causes.LASTING,
    )
)

_SOON_SECONDS: Final = 30.0
"""A failure that is retried sooner than this passes by itself."""


def _conditions(judged: Mapping[str, Problem], previous: Status, *, generation: int, now: str) -> list[dict[str, Any]]:
    """Return the conditions; the time of one whose status did not flip stays."""
    before = {condition["type"]: condition for condition in previous.get("conditions", ())}
    found = []
    for kind in CONDITIONS:
        problem, old = judged[kind], before.get(kind, {})
        state = "True" if problem.is_met else "False" if problem.is_known else "Unknown"
        found.append(
            {
                "type": kind,
                "status": state,
                "reason": problem.reason.value,
                "message": problem.message[:LONGEST_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": old.get("lastTransitionTime", now) if old.get("status") == state else now,
            }
        )
    return found


LONGEST_MESSAGE: Final = 4096
"""Characters of a condition's message. The API server takes no status with a message of more than 32768."""
