# SPDX-License-Identifier: Apache-2.0
"""The condition StorageChecked, and what the status keeps of a preflight. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.plan.preflight import State
from kvtier_operator.status.problems import Problem, View
from kvtier_operator.status.reasons import Reason

KIND: Final = "StorageChecked"


def judge(view: View, previous: Mapping[str, Any]) -> Problem:
    """Return what is said of the volume, be it good or not."""
    found = view.preflight
    if found is None:
        not_checked = _unknown(Reason.NOT_CHECKED, "not checked: see Ready")
        return _passed(previous["storage"]) if _is_passed(previous) else not_checked
    job = f"Job {names.preflight(view.tier)}"
    match found.state:
        case State.OFF:
            return _unknown(Reason.PREFLIGHT_OFF, found.detail)
        case State.WAITING:
            return _unknown(Reason.PREFLIGHT_RUNNING, "there is no claim to try yet")
        case State.RUNNING:
            detail = f": {found.detail}" if found.detail else ""
            return _unknown(Reason.PREFLIGHT_RUNNING, f"{job} tries the volume before engines start{detail}")
        case State.PASSED:
            return _passed(document(view, previous))
        case State.FAILED:
            return Problem(
                reason=Reason.PREFLIGHT_FAILED,
                message=f"the volume cannot be used: {found.detail}; it is tried again every few minutes; to start "
                "engines all the same, set spec.proof.preflight to Never",
            )


def document(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the status keeps; what was measured stays until another claim is tried."""
    before = dict(previous.get("storage") or {})
    tokens = view.findings.break_even_tokens if view.findings is not None else None
    if tokens is not None:
        before["breakEvenTokens"] = tokens
    found = view.preflight
    if found is None or found.state in {State.OFF, State.WAITING, State.RUNNING}:
        return before
    kept = {name: value for name, value in before.items() if name == "breakEvenTokens"}
    if found.state is State.FAILED:
        return {**kept, "key": found.key, "problem": found.detail}
    return before if found.measured is None else {**kept, "key": found.key, **found.measured}


def _is_passed(previous: Mapping[str, Any]) -> bool:
    storage = previous.get("storage") or {}
    return "key" in storage and "problem" not in storage


def _passed(storage: Mapping[str, Any]) -> Problem:
    message = "engines can use the volume"
    rates = [
        f"{verb} {quantity.show_bytes(storage[f'{verb}BytesPerSecond'])}/s"
        for verb in ("read", "write")
        if f"{verb}BytesPerSecond" in storage
    ]
    if rates:
        message += f": when it was new, it was measured to {' and '.join(rates)}"
    return Problem(reason=Reason.PREFLIGHT_PASSED, message=message, is_met=True)


def _unknown(reason: Reason, message: str) -> Problem:
    return Problem(reason=reason, message=message, is_known=False)
