# SPDX-License-Identifier: Apache-2.0
"""What the traffic benchmark's records say: the arithmetic, the tables, what was aimed at, and the charts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from e2e.bench import charts, journal, timeline
from e2e.bench.journal import Record
from e2e.bench.stats import Summary, group, milliseconds, percent, plain, summarise, table, times
from e2e.bench.traffic_numbers import AIMS, IN_GPU, Measured, Numbers, column, label, later_turns, measure, part, served

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
_MOST_CALLS = 24


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
    plain_cells = [record for record in cells if "profile" not in record]
    sections = []
    for variant, found in group((record["variant"], record) for record in plain_cells).items():
        measured = measure(found)
        columns = [name for name in ORDER if any(key[2] == name for key in measured)]
        title = f" ({variant})" if variant else ""
        sections += [
            _cells(measured, columns, title),
            _singles(measured, columns, title),
            _aims(measured, title),
            _answers(found, title),
        ]
        if not variant:
            _draw(directory, measured, columns)
    sections += [_profile(record) for record in cells if "profile" in record and not record["profile"]["trace"]]
    if timeline.draw(directory / "timeline.png", [record for record in cells if "profile" in record]):
        sections.append("![timeline](timeline.png)\n")
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


def _aims(measured: Measured, title: str) -> str:
    rows = []
    for aim in AIMS:
        value = aim.found(measured)
        if value is not None:
            rows.append([aim.what, f"{value:.3g}", f"{aim.most:.3g}", "yes" if value <= aim.most else "no"])
    return (
        "\n".join([f"## kvtier against its aims{title}", "", table(["what", "found", "at most", "met"], rows)])
        if rows
        else ""
    )


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


def _profile(record: Record) -> str:
    profile, seconds = record["profile"], record["profile"]["seconds"]
    calls = sorted(profile["calls"].items(), key=lambda item: -item[1]["seconds"])[:_MOST_CALLS]
    rows = [
        [name, str(int(call["calls"])), plain(summarise([call["seconds"]])), percent(call["seconds"] / seconds)]
        for name, call in calls
    ]
    rows += [
        [f"CPU: {name}", "", plain(summarise([spent])), times(spent / seconds)]
        for name, spent in profile["cpu_seconds"].items()
    ]
    heading = f"## Where the time goes: {column(record)} {record['variant']}, {record['cell']} {label(record)}".rstrip()
    note = "Seconds within a call, with the calls that it makes; of the time that passed."
    return "\n".join([heading, "", note, "", table(["call", "calls", "s", "share"], rows)])


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


def main() -> None:
    """Write the reports of the directories that the command line names."""
    for argument in sys.argv[1:]:
        print(write(Path(argument)))


if __name__ == "__main__":
    main()
