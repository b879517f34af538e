# SPDX-License-Identifier: Apache-2.0
"""``status.savings``: what accelerators did not have to do, and what that and the volume cost. Pure.

Engines count the seconds that a prompt of that length takes them, as they measure while they serve, for each hit that
they loaded instead. What loading takes is no time of an accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.problems import View

MONTH_HOURS: Final = 730
"""What clouds take a month for."""
_GIB: Final = 1 << 30


def accelerators(spec: TierSpec, engines_per_pod: int) -> float:
    """Return how many accelerators one engine core computes with; an engine without any counts as one."""
    if spec.engine.accelerator.resource == NO_ACCELERATOR:
        return 1.0
    return spec.engine.accelerator.per_pod / engines_per_pod


def document(view: View, previous: Mapping[str, Any], *, used_bytes: int | None) -> dict[str, Any]:
    """Return what the status keeps; empty where nobody gave a price.

    Args:
        view: what is known now.
        previous: the status before; what it says stays while an operator that has just begun knows nothing.
        used_bytes: what lies on the volume; None where nobody has counted: then nobody knows what that costs.
    """
    spec = view.spec
    if spec is None or spec.cost is None:
        return {}
    before = dict(previous.get("savings") or {})
    saved = None if view.findings is None else view.findings.saved_per_second
    if view.sizing is None:
        return before
    each = accelerators(spec, view.sizing.engines_per_pod)
    prices = {"currency": spec.cost.currency, "enginePerHour": _plain(each * float(spec.cost.gpu_hour))}
    if view.snapshot is not None and not view.snapshot.engines.ready:
        return prices  # nobody serves, so nothing is saved
    if saved is None and "gpus" not in before:
        return prices
    # What was measured stays while nobody has asked; its price is today's.
    gpus = float(before["gpus"]) if saved is None else saved * each
    per_hour = gpus * float(spec.cost.gpu_hour)
    known = {**prices, "gpus": _amount(gpus), "gpusPerHour": _amount(per_hour)}
    price = float(spec.cost.storage_gib_month)
    if used_bytes is None and price:
        return known
    storage = (used_bytes or 0) / _GIB * price / MONTH_HOURS
    return {
        **known,
        "storagePerHour": _amount(storage),
        "netPerHour": _amount(per_hour - storage),
        "netPerMonth": _amount((per_hour - storage) * MONTH_HOURS),
    }


def _amount(number: float) -> str:
    """Write a number with two digits that count: what changes without meaning anything is no news."""
    return _plain(float(f"{number:.2g}"))


def _plain(number: float) -> str:
    """Write a number without an exponent."""
    text = f"{number:.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
