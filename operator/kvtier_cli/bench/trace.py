# SPDX-License-Identifier: Apache-2.0
"""Reads traces in Mooncake's format: when requests came, how long they were, and which of their blocks are the same.

A line is a JSON object with ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``, one number for each 512 tokens of the prompt. Two prompts share as many blocks as their lists begin alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtier_cli.bench.workloads import Request

BLOCK_TOKENS: Final = 512
_SEEDS: Final = 900_000_000
"""Away from those of the other workloads."""
_FIELDS: Final = ("timestamp", "input_length", "output_length")


class TraceInvalid(ValueError):
    """A line cannot be played; the message says which one, and why."""


def read(file: Path, *, limit: int | None, speed: float, most_output: int | None) -> list[Request]:
    """Return the requests of a trace.

    Args:
        file: the trace, one JSON object a line.
        limit: so many of its first requests; None is all.
        speed: how much faster than recorded they come; 0 sends each as soon as there is room.
        most_output: no answer is longer than so many tokens; None leaves them as recorded.

    Raises:
        TraceInvalid: a line is not what it should be, or there is none.
    """
    found: list[Request] = []
    for number, line in _lines(file):
        if limit is not None and len(found) >= limit:
            break
        found.append(_request(line, f"{file}: line {number}", speed=speed, most_output=most_output))
    if not found:
        raise TraceInvalid(f"{file}: holds no request")
    return found


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _request(line: str, where: str, *, speed: float, most_output: int | None) -> Request:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise TraceInvalid(f"{where}: is no JSON ({error}): correct it, or end before it with --requests") from error
    if not isinstance(entry, dict):
        raise TraceInvalid(f"{where}: must be an object with {', '.join(_FIELDS)} and hash_ids")
    for name in _FIELDS:
        value = entry.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < (name == "input_length"):
            raise TraceInvalid(f"{where}: {name} must be a number, not {value!r}")
    blocks = entry.get("hash_ids")
    if not isinstance(blocks, list) or any(type(each) is not int for each in blocks):
        raise TraceInvalid(f"{where}: hash_ids must be a list of numbers")
    tokens = int(entry["input_length"])
    needed = -(-tokens // BLOCK_TOKENS)
    if len(blocks) < needed:
        raise TraceInvalid(f"{where}: {tokens} tokens need {needed} hash_ids, and it has {len(blocks)}")
    sizes = [min(BLOCK_TOKENS, tokens - place * BLOCK_TOKENS) for place in range(needed)]
    output = max(1, int(entry["output_length"]))
    return {
        "label": "trace",
        "parts": [(_SEEDS + block, size) for block, size in zip(blocks, sizes, strict=False)],
        "output_tokens": output if most_output is None else min(output, most_output),
        "start": entry["timestamp"] / 1000 / speed if speed else 0.0,
    }
