# SPDX-License-Identifier: Apache-2.0
"""What checks are given and what they return. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import OperatorError
from kvtier_operator.observe.findings import Findings
from kvtier_operator.observe.targets import ObservationPlan
from kvtier_operator.plan import CacheGeneration, Refusal
from kvtier_operator.plan.capacity import Capacity
from kvtier_operator.plan.chunks import Chunking
from kvtier_operator.plan.sizing import PodSizing
from kvtier_operator.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a condition is not met. `is_known` false means that it cannot be told yet."""

    reason: Reason
    message: str
    is_known: bool = True
    is_met: bool = False
    """The condition is met all the same, and this is worth saying about it."""


def met(reason: Reason, message: str) -> Problem:
    """Return what is said of a condition that is met."""
    return Problem(reason=reason, message=message, is_met=True)


def unknown(reason: Reason, message: str) -> Problem:
    """Return what is said of a condition that nobody can judge yet."""
    return Problem(reason=reason, message=message, is_known=False)


class PreflightState(enum.Enum):
    """How far a preflight is."""

    OFF = enum.auto()
    WAITING = enum.auto()
    """There is no claim to try yet."""
    RUNNING = enum.auto()
    PASSED = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is known of a claim."""

    state: PreflightState
    key: str = ""
    detail: str = ""
    """What it waits for, or why the volume cannot be used."""
    measured: Mapping[str, Any] | None = None
    """For the status."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything that status is made from; fields are None where the reconcile did not get that far."""

    generation: int
    tier: names.TierRef
    spec: TierSpec | None
    snapshot: Snapshot | None
    sizing: PodSizing | None = None
    capacity: Capacity | None = None
    node_bytes: int | None = None
    """What a node had left when a share of it was decided."""
    assumed: Refusal | None = None
    """Why the CPU tier is assumed for now; None where it is decided."""
    chunking: Chunking = field(default_factory=Chunking)
    """What of a prompt one file holds."""
    current: CacheGeneration | None = None
    invalid: OperatorError | None = None
    refusal: Refusal | None = None
    failure: OperatorError | None = None
    keeps_pods: bool = False
    """Whether the spec asks for the pods that stood before this pass: more or fewer of them at most."""
    outdated: tuple[str, ...] | None = None
    """What this operator would change in the engines at their next restart; None where it is not known."""
    ask: ObservationPlan | None = None
    """What may be asked of the engines now; None where nobody asks."""
    preflight: Preflight | None = None
    """What trying the volume has shown."""
    findings: Findings | None = None
    """What asking them has shown."""
    pool: Problem | None = None
    """What keeps the InferencePool from being as it is asked for."""
    pool_retry_after: float | None = None
    """Seconds after which that may have passed; None where nothing keeps it."""
    has_pool: bool | None = None
    """Whether there is one of ours; None where nobody looked, or where it could not be told."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The part of a view that checks judge, where the reconcile got far enough to have it."""

    spec: TierSpec
    snapshot: Snapshot
    sizing: PodSizing
    assumed: Refusal | None = None
    """Why the CPU tier is assumed for now."""


Check = Callable[[Look], Problem | None]


class ConditionRule(NamedTuple):
    """One condition of a tier: its type, and who judges it by the view and by what was told before."""

    kind: str
    judge: Callable[[View, Mapping[str, Any]], Problem]
    counts: bool = True
    """Whether Ready takes it into account."""


def checked(kind: str, checks: Sequence[Check], *, ok: Reason, text: str) -> ConditionRule:
    """Return a condition that is met where none of the checks finds a problem; they are told in their order."""

    def judge(view: View, _previous: Mapping[str, Any]) -> Problem:
        look = look_of(view)
        if look is None:
            return not_checked()
        return next(filter(None, (check(look) for check in checks)), None) or met(ok, text)

    return ConditionRule(kind, judge)


def look_of(view: View) -> Look | None:
    """Return what checks judge; None where the reconcile did not get so far."""
    if view.spec is None or view.snapshot is None or view.sizing is None:
        return None
    return Look(spec=view.spec, snapshot=view.snapshot, sizing=view.sizing, assumed=view.assumed)


def not_checked() -> Problem:
    """Return what is said of a condition that stands behind another problem."""
    return unknown(Reason.NOT_CHECKED, "not checked: see Ready")


def as_before(kind: str, previous: Mapping[str, Any]) -> Problem | None:
    """Return what was told of a condition; None where that was nothing, or another version's word."""
    told = next((each for each in previous.get("conditions", ()) if each["type"] == kind), None)
    reason = next((each for each in Reason if told is not None and each.value == told["reason"]), None)
    if told is None or reason is None:
        return None
    return Problem(
        reason=reason,
        message=told["message"],
        is_known=told["status"] != "Unknown",
        is_met=told["status"] == "True",
    )


def quoted(message: str) -> str:
    """Return somebody else's words as the end of a sentence of ours; nothing where there are none."""
    return f": {message}" if message else ""


_MOST_LISTED = 5


def listed(items: Sequence[str]) -> str:
    """Return the first few of them, and how many there are beside: a tier has up to a thousand pods."""
    more = f" and {len(items) - _MOST_LISTED} more" if len(items) > _MOST_LISTED else ""
    return ", ".join(items[:_MOST_LISTED]) + more
