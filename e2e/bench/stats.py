# SPDX-License-Identifier: Apache-2.0
"""Numbers of repeated measurements, and how they are written: median, spread, ratio, Markdown tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Summary:
    """What repetitions of one measurement say."""

    median: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        """Distance between the extremes, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def summarise(values: Iterable[float]) -> Summary | None:
    """Return median and extremes; None if nothing was measured."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


def ratio(numerator: Summary | None, denominator: Summary | None) -> float | None:
    """Return the ratio of two medians; None where one is missing or nothing can be divided by it."""
    if numerator is None or denominator is None or denominator.median == 0:
        return None
    return numerator.median / denominator.median


def group(items: Iterable[tuple[_Key, _Item]]) -> dict[_Key, list[_Item]]:
    """Collect the items of each key, keys in the order of their first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


def milliseconds(summary: Summary | None) -> str:
    """Write seconds as `median (low-high)` in milliseconds, with as many digits as mean something."""
    if summary is None:
        return "-"
    texts = [_three_digits(value * 1000) for value in (summary.median, summary.low, summary.high)]
    return texts[0] if summary.count == 1 else f"{texts[0]} ({texts[1]}-{texts[2]})"


def plain(summary: Summary | None) -> str:
    """Write `median (low-high)`."""
    if summary is None:
        return "-"
    texts = [_three_digits(value) for value in (summary.median, summary.low, summary.high)]
    return texts[0] if summary.count == 1 else f"{texts[0]} ({texts[1]}-{texts[2]})"


def times(value: float | None) -> str:
    """Write a ratio."""
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """Write a share."""
    return "-" if value is None else f"{value * 100:.1f} %"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table whose columns are also aligned for reading as text; the first column is words."""
    cells = [list(headers), *(list(row) for row in rows)]
    if any(len(row) != len(headers) for row in cells):
        raise ValueError(f"a row does not have {len(headers)} cells")
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(headers))]
    lines = ["| " + " | ".join(_pad(row, widths)) + " |" for row in cells]
    rule = (
        "|" + "|".join("-" * (width + 2) if not i else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def _pad(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _three_digits(value: float) -> str:
    if value >= 100:  # noqa: PLR2004 - three digits are left of the point
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"  # noqa: PLR2004 - as above
