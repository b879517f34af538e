# SPDX-License-Identifier: Apache-2.0
"""The charts of the reports, as PNG files. Where matplotlib is missing, a report has tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from e2e.bench.journal import Summary

COLOURS = {
    "gpu": "#188038",
    "none": "#9aa0a6",
    "simple-eager": "#f9ab00",
    "simple-lazy": "#fdd663",
    "cpu": "#12b5cb",
    "fs": "#e8710a",
    "lifeboat": "#9334e6",
    "kvtier": "#1a73e8",
}
_WHOLE = 100
"""Larger numbers are written without decimals."""


def lines(path: Path, title: str, series: Mapping[str, Mapping[int, Summary]], xlabel: str) -> None:
    """Draw throughput over threads or sizes, with the extremes as a band."""
    pyplot = _pyplot()
    if pyplot is None or not series:
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in series.items():
        places = sorted(points)
        (drawn,) = axes.plot(places, [points[place].median for place in places], marker="o", label=name)
        axes.fill_between(
            places,
            [points[place].low for place in places],
            [points[place].high for place in places],
            color=drawn.get_color(),
            alpha=0.15,
            linewidth=0,
        )
    places = sorted({place for points in series.values() for place in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=xlabel, ylabel="GB/s")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


Series = list[tuple[str, str, list[Summary | None]]]
"""Label, colour, and a value for each place."""


def bars(  # noqa: PLR0913 - a chart has this many parts
    path: Path, title: str, unit: str, labels: Sequence[str], series: Series, *, xlabel: str = "", is_log: bool = False
) -> None:
    """Draw bars beside each other, with the extremes as whiskers."""
    pyplot = _pyplot()
    if pyplot is None or not labels:
        return
    figure, axes = pyplot.subplots(figsize=(1.5 + 2.2 * max(2, len(labels)), 4.8), layout="constrained")
    width = 0.84 / len(series)
    for number, (label, colour, values) in enumerate(series):
        found = [(place, value) for place, value in enumerate(values) if value is not None]
        places = [place + (number - (len(series) - 1) / 2) * width for place, _ in found]
        heights = [value.median for _, value in found]
        errors = [[v.median - v.low for _, v in found], [v.high - v.median for _, v in found]]
        drawn = axes.bar(places, heights, width * 0.94, label=label, color=colour, yerr=errors, error_kw={"lw": 0.8})
        texts = [f"{height:.0f}" if height >= _WHOLE else f"{height:.3g}" for height in heights]
        axes.bar_label(drawn, texts, fontsize=7, padding=2)
    axes.set_xticks(range(len(labels)), labels)
    if is_log:
        axes.set_yscale("log")
    axes.margins(y=0.3)
    axes.set(title=title, xlabel=xlabel, ylabel=unit)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, loc="best")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _pyplot() -> Any | None:
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
