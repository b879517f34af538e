# SPDX-License-Identifier: Apache-2.0
"""Draw each dashboard from what its queries answer over a recording: ``python -m kvtier_monitoring.pictures FOLDER``.

Not Grafana itself: the same panels at the same places with the same series, for people who have not installed it yet.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtier_monitoring.__main__ import DASHBOARDS
from kvtier_monitoring.prometheus import Prometheus, Span, replayed
from kvtier_monitoring.queries import VALUES, name_of, panels_of, queries_of

ROOT = Path(__file__).resolve().parents[3]
RECORDING = ROOT / "tests" / "monitoring" / "demo.om.xz"
RULES = ROOT / "charts" / "kvtier" / "rules" / "recording.yaml"
_COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#96d98d")
_LIMITS = {"green": "#73bf69", "yellow": "#f2cc0c", "red": "#f2495c"}
_BACK, _PANEL, _TEXT, _DIM = "#111217", "#181b1f", "#d8d9da", "#8e8e93"
_BINARY, _DECIMAL = ("B", "KiB", "MiB", "GiB", "TiB"), ("", " k", " M", " G")
_UNIT_INCHES, _LEGEND, _ROWS = 0.62, 8, 9
_NAME = 0.14
"""Height of a row of names, as a share of the lines' own."""


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = min(len(units) - 1, int(math.log(abs(value), base))) if abs(value) >= base else 0
    number = value / base**power
    text = f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"  # noqa: PLR2004 - digits
    return f"{text} {units[power]}".strip() if units is _BINARY else f"{text}{units[power]}"


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "bytes": lambda value: _scaled(value, 1024, _BINARY),
    "Bps": lambda value: f"{_scaled(value, 1024, _BINARY)}/s",
    "percentunit": lambda value: f"{value * 100:.3g} %",
    "s": lambda value: f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s",
    "currencyUSD": lambda value: f"${value:.2f}",
    "cps": lambda value: f"{value:.2g} /s",
    "ops": lambda value: f"{value:.2g} /s",
    "reqps": lambda value: f"{value:.2g} /s",
    "short": lambda value: _scaled(value, 1000, _DECIMAL),
}


def _shorter(name: str) -> str:
    """Return a name whose longest word, that of a pod, is told by its end."""
    return " ".join(f"…{word[-9:]}" if len(word) > 24 else word for word in name.split())  # noqa: PLR2004 - as above


def _lines(axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, span: Span) -> None:
    unit = _FORMATS[panel["fieldConfig"]["defaults"]["unit"]]
    drawn = 0
    for query in queries_of(panel, VALUES):
        for series in prometheus.course(query.expression, span):
            moments = [(float(moment) - span.start) / 60 for moment, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            colour = _COLOURS[drawn % len(_COLOURS)]
            label = _shorter(name_of(query.legend, series["metric"])) or "(none)"
            axes.plot(moments, values, color=colour, linewidth=1.4, label=label)
            axes.fill_between(moments, values, color=colour, alpha=0.08)
            drawn += 1
    axes.set_ylabel(panel["fieldConfig"]["defaults"]["custom"].get("axisLabel", ""), color=_DIM, fontsize=7)
    high = max(axes.get_ylim()[1], 0.0)
    for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        if step["value"] is not None and step["value"] <= high:
            axes.axhline(step["value"], color=_LIMITS[step["color"]], linewidth=0.8, linestyle="--")
    if high <= 0.06:  # noqa: PLR2004 - matplotlib's own limits around a line of zeros
        high = 1.0
    rows = -(-drawn // 2) if drawn <= _LEGEND else 0
    # The names stand above the lines, not on them.
    axes.set_ylim(0, high * (1 + _NAME * rows))
    axes.set_yticks(_ticks(high, is_binary=panel["fieldConfig"]["defaults"]["unit"] in {"bytes", "Bps"}))
    axes.yaxis.set_major_formatter(lambda value, _: unit(value))
    if rows:
        axes.legend(loc="upper left", fontsize=6.5, frameon=False, labelcolor=_TEXT, ncols=2, borderaxespad=0.1)


def _ticks(high: float, *, is_binary: bool) -> list[float]:
    """Return round values up to the highest, as people count in that unit."""
    base = 1024.0 ** max(0, int(math.log(high, 1024))) if is_binary and high >= 1 else 1.0
    rough = high / base / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = base * power * next(each for each in (1, 2, 5, 10) if each * power >= rough)
    return [number * step for number in range(int(high / step) + 1)]


def _number(axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, span: Span) -> None:
    unit = _FORMATS[panel["fieldConfig"]["defaults"]["unit"]]
    (query,) = queries_of(panel, VALUES)
    (series,) = prometheus.course(query.expression, span)
    values = [float(value) for _, value in series["values"]]
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    color = _LIMITS[next(s["color"] for s in reversed(steps) if s["value"] is None or values[-1] >= s["value"])]
    axes.fill_between(range(len(values)), values, color=color, alpha=0.25)
    axes.set_ylim(0, (max(values) or 1) * 2)
    axes.text(0.5, 0.6, unit(values[-1]), color=color, fontsize=19, ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()


def _table(axes: Any, panel: Mapping[str, Any], prometheus: Prometheus, span: Span) -> None:
    (query,) = queries_of(panel, VALUES)
    rows = [series["metric"] for series in prometheus.now(query.expression, span.end)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    axes.set_axis_off()
    for across, column in enumerate(columns):
        place = 0.01 + across / len(columns)
        axes.text(place, 0.94, column, color=_DIM, fontsize=8, transform=axes.transAxes)
        for down, row in enumerate(sorted(rows, key=str)[:_ROWS], 1):
            text = row.get(column, "")
            axes.text(place, 0.94 - down * 0.1, text, color=_TEXT, fontsize=8, transform=axes.transAxes)


_DRAW = {"timeseries": _lines, "stat": _number, "table": _table}


def draw(dashboard: Mapping[str, Any], prometheus: Prometheus, span: Span, file: Path) -> None:
    """Draw one dashboard."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MultipleLocator

    panels = panels_of(dashboard)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + 1.5
    figure = pyplot.figure(figsize=(24 * _UNIT_INCHES, height * _UNIT_INCHES * 0.55), facecolor=_BACK)
    figure.text(0.012, 1 - 0.8 / height, dashboard["title"], color=_TEXT, fontsize=15, va="center")
    for panel in panels:
        place = panel["gridPos"]
        left, width = place["x"] / 24, place["w"] / 24
        bottom, tall = 1 - (place["y"] + place["h"] + 1.5) / height, place["h"] / height
        back = figure.add_axes((left + 0.003, bottom + 0.1 / height, width - 0.006, tall - 0.2 / height))
        back.set_facecolor(_PANEL)
        back.set_xticks([])
        back.set_yticks([])
        back.text(
            0.1 / place["w"],
            1 - 0.55 / place["h"],
            panel["title"],
            color=_TEXT,
            fontsize=9,
            transform=back.transAxes,
            va="center",
        )
        is_graph = panel["type"] == "timeseries"
        edge = (0.052, 0.075) if is_graph else (0.008, 0.02)
        inner = (
            left + edge[0],
            bottom + (1.1 if is_graph else 0.2) / height,
            width - edge[1],
            tall - (2.3 if is_graph else 1.2) / height,
        )
        axes = figure.add_axes(inner)
        axes.set_facecolor(_PANEL)
        axes.tick_params(colors=_DIM, labelsize=7, length=0)
        axes.grid(color="#2c3235", linewidth=0.5)
        for side in (*axes.spines.values(), *back.spines.values()):
            side.set_visible(False)
        _DRAW[panel["type"]](axes, panel, prometheus, span)
        if is_graph:
            axes.xaxis.set_major_formatter(lambda value, _: f"{int(value)}:{round(value % 1 * 60):02d}")
            axes.set_xlim(0, (span.end - span.start) / 60)
            axes.xaxis.set_major_locator(MultipleLocator(1))
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def main() -> int:
    """Draw all of them."""
    parser = argparse.ArgumentParser(prog="kvtier_monitoring.pictures", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recording", type=Path, default=RECORDING)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        replayed(chosen.recording, RULES, Path(scratch)) as (prometheus, span),
    ):
        for path in sorted(DASHBOARDS.glob("*.json")):
            draw(json.loads(path.read_text()), prometheus, span, chosen.folder / f"dashboard-{path.stem}.png")
            print(chosen.folder / f"dashboard-{path.stem}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
