# SPDX-License-Identifier: Apache-2.0
"""Draws what was measured: the time to the first token, and where prompt tokens came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_COLOURS: Final = {"GPU": "#2a9d8f", "CPU": "#e9c46a", "disk": "#f4a261", "peers": "#8ab17d"}
_COMPUTED: Final = "#d3d3d3"


class NoMatplotlib(Exception):
    """The library that draws is not installed."""


def draw(found: Mapping[str, Any], file: Path) -> None:
    """Write the picture; raise NoMatplotlib where nobody can draw it."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  an extra, and slow to import
    except ImportError as error:
        raise NoMatplotlib from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  after its backend was chosen

    passes = [each for each in found["passes"] if each["ttft"]]
    names = [f"{each['target']}\n{each['pass']}" for each in passes]
    places = range(len(passes))
    figure, (times, hits) = plt.subplots(2, 1, figsize=(max(6.0, 1.4 * len(passes)), 7), sharex=True)
    median = [each["ttft"]["p50"] * 1000 for each in passes]
    above = [each["ttft"]["p99"] * 1000 - middle for each, middle in zip(passes, median, strict=True)]
    bars = times.bar(places, median, color="#457b9d", yerr=[[0.0] * len(passes), above], capsize=4)
    times.bar_label(bars, [f"{value:.0f}" for value in median], label_type="center", color="white")
    times.set_ylabel("time to first token, ms\n(P50, line to P99)")
    bottom = [0.0] * len(passes)
    sources = dict.fromkeys(source for each in passes for source in each["hits"] or {})
    for source in sources:
        shares = [100 * (each["hits"] or {}).get(source, 0.0) for each in passes]
        hits.bar(places, shares, bottom=bottom, label=source, color=_COLOURS.get(source))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    hits.bar(places, [100 - low for low in bottom], bottom=bottom, label="computed", color=_COMPUTED)
    hits.set_ylabel("prompt tokens from, %")
    hits.set_xticks(list(places), names)
    hits.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=len(sources) + 1, frameon=False)
    figure.suptitle(f"kvtier bench: {found['workload']}")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
