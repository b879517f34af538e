# SPDX-License-Identifier: Apache-2.0
"""Kubernetes quantities: "64Gi", "500m", "1e3" to exact numbers and back. Pure.

Follows ``k8s.io/apimachinery/pkg/api/resource``: binary and decimal suffixes, exponents, at most nano precision
(rounded away from zero), magnitudes capped at 2**63 - 1. Raises ValueError for everything else.
"""

from __future__ import annotations

import functools
import math
import re
from fractions import Fraction

LARGEST = 2**63 - 1
"""The largest magnitude that the API server keeps; what is larger counts as this."""

_NANO = 10**9
# Beyond this power of ten every value is either capped or rounded, so larger ones need not be computed.
_EXPONENT_LIMIT = 400
_PATTERN = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)"
    r"(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]+))?",
    re.ASCII,
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_THREE_DIGITS = 100
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


@functools.lru_cache(maxsize=4096)
def parse_quantity(text: str) -> Fraction:
    """Return the exact value of a quantity.

    Raises:
        ValueError: the text is not a Kubernetes quantity.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    magnitude = min(Fraction(match["number"]) * _multiplier(match["suffix"], match["exponent"]), Fraction(LARGEST))
    rounded = Fraction(math.ceil(magnitude * _NANO), _NANO)
    return -rounded if match["sign"] == "-" else rounded


def is_quantity(text: str) -> bool:
    """Tell whether the API server would read the text as a quantity."""
    return _PATTERN.fullmatch(text) is not None


def parse_bytes(text: str) -> int:
    """Return a quantity of bytes, rounded up to a whole byte as the API server does."""
    return math.ceil(parse_quantity(text))


def parse_millis(text: str) -> int:
    """Return a quantity in thousandths, rounded up: "1500m" and "1.5" CPUs are 1500."""
    return math.ceil(parse_quantity(text) * 1000)


_DURATION = re.compile(r"(?P<d>[0-9]+)d|(?:(?P<h>[0-9]+)h)?(?:(?P<m>[0-9]+)m)?(?:(?P<s>[0-9]+)s)?", re.ASCII)


def parse_seconds(text: str) -> int:
    """Return a duration in seconds: "1h30m" is 5400, "7d" is 604800.

    Raises:
        ValueError: the text is neither days nor hours, minutes and seconds, in this order.
    """
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"{text!r} is not a duration")
    if match["d"]:
        return int(match["d"]) * 86_400
    return int(match["h"] or 0) * 3600 + int(match["m"] or 0) * 60 + int(match["s"] or 0)


def format_bytes(count: int) -> str:
    """Write a number of bytes in the largest binary unit that keeps it exact: 68719476736 is "64Gi"."""
    for suffix, power in reversed(_BINARY.items()):
        if count and count % (1 << power) == 0:
            return f"{count >> power}{suffix}"
    return str(count)


def show_bytes(count: int) -> str:
    """Write a number of bytes for people, with three digits at most: 1319413953331 is "1.2 TiB"."""
    for suffix, power in reversed(_BINARY.items()):
        if count >= 1 << power:
            value = count / (1 << power)
            return f"{value:.0f} {suffix}B" if value >= _THREE_DIGITS else f"{value:.3g} {suffix}B"
    return f"{count} B"


def _multiplier(suffix: str | None, exponent: str | None) -> Fraction:
    """Return what the suffix or the exponent multiplies the number with."""
    if suffix in _BINARY:
        return Fraction(1 << _BINARY[suffix])
    if suffix is not None:
        return Fraction(10) ** _DECIMAL[suffix]
    # int() would take quadratic time on a long run of digits, and refuses the longest ones.
    return Fraction(10) ** (0 if exponent is None else max(-_EXPONENT_LIMIT, min(_EXPONENT_LIMIT, int(exponent[:6]))))
