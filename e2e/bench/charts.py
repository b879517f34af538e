# SPDX-License-Identifier: Apache-2.0
"""The charts of the reports, as PNG files. Where matplotlib is missing, a report has tables alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from e2e.bench.stats import Summary

if TYPE_CHECKING:
    from e2e.bench.timeline import Timeline

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
NAMES = {
    "none": "no offload (computed)",
    "cpu": "vLLM CPU tier",
    "fs": "vLLM fs",
    "lifeboat": "lifeboatcache",
    "kvtier": "kvtier",
}

_WHOLE = 100
"""Larger numbers are written without decimals."""

Measured = Mapping[tuple[str, int, str], Summary | None]


def first_tokens(path: Path, title: str, measured: Measured, backends: Sequence[str], sizes: Sequence[int]) -> None:
    """Draw the time to the first token: computed, a disk hit of each backend, and a CPU-tier hit."""
    cases = [("cold", "none" if "none" in backends else backends[0], COLOURS["none"], "computed")]
    cases += [("disk_hit", name, COLOURS[name], f"{NAMES[name]}: disk hit") for name in backends if name != "none"]
    if any(name != "none" for name in backends):
        name = "kvtier" if "kvtier" in backends else backends[-1]
        cases.append(("cpu_hit", name, "#a8c7fa", f"{NAMES[name]}: CPU-tier hit"))
    series = [
        (label, colour, [measured.get((case, tokens, name)) for tokens in sizes]) for case, name, colour, label in cases
    ]
    labels = [_size(tokens) for tokens in sizes]
    heading = f"Time to the first token, one request, volume: {title.partition('-')[2]}"
    bars(path, heading, "ms", labels, _scaled(series, 1000), xlabel="prompt tokens", is_log=True)


def waves(path: Path, measured: Mapping[Any, Summary | None], backends: Sequence[str], keys: Sequence[Any]) -> None:
    """Draw how long users who return together wait."""
    series = [(NAMES[name], COLOURS[name], [measured.get((*key, name)) for key in keys]) for name in backends]
    labels = [f"{users} users x {_size(tokens)}" for users, tokens, _ in keys]
    bars(path, "All first tokens after a restart", "s", labels, _scaled(series, 1), xlabel="", is_log=False)


def _size(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


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


def timelines(path: Path, hits: Sequence[Timeline]) -> bool:
    """Draw hits one below the other on one scale of time; False where there is no matplotlib."""
    pyplot = _pyplot()
    if pyplot is None:
        return False
    figure, panels = pyplot.subplots(
        len(hits), 1, figsize=(11, 3.4 * len(hits)), sharex=True, squeeze=False, layout="constrained"
    )
    for axes, hit in zip(panels[:, 0], hits, strict=True):
        rows = ["CPU tier to GPU", *reversed(list(hit.spans))]
        for number, name in enumerate(rows):
            spans = hit.spans.get(name, [(begin, end - begin) for begin, end, _ in hit.copied])
            axes.broken_barh(spans, (number + 0.1, 0.8), color="#e8710a" if number == 0 else "#9aa0a6")
        axes.set_yticks([number + 0.5 for number in range(len(rows))], rows)
        axes.axvline(hit.first_token, color="#d93025")
        axes.annotate(f"first token {hit.first_token:.0f} ms", (hit.first_token, 0.3), ha="right", fontsize=8)
        shares = axes.twinx()
        _draw_share(shares, [(moment, moment, 1.0) for moment in hit.verified], "verified in the CPU tier", "#1a73e8")
        _draw_share(shares, hit.copied, "on the GPU", "#e8710a")
        shares.set(ylabel="share of the chunks", ylim=(0, 1.05))
        shares.legend(fontsize=8, loc="center left")
        axes.set(title=hit.title, xlim=(0, None))
    panels[-1, 0].set_xlabel("ms since the request was handed over")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _draw_share(axes: Any, steps: Sequence[tuple[float, float, float]], label: str, colour: str) -> None:
    """Draw how much is done when, of steps with a begin, an end and a size."""
    whole = sum(size for *_, size in steps)
    places, shares, reached = [0.0], [0.0], 0.0
    for begin, end, size in steps:
        places += [begin, end]
        shares += [reached / whole, (reached + size) / whole]
        reached += size
    axes.plot(places, shares, color=colour, label=label)


Series = list[tuple[str, str, list[Summary | None]]]
"""Label, colour, and a value for each place."""


def _scaled(series: Series, factor: float) -> Series:
    def scale(summary: Summary | None) -> Summary | None:
        if summary is None:
            return None
        return Summary(summary.median * factor, summary.low * factor, summary.high * factor, summary.count)

    return [(label, colour, [scale(value) for value in values]) for label, colour, values in series]


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
