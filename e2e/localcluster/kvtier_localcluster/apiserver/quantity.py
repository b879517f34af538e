# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities such as `500m` and `64Gi`. Pure; a float is exact enough to compare with."""

from __future__ import annotations

import re

_SUFFIXES: dict[str, float] = {
    "": 1,
    **{suffix: 10.0**power for suffix, power in (("n", -9), ("u", -6), ("m", -3))},
    **{suffix: 10.0 ** (3 * power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": 2.0 ** (10 * power) for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(n|u|m|k|M|G|T|P|E|[KMGTPE]i))?")


def parse_quantity(text: object) -> float:
    """Return the number that a quantity stands for; raise ValueError for anything else."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"not a quantity: {text!r}")
    return float(found[1] + (found[2] or "")) * _SUFFIXES[found[3] or ""]


def is_quantity(text: object) -> bool:
    """Tell whether a text is a quantity."""
    return _QUANTITY.fullmatch(str(text)) is not None
