# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measured figures into README.md and docs: ``python .ci/figures.py --write`` or ``--check``.

``e2e/bench/results/numbers.json`` names each figure, the run that it is from and the requests that it counts. This
script takes the values from the runs' own records and writes the tables between the markers ``<!-- numbers: NAME -->``
and ``<!-- end of numbers -->``. So two pages cannot show different values of one figure.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import os
import re
import statistics
import sys
from collections.abc import Mapping
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


@functools.cache
def journal(name: str) -> tuple[dict[str, Any], ...]:
    """Return the records of a journal below the results."""
    path = RESULTS / name
    text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    return tuple(json.loads(line) for line in text.splitlines())


def cells(figure: Mapping[str, Any], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a journal that a figure counts, with the requests that it counts."""
    chosen = {name: figure.get(name, run.get(name)) for name in ("backend", "cell")}
    label = figure.get("label")
    found = []
    for record in journal(str(run["journal"])):
        if record["kind"] == "cell" and all(record[name] == value for name, value in chosen.items()):
            asked = [each for each in record["requests"] if label is None or each["label"] == label]
            if figure.get("whole"):  # hits of prompts that the volume has in full; their last token is computed
                asked = [each for each in asked if each["cached"] >= each["tokens"] - 1]
            found += [{**record, "requests": asked}] if asked else []
    return found[: figure.get("first", len(found))]


def samples(figure: Mapping[str, Any], run: Mapping[str, Any]) -> list[float]:
    """Return what was measured of a figure: seconds of whole workloads, or milliseconds."""
    what = figure.get("what")
    if "cases" in run:
        cases = json.loads((RESULTS / run["cases"]).read_text())["cases"]
        return [case[what] for case in cases if case["title"] == figure["title"]]
    if what == "seconds":
        return [cell["seconds"] for cell in cells(figure, run)]
    return [1000 * statistics.mean(each["first"] for each in cell["requests"]) for cell in cells(figure, run)]


def measured() -> dict[str, Any]:
    """Return the numbers, with the median of what the records say of each figure.

    Raises:
        LookupError: a run has nothing of a figure.
    """
    numbers: dict[str, Any] = json.loads(NUMBERS.read_text())
    for name, figure in numbers["figures"].items():
        found = samples(figure, numbers["runs"][figure["run"]])
        if not found:
            message = f"{NUMBERS.relative_to(ROOT)}: nothing was measured of {name}"
            raise LookupError(message)
        figure["value"] = statistics.median(found)
    return numbers


def bars(numbers: Mapping[str, Any]) -> str:
    """Return the picture of the first table's longest measured prompts: bars on a linear axis from zero."""
    rows = [
        (row[0], numbers["figures"][row[2].strip("=*")]["value"]) for row in numbers["tables"]["first-token"]["rows"]
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
    if figure.get("what") == "seconds":
        result = f"{value:.1f} s"
    else:
        result = f"{value / 1000:.2f} s" if unit == "s" else f"{value:,.0f} ms"
    return f"**{result}**" if text.endswith("*") else result


def table(name: str, numbers: Mapping[str, Any], page: Path) -> str:
    """Return a table with the notes below it, whose links lead from the page to the results."""
    found = numbers["tables"][name]
    rows = [[shown(each, numbers, found.get("unit", "ms")) for each in row] for row in found["rows"]]
    lines = [found["head"], ["---"] * len(found["head"]), *rows]
    notes = "".join(f"\n{note}\n" for note in found["notes"])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines) + notes
    return re.sub(
        r"\((results/[^)]+)\)", lambda link: f"({os.path.relpath(RESULTS.parent / link[1], page.parent)})", text
    )


def written(page: Path, numbers: Mapping[str, Any]) -> str:
    """Return a page with its tables."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(found[2], numbers, page)}\n{found[3]}", page.read_text())


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or tell which are stale."""
    parser = argparse.ArgumentParser(description="Write the tables of measured figures.")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true")
    choice.add_argument("--check", action="store_true", help="exit with 1 where a table is another")
    given = parser.parse_args(arguments)
    numbers = measured()
    contents = {page: written(page, numbers) for page in PAGES} | {PICTURE: bars(numbers)}
    stale = [path for path, content in contents.items() if not path.exists() or path.read_text() != content]
    if given.write:
        for path in stale:
            path.write_text(contents[path])
        return 0
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale: run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
