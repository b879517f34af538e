# SPDX-License-Identifier: Apache-2.0
"""What a tier saved in money: accelerator time that loading spared, at what it costs, less what the volume costs. Pure.

An engine measures how fast it computes while it serves: tokens that came from the volume, divided by that, are time
that its accelerators did not spend on them. What loading takes is no accelerator time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

_HOUR_SECONDS: Final = 3600.0
_MONTH_HOURS: Final = 730.0
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Prices:
    """In any currency."""

    accelerator_hour: float
    """Of one accelerator."""
    gib_month: float = 0.0
    """Of a GiB on the volume."""


def saved(document: Mapping[str, Any], prices: Prices, *, now: datetime) -> dict[str, float] | None:
    """Return what a tier saved since its engines started; None where they did not measure anything yet.

    Args:
        document: how the tier stands.
        prices: what accelerators and the volume cost.
        now: when it was looked at.
    """
    hits = document.get("hits")
    if not hits or not hits["computeTokensPerSecond"]:
        return None
    hours = hits["prefillSecondsNotSpent"] * document["accelerators"] / _HOUR_SECONDS
    began = [
        datetime.fromisoformat(each["started"]) for each in document["engines"] if each["ready"] and each["started"]
    ]
    age_hours = max(((now - each).total_seconds() / _HOUR_SECONDS for each in began), default=0.0)
    used = sum(each.get("usedBytes") or 0 for each in document["tiers"] or () if each["name"] == "disk")
    accelerators, storage = hours * prices.accelerator_hour, used / _GIB * prices.gib_month * age_hours / _MONTH_HOURS
    return {
        "acceleratorHoursNotSpent": round(hours, 4),
        "acceleratorsCost": round(accelerators, 4),
        "storageCost": round(storage, 4),
        "saved": round(accelerators - storage, 4),
        **{f"price_{name}": value for name, value in asdict(prices).items()},
    }
