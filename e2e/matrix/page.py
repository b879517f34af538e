# SPDX-License-Identifier: Apache-2.0
"""Writes docs/models.md from the rows that runs left behind: nothing on that page is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from e2e.matrix.classes import CLASSES, ModelClass

RESULTS: Final = Path(__file__).with_name("results")
PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD: Final = """# Models

<!-- written by `python -m e2e.matrix --write` from e2e/matrix/results -->
Each row is a real vLLM engine with a tiny model of that architecture and random weights, started with the command line
that the operator renders. A first engine computes {prompts} prompts of {shortest} to {longest} tokens that share
beginnings, and answers each again from its own prefix cache. A second engine, in another process, has nothing but the
volume. *Same answers* counts prompts whose tokens are those of the first engine's own hit; *difference* is the largest
between log-probabilities, 0 where they agree to the last bit; *from disk* counts tokens that came from the volume, and
the files read for them. *In common* is what the second of two prompts finds of the two thirds that it shares with the
first.

`make test-models` runs the table (`CLASSES="dense mla"` some rows of it) on vLLM's CPU build, `DEVICE=cuda` on a GPU.

| Class | Result | Same answers | Difference | From disk | In common | Run on |
|---|---|---|---|---|---|---|
"""
_LONGEST_MESSAGE: Final = 240


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Write the page."""
    page.write_text(text(results))


def text(results: Path = RESULTS) -> str:
    """Return the page."""
    rows = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    ran = [row for row in rows.values() if "prompts" in row]
    head = _HEAD.format(
        prompts=min((row["prompts"] for row in ran), default=0),
        shortest=min((row["lengths"][0] for row in ran), default=0),
        longest=max((row["lengths"][1] for row in ran), default=0),
    )
    notes = [note for each in CLASSES if (note := _note(each, rows.get(each.name)))]
    tail = "\n## What was said\n\n" + "\n".join(notes) + "\n" if notes else ""
    return head + "".join(_line(each, rows.get(each.name)) for each in CLASSES) + tail


def _line(each: ModelClass, row: Mapping[str, Any] | None) -> str:
    if row is None:
        return f"| {each.title} | not run yet | | | | | |\n"
    if "prompts" not in row:
        return f"| {each.title} | {_result(row)} | | | | | {_place(row)} |\n"
    cells = (
        each.title,
        _result(row),
        f"{row['same_tokens']} of {row['prompts']}",
        f"{row['largest_difference']:g}",
        f"{row['external_tokens']:,.0f} tokens, {row['disk_blocks']:.0f} files",
        f"{row['pair_tokens']:,} of {row['pair_common']:,}",
        _place(row),
    )
    return f"| {' | '.join(cells)} |\n"


def _result(row: Mapping[str, Any]) -> str:
    return f"{row['verdict']} by {row['by']}" if "by" in row else str(row["verdict"])


def _place(row: Mapping[str, Any]) -> str:
    return f"{row['device']}, vLLM {row['vllm']}"


def _note(each: ModelClass, row: Mapping[str, Any] | None) -> str:
    said = (row or {}).get("message", "")
    if not said:
        return ""
    short = said if len(said) <= _LONGEST_MESSAGE else f"{said[:_LONGEST_MESSAGE]}…"
    return f"- {each.title}: {short}"
