# SPDX-License-Identifier: Apache-2.0
"""Every size of a tier as one flat table of named numbers, the same in status and on the command line. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic.alias_generators import to_camel

from kvtier_operator import quantity
from kvtier_operator.plan.capacity import Capacity
from kvtier_operator.plan.sizing import Sizing


def terms(sizing: Sizing, capacity: Capacity | None, *, node_bytes: int | None) -> dict[str, Any]:
    """Return every term that is known, by its name in ``status.sizing``."""
    found: dict[str, Any] = {
        **asdict(sizing),
        **({} if capacity is None else asdict(capacity)),
        "node_bytes": node_bytes,
        "cpu_size": quantity.format_bytes(sizing.cpu_bytes),
    }
    found["notes"] = list(found.get("notes") or ()) or None
    return {to_camel(term): _bounded(value) for term, value in found.items() if value is not None}


def _bounded(value: Any) -> Any:
    """Return what a field of 64 bits can hold: beyond it, the API server would refuse the whole status."""
    return min(value, quantity.LARGEST) if isinstance(value, int) else value
