# SPDX-License-Identifier: Apache-2.0
"""Conditions in a status; their times change only with their status. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier_localcluster.kinds import Json


class Condition(NamedTuple):
    """One claim about an object."""

    type: str
    holds: bool
    reason: str = ""
    message: str = ""

    def written(self, now: str) -> Json:
        """Return it as the API has it."""
        written: Json = {"type": self.type, "status": "True" if self.holds else "False", "lastTransitionTime": now}
        if self.reason:
            written["reason"] = self.reason
        if self.message:
            written["message"] = self.message
        return written


def find(conditions: Iterable[Json], kind: str) -> Json | None:
    """Return the condition of that type, or None."""
    return next((condition for condition in conditions if condition["type"] == kind), None)


def updated(existing: Sequence[Json], wanted: Iterable[Condition], now: str) -> list[Json]:
    """Return the wanted conditions, with the old transition time where the status is the same."""
    result = []
    for condition in wanted:
        written = condition.written(now)
        before = find(existing, condition.type)
        if before is not None and before["status"] == written["status"] and before.get("lastTransitionTime"):
            written["lastTransitionTime"] = before["lastTransitionTime"]
        result.append(written)
    return result
