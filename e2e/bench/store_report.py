# SPDX-License-Identifier: Apache-2.0
"""The tables and charts of the store benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from e2e.bench import charts, journal
from e2e.bench.journal import Record
from e2e.bench.stats import Summary, group, percent, plain, ratio, summarise, table, times

PLAIN = "plain parallel reader"
OURS = "kvtier movers"
STOCK = "vLLM fs, one job"

_Key = tuple[str, str, str, float, int]
_Measured = dict[_Key, Summary | None]


def store_report(directory: Path) -> str:
    """Read ``store.jsonl``, write ``store.md`` and the charts beside it, and return the text."""
    records = journal.read(directory / "store.jsonl")
    found = [record for record in records if record["kind"] == "store"]
    keyed = ((_key(record), record["gb_per_second"]) for record in found)
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


def _key(record: Record) -> _Key:
    return (record["volume"], record["way"], record["contestant"], record["chunk_mib"], record["threads"])


def _section(directory: Path, measured: _Measured, volume: str, way: str) -> str:
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
    _chart(directory / file, measured, f"{way} {volume}", names, chunks, threads)
    headers = ["block, threads", *(_heading(name, way) for name in names), "kvtier / plain", "kvtier / one job"]
    return "\n".join([f"## {way.capitalize()}, {volume}", "", table(headers, rows), f"![{way} {volume}]({file})", ""])


def _find(measured: _Measured, volume: str, way: str, name: str, chunk: float, count: int) -> Summary | None:  # noqa: PLR0913, PLR0917 - a measurement has this many names
    return measured.get((volume, way, name, chunk, count)) or measured.get((volume, way, name, chunk, 0))


def _heading(name: str, way: str) -> str:
    return "plain parallel writer" if name == PLAIN and way == "store" else name


def _chart(  # noqa: PLR0913, PLR0917 - a chart has this many parts
    path: Path, measured: _Measured, title: str, names: Sequence[str], chunks: Sequence[float], threads: Sequence[int]
) -> None:
    way, volume = title.split()
    chunk = 8.0 if 8.0 in chunks else chunks[-1]  # noqa: PLR2004 - what the engine uses for Llama-3.1-8B
    series = {}
    for name in names:
        points = {count: _find(measured, volume, way, name, chunk, count) for count in threads}
        series[_heading(name, way)] = {count: point for count, point in points.items() if point is not None}
    charts.lines(path, f"{way.capitalize()}, {volume}, blocks of {chunk:g} MiB", series, "threads")
