# SPDX-License-Identifier: Apache-2.0
"""The conditions that only running engines can tell: SharedCacheVerified and DiskEffective. Pure.

The last judgement stays until a new one is possible: an operator that has just started has asked no engine yet.
"""

from __future__ import annotations

from typing import Final

from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import (
    ConditionRule,
    PlannedStage,
    Problem,
    ReadStage,
    Status,
    as_before,
    met,
    not_checked,
    unknown,
)
from kvtier_operator.observe.findings import CanaryOutcome, CanaryResult, EffectOutcome, EffectResult
from kvtier_operator.observe.targets import NoCanary, ObservationPlan

_SHARED: Final = "SharedCacheVerified"
_EFFECTIVE: Final = "DiskEffective"


def rollout(stage: ReadStage | None, previous: Status) -> str | None:
    """Return the rollout that SharedCacheVerified speaks of, for the status; None while it speaks of none."""
    known = (previous.get("proof") or {}).get("rollout")
    if not isinstance(stage, PlannedStage) or stage.observation is None:
        return None if known is None else str(known)
    plan, found = stage.observation.plan, stage.observation.findings.canary
    if plan.refusal in _LASTING or (found is not None and not found.outcome.is_proof):
        return None
    if found is not None:
        return plan.rollout
    # While engines are replaced the key wavers; it is judged when they stand.
    return str(known) if known is not None and (plan.refusal or known == plan.rollout) else None


_LASTING: Final = {
    NoCanary.OFF: (
        Reason.CANARY_OFF,
        "not proven: spec.proof.canary.enabled is false; set it to true to have it proven after each rollout",
    ),
    NoCanary.NOT_WRITTEN: (
        Reason.CANARY_NOT_STORED,
        "not proven: spec.disk.mode keeps engines from storing; with ReadWrite it is proven",
    ),
    NoCanary.SINGLE_REPLICA: (
        Reason.SINGLE_REPLICA,
        "not proven: one replica has all its blocks in memory, and no other one reads them; set spec.replicas to 2",
    ),
    NoCanary.NO_ENGINES: (Reason.NO_ENGINES, "no engine runs"),
}


def _shared(stage: PlannedStage, previous: Status) -> Problem:
    if stage.observation is None:
        return as_before(_SHARED, previous) or not_checked()
    plan, canary = stage.observation.plan, stage.observation.findings.canary
    if plan.refusal in _LASTING:
        return unknown(*_LASTING[plan.refusal])
    return _before_the_first(plan, previous) if canary is None else _canary(canary)


def _before_the_first(plan: ObservationPlan, previous: Status) -> Problem:
    pending = unknown(Reason.CANARY_PENDING, "a canary prompt is sent when at least two engines of one rollout serve")
    known = (previous.get("proof") or {}).get("rollout")
    is_of_these = known is not None and (known == plan.rollout or plan.refusal is not None)
    return (as_before(_SHARED, previous) or pending) if is_of_these else pending


def _canary(found: CanaryResult) -> Problem:
    subject = f" with {found.subject}" if found.subject else ""
    read = f"of {found.prompt_tokens} tokens that pod {found.first} had computed{subject}, pod {found.second}"
    also = "".join(
        f"; {words} {' and with '.join(subjects)}"
        for words, subjects in (("the same with", found.covered), ("not proven with", found.open))
        if subjects
    )
    match found.outcome:
        case CanaryOutcome.LOADED:
            return met(Reason.CANARY_LOADED, f"{read} read {found.cached_tokens} from the volume{also}")
        case CanaryOutcome.FOUND:
            return met(
                Reason.CANARY_FOUND,
                f"{read} found blocks on the volume, and computed them again because that was quicker or the prompt is "
                f"shorter than spec.disk.admission.minTokens{also}",
            )
        case CanaryOutcome.MISSED:
            return Problem(
                Reason.CANARY_MISSED,
                f"{read} found nothing on the volume, three times in a row: compare tier.json and the "
                "vllm:kvtier_disk_misses_total of both pods, and see that both mount the same volume",
            )
        case CanaryOutcome.NOT_STORED:
            return Problem(
                Reason.CANARY_NOT_STORED,
                f"pod {found.first} stored nothing of a canary prompt{subject}, three times in a row: its "
                "`vllm:kvtier_disk_shed_stores_total` says why (volume full, failing, or not its own)",
            )
        case CanaryOutcome.BUSY:
            return unknown(
                Reason.CANARY_BUSY,
                "other requests ran at the same time, so what was counted may be theirs: add "
                "--enable-prompt-tokens-details to spec.engine.args, and the answer itself tells",
            )
        case CanaryOutcome.UNANSWERED:
            return unknown(
                Reason.CANARY_UNANSWERED,
                f"{found.problem}: the operator must reach port 8000 of the pods (network policy); if that is not "
                "wanted, set spec.proof.canary.enabled to false",
            )
        case CanaryOutcome.LOCKED:
            return unknown(
                Reason.CANARY_LOCKED,
                f"{found.problem}: engines ask for a key; give it as VLLM_API_KEY in spec.engine.env, and name its "
                "Secret in rbac.readSecrets of the operator's chart, or set spec.proof.canary.enabled to false",
            )


def _effective(stage: PlannedStage, previous: Status) -> Problem:
    if stage.observation is None:
        return as_before(_EFFECTIVE, previous) or not_checked()
    effect = stage.observation.findings.effect
    if effect is None:
        pending = unknown(Reason.EFFECT_PENDING, "engines have not served for an hour yet")
        return as_before(_EFFECTIVE, previous) or pending
    return _effect(effect)


def _effect(found: EffectResult) -> Problem:
    gave = (
        f"the volume gave about {_about(found.loaded_tokens)} tokens in the last hour, and "
        f"{_about(found.computed_hits)} hits were computed because that was quicker; "
        f"it gives an engine {_about(found.load_rate)} tokens a second, which computes {_about(found.compute_rate)}"
    )
    match found.outcome:
        case EffectOutcome.PAYS:
            return met(Reason.LOADING_PAYS, gave)
        case EffectOutcome.LOSES:
            return Problem(
                Reason.LOADING_LOSES,
                f"{gave}: use a faster storage class, a larger spec.cpu.size, or spec.disk.mode Bypass",
            )
        case EffectOutcome.NO_HITS:
            return unknown(Reason.NO_DISK_HITS, "too little was found on the volume in the last hour to judge by")


def _about(number: float) -> str:
    """Write a number with one digit that counts: more would pretend to be exact."""
    return f"{float(f'{number:.1g}'):,.0f}"


SHARED: Final = ConditionRule(kind=_SHARED, needs=PlannedStage, judge=_shared)
# Whether loading pays is advice: the engines serve, whatever the volume is worth to them.
EFFECTIVE: Final = ConditionRule(kind=_EFFECTIVE, needs=PlannedStage, judge=_effective, counts=False)
