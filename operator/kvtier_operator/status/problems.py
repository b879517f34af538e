# SPDX-License-Identifier: Apache-2.0
"""What checks are given and what they return. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_operator import names
from kvtier_operator.errors import OperatorError
from kvtier_operator.plan import Generation, Refusal
from kvtier_operator.plan.capacity import Capacity
from kvtier_operator.plan.preflight import Preflight
from kvtier_operator.plan.sizing import Sizing
from kvtier_operator.proof.asking import Ask
from kvtier_operator.proof.findings import Findings
from kvtier_operator.snapshot import Snapshot
from kvtier_operator.spec import TierSpec
from kvtier_operator.status.reasons import Reason


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a condition is not met. `is_known` false means that it cannot be told yet."""

    reason: Reason
    message: str
    is_known: bool = True
    is_met: bool = False
    """The condition is met all the same, and this is worth saying about it."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything that status is made from; fields are None where the reconcile did not get that far."""

    generation: int
    tier: names.TierRef
    spec: TierSpec | None
    snapshot: Snapshot | None
    sizing: Sizing | None = None
    capacity: Capacity | None = None
    node_bytes: int | None = None
    """What a node had left when a share of it was decided."""
    current: Generation | None = None
    invalid: OperatorError | None = None
    refusal: Refusal | None = None
    failure: OperatorError | None = None
    ask: Ask | None = None
    """What may be asked of the engines now; None where nobody asks."""
    preflight: Preflight | None = None
    """What trying the volume has shown."""
    findings: Findings | None = None
    """What asking them has shown."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The part of a view that checks judge, where the reconcile got far enough to have it."""

    spec: TierSpec
    snapshot: Snapshot
    sizing: Sizing


Check = Callable[[Look], Problem | None]


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
