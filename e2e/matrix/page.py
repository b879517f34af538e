# SPDX-License-Identifier: Apache-2.0
"""Writes results/README.md from the rows of earlier runs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.bench.report import table_row
from e2e.matrix.cases import CLASSES, ModelClass

RESULTS: Final = Path(__file__).with_name("results")
PAGE: Final = RESULTS / "README.md"

_TEMPLATE: Final = Path(__file__).with_name("models.md.in")
_LONGEST_MESSAGE: Final = 240
_GPU: Final = "cuda"
"""Directory of the rows of a GPU."""
_DEVICES: Final = {"cpu": "cpu", "cuda": "H200"}


def keep(name: str, row: Mapping[str, Any], results: Path = RESULTS) -> None:
    """Keep the row of a class and device; one that was not run replaces nothing."""
    place = results / _GPU if row["device"] == "cuda" else results
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.json"
    if row["verdict"] != "not run" or not path.exists():
        path.write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")


def text(results: Path = RESULTS) -> str:
    """Return the page."""
    here, on_gpu = _read(results), _read(results / _GPU)
    there = [(each, row) for each, row in on_gpu if row["verdict"] != "not run"]
    ran = [row for _, row in (*here, *on_gpu) if "prompts" in row]
    known = {each.name: row for each, row in here}
    lines = [
        table_row(_cells(each, known[each.name]) if each.name in known else [each.title, "not run yet", *[""] * 5])
        for each in CLASSES
        if not each.is_plain
    ]
    kept = _kept(here)
    return _TEMPLATE.read_text().format(
        prompts=min((row["prompts"] for row in ran), default=0),
        shortest=min((row["lengths"][0] for row in ran), default=0),
        longest=max((row["lengths"][1] for row in ran), default=0),
        rows="".join(lines),
        gpu_rows="".join(table_row(_gpu_cells(each, row)) for each, row in there),
        tokens=max((row["prompt_tokens"] for _, row in kept), default=0),
        kept_rows="".join(table_row(_kept_cells(each, row)) for each, row in kept),
        strangers=_strangers([*here, *there]),
        notes="".join(_note(each, row) for each, row in (*here, *there)),
    )


def _read(results: Path) -> list[tuple[ModelClass, dict[str, Any]]]:
    paths = [(each, results / f"{each.name}.json") for each in CLASSES]
    return [(each, json.loads(path.read_text())) for each, path in paths if path.exists()]


def _kept(rows: Sequence[tuple[ModelClass, Mapping[str, Any]]]) -> list[tuple[ModelClass, Mapping[str, Any]]]:
    """Return the rows of classes with the operator's flags and without them."""
    found = [(each, row) for each, row in rows if row.get("args") and "prompts" in row]
    shapes = [each.shape for each, _ in found if each.is_plain]
    return [(each, row) for each, row in found if each.shape in shapes]


def _kept_cells(each: ModelClass, row: Mapping[str, Any]) -> list[str]:
    volume = f"{row['stored_bytes'] / 1e6:.1f} MB, {row['stored_blocks']} files"
    return [each.title, f"`{' '.join(row['args'])}`", _in_common(row), volume]


def _strangers(rows: Sequence[tuple[ModelClass, Mapping[str, Any]]]) -> str:
    lines = []
    for each, row in rows:
        if row.get("strangers"):
            asked = f"{row['strangers']} under another identity"
            lines.append(table_row([each.title, asked, f"{row['stranger_blocks']:.0f}", _place(row)]))
        if row.get("rewritten"):
            asked = f"{row['rewritten']}; {row['rewritten_changed']} have another answer now"
            lines.append(table_row(["an adapter rewritten", asked, f"{row['rewritten_blocks']:.0f}", _place(row)]))
    return "".join(lines)


def _cells(each: ModelClass, row: Mapping[str, Any]) -> list[str]:
    if "prompts" not in row:
        return [each.title, _result(row), *[""] * 4, _place(row)]
    found = [_same(row), f"{row['largest_difference']:g}", _from_disk(row), _in_common(row), _place(row)]
    return [each.title, _result(row), *found]


def _gpu_cells(each: ModelClass, row: Mapping[str, Any]) -> list[str]:
    if "prompts" not in row:
        return [each.title, _result(row), *[""] * 6]
    exact = f"{row['alike']} of {row['prompts']}"
    if row["alike_difference"]:
        exact = f"0 to {row['alike_difference']:.3g} apart in {exact}"
    differences = [f"{row['largest_difference']:g}", f"{row['recompute_difference']:g}"]
    return [each.title, _result(row), exact, _same(row), *differences, _from_disk(row), _in_common(row)]


def _same(row: Mapping[str, Any]) -> str:
    return f"{row['same_tokens']} of {row['prompts']}" + (f", {row['ties']} ties" if row.get("ties") else "")


def _from_disk(row: Mapping[str, Any]) -> str:
    return f"{row['external_tokens']:,.0f} tokens, {row['disk_blocks']:.0f} files"


def _in_common(row: Mapping[str, Any]) -> str:
    later = row.get("later_tokens", 0)
    also = f", later {later:,}" if not row["pair_tokens"] and later else ""
    return f"{row['pair_tokens']:,} of {row['pair_common']:,}{also}"


def _result(row: Mapping[str, Any]) -> str:
    return f"{row['verdict']} by {row['by']}" if "by" in row else str(row["verdict"])


def _place(row: Mapping[str, Any]) -> str:
    splits = ", `SPLIT_HITS=Auto`" if row.get("split_hits") == "Auto" else ""
    return f"{_DEVICES[row['device']]}, vLLM {row['vllm']}{splits}"


def _note(each: ModelClass, row: Mapping[str, Any]) -> str:
    said = textwrap.shorten(row.get("message", ""), _LONGEST_MESSAGE, placeholder="…")
    return f"- {each.title} ({_place(row)}): {said}\n" if said else ""
