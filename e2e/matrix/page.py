# SPDX-License-Identifier: Apache-2.0
"""Writes docs/models.md from the rows of earlier runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.matrix.classes import CLASSES, ModelClass

RESULTS: Final = Path(__file__).with_name("results")
PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD: Final = """# Models

<!-- written by `python -m e2e.matrix --write` from e2e/matrix/results -->

Each row is a real vLLM engine with a tiny model of that architecture and random weights. It runs the command line that
the operator renders. A first engine computes {prompts} prompts of {shortest} to {longest} tokens that share beginnings,
and answers each again from its own prefix cache. A second engine, in another process, has only the volume.

- *Same answers*: prompts whose tokens are those of the first engine's own hit.
- *Difference*: the largest between log-probabilities. 0: they agree to the last bit.
- *From disk*: tokens that came from the volume, and the files read for them.
- *In common*: tokens that the second of two prompts finds of the two thirds that it shares with the first.
- *Later*: the same, after an engine has computed two such prompts itself.
- *Ties*: answers that differ at two tokens of about equal probability. Engines with other numbers of ranks add up in
  another order, with or without a volume, and may take either token.

`make test-models` runs the table (`CLASSES="dense mla"` some rows of it) on vLLM's CPU build, `DEVICE=cuda` on a GPU;
`python -m e2e.matrix --device cuda --jobs 8` runs several rows at a time on all GPUs of a machine.

"""
_TABLE: Final = """
| Class | Result | Same answers | Difference | From disk | In common | Run on |
|---|---|---|---|---|---|---|
"""
_KEPT: Final = """
## What a shared beginning costs

Layers with a window or a state keep only the part that the end of a prompt needs. The operator sets flags that make
engines keep more ([sizing.md](sizing.md#windows-and-states)). The table has the same prompts with these flags and
without them. *Volume* is the data of the first engine for prompts of {tokens:,} tokens that share beginnings.

A state is kept at the end of a step. vLLM computes a prompt that is alone in one step, whatever
`--long-prefill-token-threshold` says. So the next prompt that shares its beginning finds no state there. An engine that
computes a second such prompt keeps a state where the two part, and later prompts go on from it. If the second prompt
must find a state, set `--max-num-batched-tokens=2048` in `engine.args`. It ends every step there, for all requests.

| Class | Flags | In common | Volume |
|---|---|---|---|
"""
_ON_GPU: Final = """
## On one or two H200

vLLM's CUDA build finds a prompt in the GPU's memory by blocks of 16 tokens, and on the volume by files of 128.

- *To the last bit*: prompts that both engines found to the same length, so that both computed the same rest. They must
  agree in every bit.
- *Difference*: the largest among the others. There the second engine computed up to 112 more tokens, which bfloat16
  rounds differently with or without a volume.
- *Computing*: the difference between the first engine's own hit and computing the whole prompt, without a volume.
- *Undecided*: some of the others took another token, or differ more than *Computing*. Or the class checks drafts, all
  tokens are the same and their probabilities are not: the drafts that are accepted decide the rounding. These runs did
  not record the first token of an answer, which needs no draft, on its own.

| Class | Result | To the last bit | Same answers | Difference | Computing | From disk | In common |
|---|---|---|---|---|---|---|---|
"""
_STRANGERS: Final = """
## What must miss

The same prompt under another identity, asked of an engine for which the volume holds it. An adapter that was written
anew at its path is asked for in a third engine.

| Class | Asked | Blocks read | Run on |
|---|---|---|---|
"""
_LONGEST_MESSAGE: Final = 240
_GPU: Final = "cuda"
"""Directory of the rows of a GPU."""
_DEVICES: Final = {"cpu": "cpu", "cuda": "H200"}


def keep(rows: Mapping[str, Mapping[str, Any]], results: Path = RESULTS) -> None:
    """Keep rows by class and device; a row that was not run replaces nothing."""
    for name, row in rows.items():
        place = results / _GPU if row["device"] == "cuda" else results
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{name}.json"
        if row["verdict"] != "not run" or not path.exists():
            path.write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")


def write(page: Path = PAGE, results: Path = RESULTS) -> None:
    """Write the page."""
    page.write_text(text(results))


def text(results: Path = RESULTS) -> str:
    """Return the page."""
    rows, on_gpu = _read(results), _read(results / _GPU)
    ran = [row for row in (*rows.values(), *on_gpu.values()) if "prompts" in row]
    head = _HEAD.format(
        prompts=min((row["prompts"] for row in ran), default=0),
        shortest=min((row["lengths"][0] for row in ran), default=0),
        longest=max((row["lengths"][1] for row in ran), default=0),
    )
    pairs = [(each, rows.get(each.name)) for each in CLASSES]
    there = [(each, row) for each in CLASSES if (row := on_gpu.get(each.name)) and row["verdict"] != "not run"]
    notes = [note for each, row in [*pairs, *there] if (note := _note(each, row))]
    tail = "\n## What was said\n\n" + "\n".join(notes) + "\n" if notes else ""
    lines = "".join(_line(each, row) for each, row in pairs if not each.is_plain)
    gpu_lines = "".join(_gpu_line(each, row) for each, row in there)
    return (
        head
        + _TABLE
        + lines
        + (_ON_GPU + gpu_lines if there else "")
        + _kept(pairs)
        + _strangers([*pairs, *there])
        + tail
    )


def _read(results: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}


def _kept(pairs: Sequence[tuple[ModelClass, Mapping[str, Any] | None]]) -> str:
    found = [(each, row) for each, row in pairs if row and row.get("args") and "prompts" in row]
    # A class beside the same one without flags.
    shapes = [each.shape for each, _ in found if each.is_plain]
    found = [(each, row) for each, row in found if each.shape in shapes]
    tokens = max((row["prompt_tokens"] for _, row in found), default=0)
    lines = [
        f"| {each.title} | `{' '.join(row['args'])}` | {_in_common(row)} | "
        f"{row['stored_bytes'] / 1e6:.1f} MB, {row['stored_blocks']} files |\n"
        for each, row in found
    ]
    return _KEPT.format(tokens=tokens) + "".join(lines) if lines else ""


def _strangers(pairs: Sequence[tuple[ModelClass, Mapping[str, Any] | None]]) -> str:
    lines = []
    for each, row in pairs:
        if row and row.get("strangers"):
            lines.append(
                f"| {each.title} | {row['strangers']} as somebody else | {row['stranger_blocks']:.0f} | "
                f"{_place(row)} |\n"
            )
        if row and row.get("rewritten"):
            lines.append(
                f"| the same, an adapter rewritten | {row['rewritten']}; {row['rewritten_changed']} have "
                f"another answer now | {row['rewritten_blocks']:.0f} | {_place(row)} |\n"
            )
    return _STRANGERS + "".join(lines) if lines else ""


def _line(each: ModelClass, row: Mapping[str, Any] | None) -> str:
    if row is None:
        return f"| {each.title} | not run yet | | | | | |\n"
    if "prompts" not in row:
        return f"| {each.title} | {_result(row)} | | | | | {_place(row)} |\n"
    cells = (
        each.title,
        _result(row),
        f"{row['same_tokens']} of {row['prompts']}" + (f", {row['ties']} ties" if row.get("ties") else ""),
        f"{row['largest_difference']:g}",
        f"{row['external_tokens']:,.0f} tokens, {row['disk_blocks']:.0f} files",
        # The volume of another class may hold both prompts.
        "" if each.of else _in_common(row),
        _place(row),
    )
    return f"| {' | '.join(cells)} |\n"


def _gpu_line(each: ModelClass, row: Mapping[str, Any]) -> str:
    if "prompts" not in row:
        return f"| {each.title} | {_result(row)} | | | | | | |\n"
    exact = f"{row['alike']} of {row['prompts']}"
    if row["alike_difference"]:
        exact = f"0 to {row['alike_difference']:.3g} apart in {exact}"
    cells = (
        each.title,
        _result(row),
        exact,
        f"{row['same_tokens']} of {row['prompts']}" + (f", {row['ties']} ties" if row.get("ties") else ""),
        f"{row['largest_difference']:g}",
        f"{row['recompute_difference']:g}",
        f"{row['external_tokens']:,.0f} tokens, {row['disk_blocks']:.0f} files",
        _in_common(row),
    )
    return f"| {' | '.join(cells)} |\n"


def _in_common(row: Mapping[str, Any]) -> str:
    later = row.get("later_tokens", 0)
    also = f", later {later:,}" if not row["pair_tokens"] and later else ""
    return f"{row['pair_tokens']:,} of {row['pair_common']:,}{also}"


def _result(row: Mapping[str, Any]) -> str:
    return f"{row['verdict']} by {row['by']}" if "by" in row else str(row["verdict"])


def _place(row: Mapping[str, Any]) -> str:
    return f"{_DEVICES[row['device']]}, vLLM {row['vllm']}"


def _note(each: ModelClass, row: Mapping[str, Any] | None) -> str:
    said = " ".join((row or {}).get("message", "").split())
    if not said:
        return ""
    short = said if len(said) <= _LONGEST_MESSAGE else f"{said[:_LONGEST_MESSAGE]}…"
    return f"- {each.title} ({_place(row or {})}): {short}"
