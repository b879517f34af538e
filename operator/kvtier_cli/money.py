# SPDX-License-Identifier: Apache-2.0
"""What a tier saved in money: accelerator time that loading spared, at what it costs, less what the volume costs. Pure.

An engine measures how fast it computes while it serves, and counts for each hit what computing it would have taken:
time that its accelerators did not spend. What loading takes is no accelerator time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    currency: str = ""


def prices_of(spec: Mapping[str, Any], *, gpu_hour: float | None, gib_month: float | None) -> Prices | None:
    """Return the prices of a tier, or those that were given instead; None where nobody said any."""
    cost = spec.get("cost") or {}
    hour = float(cost["gpuHour"]) if gpu_hour is None and "gpuHour" in cost else gpu_hour
    if hour is None:
        return None
    month = float(cost.get("storageGibMonth", 0)) if gib_month is None else gib_month
    return Prices(accelerator_hour=hour, gib_month=month, currency=cost.get("currency", "USD") if cost else "")


def saved(document: Mapping[str, Any], prices: Prices, *, now: datetime) -> dict[str, Any] | None:
    """Return what a tier saved since its engines started; None where they did not measure anything yet.

    Args:
        document: how the tier stands.
        prices: what accelerators and the volume cost.
        now: when it was looked at.
    """
    hits = document.get("hits")
    if not hits or not hits["computeTokensPerSecond"]:
        return None
    each_second = document["accelerators"] * prices.accelerator_hour / _HOUR_SECONDS
    hours = hits["prefillSecondsNotSpent"] * document["accelerators"] / _HOUR_SECONDS
    began = [
        datetime.fromisoformat(each["started"]) for each in document["engines"] if each["ready"] and each["started"]
    ]
    age_hours = max(((now - each).total_seconds() / _HOUR_SECONDS for each in began), default=0.0)
    used = sum(each.get("usedBytes") or 0 for each in document["tiers"] or () if each["name"] == "disk")
    accelerators, storage = hours * prices.accelerator_hour, used / _GIB * prices.gib_month * age_hours / _MONTH_HOURS
    tenants = hits["savedSecondsByTenant"]
    return {
        "currency": prices.currency,
        "acceleratorHoursNotSpent": round(hours, 4),
        "acceleratorsCost": round(accelerators, 4),
        "storageCost": round(storage, 4),
        "saved": round(accelerators - storage, 4),
        "byTenant": {tenant: round(seconds * each_second, 4) for tenant, seconds in tenants.items()},
        "prices": {"acceleratorHour": prices.accelerator_hour, "gibMonth": prices.gib_month},
    }
