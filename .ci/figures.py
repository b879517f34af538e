# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measured figures into README.md and docs: ``python .ci/figures.py --write`` or ``--check``.

``--adopt RESULT OUT...`` makes a folder of results of what ``e2e/bench/one_run.sh`` left in one or more directories: a
packed journal and a report. Each run of `numbers.json` with a ``part`` that was played is from there afterwards.
``e2e/bench/results/numbers.json`` names each figure, the run that it is from and the requests that it counts. This
script takes the values from the runs' own records and writes the tables between the markers ``<!-- numbers: NAME -->``
and ``<!-- end of numbers -->``. In the sentences below ``percentages`` it writes, in place of ``#``, by how much one
figure differs from another. So two places cannot show different values of one figure.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "e2e" / "bench" / "results"
NUMBERS: Final = RESULTS / "numbers.json"
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK: Final = re.compile(r"(<!-- numbers: ([a-z-]+) -->\n).*?(<!-- end of numbers -->)", re.DOTALL)
PICTURE: Final = ROOT / "docs" / "pictures" / "first-token.svg"
TITLE: Final = "A prompt of 32,768 tokens that an earlier engine computed: time to the first token"
MISSING: Final = "not measured"
COUNTED: Final[Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "seconds": lambda cell: cell["seconds"],
    "hits": lambda cell: 100 * sum(each["cached"] for each in cell["requests"]) / tokens(cell),
    "input": lambda cell: tokens(cell) / cell["seconds"],
    "output": lambda cell: sum(len(each["output"]) for each in cell["requests"]) / cell["seconds"],
    "back": lambda cell: cell["back_seconds"] or math.inf,
    "lost": lambda cell: cell["lost_blocks"],
}
UNITS: Final = {
    "seconds": ".1f} s",
    "back": ".0f} s",
    "hits": ".0f} %",
    "input": ",.0f}",
    "output": ",.0f}",
    "lost": ".0f}",
}
"""How each is written."""


def tokens(cell: Mapping[str, Any]) -> int:
    """Return the tokens of all prompts."""
    return sum(each["tokens"] for each in cell["requests"])


@functools.cache
def journal(name: str) -> tuple[dict[str, Any], ...]:
    """Return the records of a journal below the results."""
    path = RESULTS / name
    if not name:
        return ()
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    return tuple(json.loads(line) for line in text.splitlines())


def cells(figure: Mapping[str, Any], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a journal that a figure counts, with the requests that it counts."""
    chosen = {name: figure.get(name, run.get(name)) for name in ("backend", "cell")}
    chosen |= {"variant": run["variant"]} if "variant" in run else {}
    label = figure.get("label")
    found = []
    for record in journal(run.get("journal", "")):
        if record["kind"] == "cell" and all(record[name] == value for name, value in chosen.items()):
            asked = [each for each in record["requests"] if label is None or each["label"] == label]
            if figure.get("whole"):  # hits of prompts that the volume has in full; their last token is computed
                asked = [each for each in asked if each["cached"] >= each["tokens"] - 1]
            found += [{**record, "requests": asked}] if asked else []
    return found[figure.get("skip", 0) :][: figure.get("first", len(found))]


def samples(figure: Mapping[str, Any], run: Mapping[str, Any]) -> list[float]:
    """Return what was measured of a figure: seconds of whole workloads, or milliseconds."""
    what = figure.get("what")
    if "cases" in run:
        cases = json.loads((RESULTS / run["cases"]).read_text())["cases"]
        return [case[what] for case in cases if case["title"] == figure["title"]]
    if what in COUNTED:
        return [COUNTED[what](cell) for cell in cells(figure, run)]
    return [1000 * statistics.mean(each["first"] for each in cell["requests"]) for cell in cells(figure, run)]


def measured() -> dict[str, Any]:
    """Return the numbers, with the median of what the records say of each figure.

    Raises:
        LookupError: a run has nothing of a figure.
    """
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text())
    for name, figure in numbers["figures"].items():
        run = numbers["runs"][figure["run"]]
        found = samples(figure, run)
        if not found and "part" not in run:
            message = f"{NUMBERS.relative_to(ROOT)}: nothing was measured of {name}"
            raise LookupError(message)
        figure["value"] = statistics.median(found) if found else None
    return numbers


def bars(numbers: Mapping[str, Any]) -> str:
    """Return the picture of the first table's longest measured prompts: bars on a linear axis from zero."""
    rows = [
        (row[0], value)
        for row in numbers["tables"]["first-token"]["rows"]
        if (value := numbers["figures"][row[2].strip("=*")]["value"])
    ]
    left, width, height = 420, 440, 34
    scale = width / 1600
    bottom = 56 + height * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 940 {bottom + 44}" font-family="sans-serif">',
        "<style>text {font-size: 14px}</style>",
        f'<rect width="940" height="{bottom + 44}" rx="8" fill="#fff"/>',
        f'<text x="20" y="30" style="font-size: 17px" font-weight="bold">{TITLE}</text>',
    ]
    for at in range(0, 1601, 200):
        x = left + at * scale
        parts += [
            f'<line x1="{x:.0f}" x2="{x:.0f}" y1="48" y2="{bottom}" stroke="#ddd"/>',
            f'<text x="{x:.0f}" y="{bottom + 20}" text-anchor="middle" fill="#555">{at}</text>',
        ]
    parts.append(f'<text x="{left + width + 30}" y="{bottom + 20}" fill="#555">ms</text>')
    for at, (label, value) in enumerate(rows):
        y, color = 54 + height * at, "#3f51b5" if "kvtier" in label else "#9e9e9e"
        parts += [
            f'<text x="{left - 12}" y="{y + 18}" text-anchor="end">{label.strip("¹² ")}</text>',
            f'<rect x="{left}" y="{y}" width="{value * scale:.0f}" height="{height - 10}" fill="{color}"/>',
            f'<text x="{left + value * scale + 8:.0f}" y="{y + 18}">{value:,.0f}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def shown(text: str, numbers: Mapping[str, Any], unit: str) -> str:
    """Return the text of a cell: ``=NAME`` is the value of a figure, ``=`` one without a measurement."""
    if not text.startswith("="):
        return text
    if text == "=":
        return MISSING
    figure = numbers["figures"][text[1:].strip("*")]
    value = figure["value"]
    if value is None:
        return MISSING
    if unit_of := UNITS.get(figure.get("what", "")):
        result = ("{:" + unit_of).format(value)
    else:
        result = f"{value / 1000:.2f} s" if unit == "s" else f"{value:,.0f} ms"
    return f"**{result}**" if text.endswith("*") else result


def links(text: str, numbers: Mapping[str, Any]) -> str:
    """Return the text with a link to the page of each run that it names, as in ``@RUN``."""

    def link(found: re.Match[str]) -> str:
        run = numbers["runs"][found[1]]
        if "journal" not in run:
            return MISSING
        folder = Path(run["journal"]).parent.name
        return f"[{run.get('says', folder[:10])}](results/{folder}/{run.get('page', 'README.md')})"

    return re.sub(r"@([a-z0-9-]+)", link, text)


def row_of(row: Sequence[str], numbers: Mapping[str, Any], unit: str) -> list[str]:
    """Return the cells of a row, where ``@`` is for links to the runs of its figures; none if nothing was measured."""
    figures = [numbers["figures"][cell[1:].strip("*")] for cell in row if len(cell) > 1 and cell.startswith("=")]
    runs = dict.fromkeys(f"@{figure['run']}" for figure in figures if figure["value"] is not None)
    cells = [" ".join(runs) if cell == "@" else shown(cell, numbers, unit) for cell in row]
    return [links(cell, numbers) for cell in cells] if runs else []


def table(name: str, numbers: Mapping[str, Any], page: Path) -> str:
    """Return a table with the notes below it, whose links lead from the page to the results."""
    found = numbers["tables"][name]
    unit = found.get("unit", "ms")
    rows = list(filter(None, (row_of(row, numbers, unit) for row in found["rows"])))
    if not rows:
        return ""
    lines = [found["head"], ["---"] * len(found["head"]), *rows]
    notes = "".join(f"\n{links(note, numbers)}\n" for note in found["notes"])
    text = "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + notes + "\n"
    return re.sub(
        r"\((results/[^)]+)\)", lambda link: f"({os.path.relpath(RESULTS.parent / link[1], page.parent)})", text
    )


def written(page: Path, numbers: Mapping[str, Any]) -> str:
    """Return a page with its tables, and the percentages in its sentences.

    Raises:
        LookupError: the page lacks a sentence.
    """
    text = BLOCK.sub(lambda found: f"{found[1]}{table(found[2], numbers, page)}{found[3]}", page.read_text())
    for sentence, names in numbers["percentages"].get(page.name, {}).items():
        value, base = (numbers["figures"][name]["value"] for name in names)
        before, after = (r"\s+".join(map(re.escape, part.split(" "))) for part in sentence.split("#"))
        percent = rf"\g<1>{abs(100 * (value / base - 1)):.0f}\g<2>"
        text, count = re.subn(rf"({before})\d+({after})", percent, text)
        if not count:
            message = f"{page.relative_to(ROOT)} does not say {sentence!r}: correct `percentages` of {NUMBERS.name}"
            raise LookupError(message)
    return text


def adopt(name: str, sources: Sequence[Path]) -> None:
    """Join journals to one in a folder of results, with a report beside it, and have `numbers.json` name it."""
    text = "".join((source / "traffic.jsonl").read_text() for source in sources)
    folder = RESULTS / name
    folder.mkdir(exist_ok=True)
    (folder / "traffic.jsonl.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "connector", "operator"))
    report = [sys.executable, str(ROOT / "e2e/bench/report.py"), str(folder)]
    subprocess.run(report, env={**os.environ, "PYTHONPATH": paths}, check=True, stdout=subprocess.DEVNULL)
    played = [record for record in journal(f"{name}/traffic.jsonl.xz") if record["kind"] == "cell"]
    written = NUMBERS.read_text()
    for key, run in json.loads(written)["runs"].items():
        chosen = {
            "variant": run.get("part"),
            **({"backend": run.get("as", run.get("backend"))} if "backend" in run else {}),
        }
        if any(all(record[name] == value for name, value in chosen.items()) for record in played):
            entry = {"journal": f"{name}/traffic.jsonl.xz", **chosen, "part": run["part"], "page": "traffic.md"}
            written = re.sub(rf'(?m)^  "{key}": \{{"[^}}]*\}}', f'  "{key}": {json.dumps(entry)}', written, count=1)
    NUMBERS.write_text(written)


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or tell which are stale."""
    parser = argparse.ArgumentParser(description="Write the tables of measured figures.")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true")
    choice.add_argument("--check", action="store_true", help="exit with 1 where a table is another")
    choice.add_argument(
        "--adopt", nargs="+", metavar="NAME", help="a folder of results to make, and directories of a run"
    )
    given = parser.parse_args(arguments)
    if given.adopt:
        adopt(given.adopt[0], [Path(each) for each in given.adopt[1:]])
    numbers = measured()
    contents = {page: written(page, numbers) for page in PAGES} | {PICTURE: bars(numbers)}
    stale = [path for path, content in contents.items() if not path.exists() or path.read_text() != content]
    if given.write or given.adopt:
        for path in stale:
            path.write_text(contents[path])
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale: run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
