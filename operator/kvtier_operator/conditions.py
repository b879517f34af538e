# SPDX-License-Identifier: Apache-2.0
"""The stages of a reconcile, and the conditions that are judged by them. Pure.

A reconcile reads (`ReadStage`), plans (`PlannedStage`) and applies (`AppliedStage`). Each stage adds to the one before.
A condition names the stage that it needs; where a reconcile did not get so far, nothing is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Generic, TypeVar

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.api.status_schema import Capacity, PodSizing
from kvtier_operator.errors import ClusterError, SpecInvalid
from kvtier_operator.observe.findings import Findings
from kvtier_operator.observe.targets import ObservationPlan
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Snapshot

Status = Mapping[str, Any]
"""The status of a tier, as it was last written."""


@dataclass(frozen=True)
class Problem:
    """Why a condition is not met. `is_known` false means that it cannot be told yet."""

    reason: Reason
    message: str
    _: KW_ONLY
    is_known: bool = True
    is_met: bool = False
    """The condition is met, and the message says more about it."""


def met(reason: Reason, message: str) -> Problem:
    """Return the judgement of a condition that is met."""
    return Problem(reason=reason, message=message, is_met=True)


def unknown(reason: Reason, message: str) -> Problem:
    """Return the judgement of a condition that cannot be judged yet."""
    return Problem(reason=reason, message=message, is_known=False)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The engines that are asked, and the findings so far."""

    plan: ObservationPlan
    findings: Findings


@dataclass(frozen=True, kw_only=True)
class ReadStage:
    """The spec is valid and the cluster was read."""

    generation: int
    """Generation of the stored spec."""
    spec: TierSpec
    """The spec that is carried out: the stored one, or the part of it that replaces no pod."""
    snapshot: Snapshot

    @property
    def tier(self) -> names.TierRef:
        """Return the tier."""
        return self.snapshot.tier


@dataclass(frozen=True, kw_only=True)
class PlannedStage(ReadStage):
    """The plan of the tier is made."""

    plan: TierPlan
    capacity: Capacity
    observation: Observation | None = None
    """None where the engines are not asked."""

    @property
    def sizing(self) -> PodSizing:
        """Return the sizes of one engine pod."""
        return self.plan.sizing


@dataclass(frozen=True, kw_only=True)
class AppliedStage(PlannedStage):
    """Each part was applied, unless a refusal, a failure or a pause held it up."""

    problems: Mapping[str, Problem] = field(default_factory=dict)
    """Problems that only the part's own condition reports, by the name of the part."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far one reconcile got, and what stopped it."""

    tier: names.TierRef
    generation: int
    spec: TierSpec | None = None
    """None where it is invalid and no engine runs."""
    stage: ReadStage | None = None
    """The last stage that was reached; None where reading failed."""
    invalid: SpecInvalid | None = None
    refusal: Refusal | None = None
    failure: ClusterError | None = None


S = TypeVar("S", bound=ReadStage)
Check = Callable[[PlannedStage], Problem | None]


@dataclass(frozen=True, kw_only=True)
class ConditionRule(Generic[S]):
    """How one condition of a tier is judged."""

    kind: str
    """Type of the condition."""
    needs: type[S]
    """Stage that is judged."""
    judge: Callable[[S, Status], Problem]
    keeps: bool = True
    """Whether the last judgement stays while the stage is not reached; otherwise the condition is NotChecked."""
    counts: bool = True
    """Whether Ready takes it into account."""

    def of(self, stage: ReadStage | None, previous: Status) -> Problem:
        """Return the judgement of this reconcile."""
        if isinstance(stage, self.needs):
            return self.judge(stage, previous)
        return (as_before(self.kind, previous) if self.keeps else None) or not_checked()


def checked(kind: str, checks: Sequence[Check], *, ok: Reason, text: str) -> ConditionRule[PlannedStage]:
    """Return a condition that is met where no check finds a problem; the first problem is reported."""

    def judge(stage: PlannedStage, _previous: Status) -> Problem:
        return next(filter(None, (check(stage) for check in checks)), None) or met(ok, text)

    return ConditionRule(kind=kind, needs=PlannedStage, judge=judge, keeps=False)


def not_checked() -> Problem:
    """Return the judgement of a condition that stands behind another problem."""
    return unknown(Reason.NOT_CHECKED, "not checked: see Ready")


def as_before(kind: str, previous: Status) -> Problem | None:
    """Return the last judgement of a condition; None where there is none, or another version wrote it."""
    last = next((each for each in previous.get("conditions", ()) if each["type"] == kind), None)
    reason = None if last is None else _REASONS.get(last["reason"])
    if last is None or reason is None:
        return None
    return Problem(
        reason=reason, message=last["message"], is_known=last["status"] != "Unknown", is_met=last["status"] == "True"
    )


_REASONS: Final = {each.value: each for each in Reason}


def quoted(message: str) -> str:
    """Return a quotation as the end of a sentence; empty where there is none."""
    return f": {message}" if message else ""


_MOST_LISTED = 5


def listed(items: Sequence[str]) -> str:
    """Return the first few items and the number of the others: a tier has up to a thousand pods."""
    more = f" and {len(items) - _MOST_LISTED} more" if len(items) > _MOST_LISTED else ""
    return ", ".join(items[:_MOST_LISTED]) + more
