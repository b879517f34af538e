# SPDX-License-Identifier: Apache-2.0
"""The reports of the store and the traffic benchmarks: ``python e2e/bench/report.py DIRECTORY...``.

A report is Markdown with charts beside it, made from a journal alone. Conversations are judged by their later turns.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from e2e.bench import charts, journal
from e2e.bench.journal import Record, Summary, group, ratio, summarise

IN_GPU = "gpu"
"""The column of an engine whose GPU holds everything."""

ORDER = (IN_GPU, "none", "cpu", "simple-eager", "simple-lazy", "fs", "lifeboat", "kvtier")
TITLES = {
    IN_GPU: "everything in GPU",
    "none": "no offload",
    "cpu": "vLLM CPU tier",
    "simple-eager": "SimpleCPU eager",
    "simple-lazy": "SimpleCPU lazy",
    "fs": "vLLM fs",
    "lifeboat": "lifeboatcache 0.1.11",
    "kvtier": "kvtier",
}
CELLS = {
    "A": "A, conversations",
    "B": "B, fewer conversations",
    "C first": "C, short prompts, first pass",
    "C": "C, second pass",
    "D": "D, arrivals",
    "E": "E, shared prefix",
    "E in GPU": "E, the prefix in the GPU",
    "users": "users of 32k",
    "never": "never hits",
    "never eager": "never hits, eager",
}
SINGLES = {
    "single first": "from the volume, after a restart",
    "single again": "from the CPU tier",
    "single in GPU": "from the GPU",
}

PLAIN = "plain parallel reader"
OURS = "kvtier movers"
STOCK = "vLLM fs, one job"

_StoreKey = tuple[str, str, str, float, int]
_Rates = dict[_StoreKey, Summary | None]


@dataclass(frozen=True, slots=True)
class Served:
    """Seconds and hits of some requests of one cell."""

    first_mean: float
    first_p99: float
    token_mean: float
    """Time per output token after the first, the mean of the requests' own; 0 where each had one token only."""
    hit_share: float
    """Share of the prompts' tokens that were not computed."""


def served(requests: Sequence[Record]) -> Served:
    """Sum up requests of one cell."""
    firsts = [request["first"] for request in requests]
    per_token = [
        (request["seconds"] - request["first"]) / (len(request["output"]) - 1)
        for request in requests
        if len(request["output"]) > 1
    ]
    return Served(
        statistics.fmean(firsts),
        percentile(firsts, 0.99),
        statistics.fmean(per_token) if per_token else 0.0,
        sum(request["cached"] for request in requests) / sum(request["tokens"] for request in requests),
    )


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def later_turns(requests: Sequence[Record]) -> list[Record]:
    """Return the requests that could find something: of conversations all but the first turn, otherwise all."""
    return [request for request in requests if request.get("label") != "turn 0"]


def column(record: Record) -> str:
    """Return under which name a record's backend appears."""
    is_all_found = record["stage"] == "all-in-gpu" and not record["cell"].startswith("never")
    return IN_GPU if is_all_found else str(record["backend"])


class Numbers(NamedTuple):
    """The medians and extremes of a cell's repetitions."""

    seconds: Summary
    first: Summary
    first_p99: Summary
    token: Summary
    hits: Summary
    all_first: Summary
    """Until all requests have a first token."""


Measured = Mapping[tuple[str, str, str], Numbers]
"""By cell, length of a single prompt or nothing, and column."""


def measure(records: Iterable[Record]) -> Measured:
    """Sum up every cell of the records."""
    found = group(((record["cell"], label(record), column(record)), record) for record in records)
    return {key: _numbers(repetitions) for key, repetitions in found.items()}


def _numbers(repetitions: Sequence[Record]) -> Numbers:
    parts = [served(later_turns(record["requests"])) for record in repetitions]
    firsts = [max(request["at"] for request in record["requests"]) for record in repetitions]
    return Numbers(
        _summary(record["seconds"] for record in repetitions),
        _summary(part.first_mean for part in parts),
        _summary(part.first_p99 for part in parts),
        _summary(part.token_mean for part in parts),
        _summary(part.hit_share for part in parts),
        _summary(firsts),
    )


def _summary(values: Iterable[float]) -> Summary:
    found = summarise(values)
    assert found is not None, "a cell without a record"
    return found


def label(record: Record) -> str:
    """Return the length of a cell that is one prompt; nothing for others."""
    return str(record["requests"][0]["label"]) if len(record["requests"]) == 1 else ""


def part(measured: Measured, cell: str, name: str, tokens: str = "") -> Numbers | None:
    """Return a backend's numbers of a cell, if it was measured."""
    return measured.get((cell, tokens, name))


def one_line(record: Record) -> str:
    """Describe one cell for the terminal."""
    found = served(later_turns(record["requests"]))
    name = " ".join(part for part in (column(record), record["variant"], record["cell"], label(record)) if part)
    return (
        f"{name:30} {record['seconds']:7.2f} s; first token {found.first_mean * 1000:7.1f} ms, P99 "
        f"{found.first_p99 * 1000:7.1f}; {found.token_mean * 1000:5.2f} ms a token; hits {percent(found.hit_share)}"
    )


def write(directory: Path) -> str:
    """Read ``traffic.jsonl``, write ``traffic.md`` and the charts beside it, and return the text."""
    records = journal.read(directory / "traffic.jsonl")
    cells = [record for record in records if record["kind"] == "cell"]
    sections = []
    for variant, found in group((record["variant"], record) for record in cells).items():
        measured = measure(found)
        columns = [name for name in ORDER if any(key[2] == name for key in measured)]
        title = f" ({variant})" if variant else ""
        sections += [
            _cells(measured, columns, title),
            _singles(measured, columns, title),
            _answers(found, title),
        ]
        if not variant:
            _draw(directory, measured, columns)
    text = "\n".join(["# Traffic benchmark", "", *_runs(records), "", *filter(None, sections), *_troubles(records)])
    (directory / "traffic.md").write_text(text, encoding="utf-8")
    return text


def _runs(records: Sequence[Record]) -> list[str]:
    lines = []
    for run in (record for record in records if record["kind"] == "run"):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        machine = run["machine"]
        host = f"{machine['cpus']} x {machine['cpu']}, {machine['memory_gib']} GiB, GPU: {machine['gpu']}"
        lines += [f"- {run['date']}: `{run['command']}`", f"  {versions}; {host}".replace("\n", "; ")]
    return lines


def _cells(measured: Measured, columns: Sequence[str], title: str) -> str:
    rows = [
        _cell(f"{title_of_cell}: {TITLES[name]}", found)
        for cell, title_of_cell in CELLS.items()
        for name in columns
        if (found := part(measured, cell, name)) is not None
    ]
    if not rows:
        return ""
    headers = [
        "workload: backend",
        "s until done",
        "TTFT ms",
        "TTFT P99",
        "TPOT ms",
        "s until all first",
        "hits",
        "runs",
    ]
    note = (
        "Times and hits of conversations are those of their later turns; median (extremes) where it ran more than once."
    )
    return "\n".join([f"## Traffic{title}", "", note, "", table(headers, rows)])


def _cell(name: str, found: Numbers) -> list[str]:
    return [
        name,
        plain(found.seconds),
        milliseconds(found.first),
        milliseconds(found.first_p99),
        milliseconds(found.token) if found.token.median else "-",
        plain(found.all_first),
        percent(found.hits.median),
        str(found.seconds.count),
    ]


def _singles(measured: Measured, columns: Sequence[str], title: str) -> str:
    lengths = sorted({key[1] for key in measured if key[0] in SINGLES}, key=int)
    if not lengths:
        return ""
    shown = [name for name in columns if any(part(measured, cell, name, lengths[0]) for cell in SINGLES)]
    rows = [
        [f"{length}, {name}", *(_first(part(measured, cell, shown_name, length)) for shown_name in shown)]
        for length in lengths
        for cell, name in SINGLES.items()
    ]
    headers = ["tokens", *(TITLES[name] for name in shown)]
    note = "Without offloading the first is computed and the other two are hits in the GPU."
    return "\n".join([f"## One prompt: ms to the first token{title}", "", note, "", table(headers, rows)])


def _first(found: Numbers | None) -> str:
    return milliseconds(found.first) if found else "-"


def _answers(records: Sequence[Record], title: str) -> str:
    """Compare single prompts' answers: those that found the same part of their prompt must be equal.

    In one engine: another one computed the prompt in other batches, with kernels of other shapes.
    """
    by_prompt = group(
        ((column(record), request["tokens"], str(request["parts"])), (record, request))
        for record in records
        if record["cell"] in SINGLES
        for request in record["requests"]
    )
    counts: dict[tuple[str, str], list[bool]] = {}
    for found in by_prompt.values():
        origin = next((request for record, request in found if record["cell"] == "single in GPU"), None)
        for record, request in found:
            if origin is not None and request["cached"] == origin["cached"]:
                counts.setdefault((column(record), record["cell"]), []).append(request["output"] == origin["output"])
    rows = [[f"{TITLES[name]}, {SINGLES[cell]}", f"{sum(same)} / {len(same)}"] for (name, cell), same in counts.items()]
    if not rows:
        return ""
    heading = f"## Answers equal to those of the same engine's hit in the GPU{title}"
    return "\n".join([heading, "", table(["backend", "equal"], rows)])


def _troubles(records: Sequence[Record]) -> list[str]:
    lines = []
    for record in records:
        name = f"{record.get('backend', '')} {record.get('stage', '')} {record.get('variant', '')}".rstrip()
        if record["kind"] == "failed":
            lines.append(f"- {name}: failed: {record['error'].splitlines()[0]}")
        elif record["kind"] == "skipped":
            lines.append(f"- {name}: not measured, the time was up")
        elif record["kind"] == "missing":
            lines.append(f"- {name}: {record['found']} of {record['expected']} blocks were on the volume")
    return ["## What went wrong", "", *lines, ""] if lines else []


def _draw(directory: Path, measured: Measured, columns: Sequence[str]) -> None:
    def series(cells: Sequence[str], field: str, factor: float) -> charts.Series:
        return [
            (
                TITLES[name],
                charts.COLOURS[name],
                [_scaled(part(measured, cell, name), field, factor) for cell in cells],
            )
            for name in columns
            if any(part(measured, cell, name) for cell in cells)
        ]

    for file, cells, field, factor, unit, title in (
        ("seconds", ("A", "B", "C"), "seconds", 1.0, "s", "Until all is done"),
        ("first", ("D", "E"), "first", 1000.0, "ms", "Mean time to the first token after a restart"),
        ("token", ("A", "B"), "token", 1000.0, "ms", "Time per output token of later turns"),
    ):
        present = [cell for cell in cells if any(key[0] == cell for key in measured)]
        if present:
            charts.bars(directory / f"{file}.png", title, unit, present, series(present, field, factor))


def _scaled(found: Numbers | None, field: str, factor: float) -> Summary | None:
    if found is None:
        return None
    value: Summary = getattr(found, field)
    return Summary(value.median * factor, value.low * factor, value.high * factor, value.count)


def store_report(directory: Path) -> str:
    """Read ``store.jsonl``, write ``store.md`` and the charts beside it, and return the text."""
    records = journal.read(directory / "store.jsonl")
    found = [record for record in records if record["kind"] == "store"]
    keyed = ((_store_key(record), record["gb_per_second"]) for record in found)
    measured = {key: summarise(values) for key, values in group(keyed).items()}
    parts = ["# Store benchmark", ""]
    for run in (record for record in records if record["kind"] == "run"):
        machine = run["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        parts += [
            f"- {run['date']}: `{run['command']}`",
            f"  {versions}; {machine['cpus']} x {machine['cpu']}, {machine['memory_gib']} GiB",
            "",
            _explanation(run),
            "",
        ]
    places = {(record["volume"], record["way"]): None for record in found}
    parts += [_section(directory, measured, *place) for place in sorted(places, key=_tmpfs_first)]
    text = "\n".join(parts)
    (directory / "store.md").write_text(text, encoding="utf-8")
    return text


def _explanation(run: Record) -> str:
    settings = run["settings"]
    return (
        f"GB/s of payload, median (extremes) of {settings['repetitions']} interleaved repetitions; one load or store "
        f"is {settings['job_mib']} MiB. `{STOCK}` is how vLLM calls its code: one thread, whatever the pool."
    )


def _tmpfs_first(place: tuple[str, str]) -> tuple[bool, str]:
    return place[0] != "tmpfs", place[1]


def _store_key(record: Record) -> _StoreKey:
    return (record["volume"], record["way"], record["contestant"], record["chunk_mib"], record["threads"])


def _section(directory: Path, measured: _Rates, volume: str, way: str) -> str:
    keys = [key for key in measured if key[:2] == (volume, way)]
    names = list(dict.fromkeys(key[2] for key in keys))
    chunks = sorted({key[3] for key in keys})
    threads = sorted({key[4] for key in keys if key[4]})
    rows = []
    for chunk in chunks:
        for count in threads:
            cells = {name: _find(measured, volume, way, name, chunk, count) for name in names}
            rows.append(
                [
                    f"{chunk:g} MiB, {count} threads",
                    *(plain(cells[name]) for name in names),
                    percent(ratio(cells.get(OURS), cells.get(PLAIN))),
                    times(ratio(cells.get(OURS), cells.get(STOCK))),
                ]
            )
    file = f"store-{volume}-{way}.png"
    _store_chart(directory / file, measured, f"{way} {volume}", names, chunks, threads)
    headers = ["block, threads", *(_heading(name, way) for name in names), "kvtier / plain", "kvtier / one job"]
    return "\n".join([f"## {way.capitalize()}, {volume}", "", table(headers, rows), f"![{way} {volume}]({file})", ""])


def _find(measured: _Rates, volume: str, way: str, name: str, chunk: float, count: int) -> Summary | None:  # noqa: PLR0913, PLR0917 - a measurement has this many names
    return measured.get((volume, way, name, chunk, count)) or measured.get((volume, way, name, chunk, 0))


def _heading(name: str, way: str) -> str:
    return "plain parallel writer" if name == PLAIN and way == "store" else name


def _store_chart(  # noqa: PLR0913, PLR0917 - a chart has this many parts
    path: Path, measured: _Rates, title: str, names: Sequence[str], chunks: Sequence[float], threads: Sequence[int]
) -> None:
    way, volume = title.split()
    chunk = 8.0 if 8.0 in chunks else chunks[-1]  # noqa: PLR2004 - what the engine uses for Llama-3.1-8B
    series = {}
    for name in names:
        points = {count: _find(measured, volume, way, name, chunk, count) for count in threads}
        series[_heading(name, way)] = {count: point for count, point in points.items() if point is not None}
    charts.lines(path, f"{way.capitalize()}, {volume}, blocks of {chunk:g} MiB", series, "threads")


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


def main() -> None:
    """Write the reports of the directories that the command line names."""
    for directory in map(Path, sys.argv[1:]):
        for name, make in (("store", store_report), ("traffic", write)):
            if any(directory.glob(f"{name}.jsonl*")):
                print(make(directory))


if __name__ == "__main__":
    main()
