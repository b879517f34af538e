# SPDX-License-Identifier: Apache-2.0
"""What cells of the traffic benchmark amount to, and what was aimed at. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from e2e.bench.journal import Record
from e2e.bench.stats import Summary, group, ratio, summarise

IN_GPU = "gpu"
"""The column of an engine whose GPU holds everything."""


@dataclass(frozen=True, slots=True)
class Served:
    """What some requests of one cell got, in seconds."""

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
    """Until everybody has a first token."""


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


@dataclass(frozen=True, slots=True)
class Aim:
    """What one measurement should not exceed."""

    what: str
    most: float
    found: Callable[[Measured], float | None]


def part(measured: Measured, cell: str, name: str, tokens: str = "") -> Numbers | None:
    """Return a backend's numbers of a cell, if it was measured."""
    return measured.get((cell, tokens, name))


def _against(cell: str, rival: str, field: str = "seconds") -> Callable[[Measured], float | None]:
    return lambda measured: ratio(
        getattr(part(measured, cell, "kvtier"), field, None), getattr(part(measured, cell, rival), field, None)
    )


def _single_against(cell: str, name: str, tokens: str) -> Callable[[Measured], float | None]:
    def found(measured: Measured) -> float | None:
        ours, theirs = part(measured, "single first", "kvtier", tokens), part(measured, cell, name, tokens)
        return ratio(ours.first, theirs.first) if ours and theirs else None

    return found


def _own(cell: str, field: str, factor: float = 1.0) -> Callable[[Measured], float | None]:
    def found(measured: Measured) -> float | None:
        ours = part(measured, cell, "kvtier")
        return getattr(ours, field).median * factor if ours else None

    return found


AIMS = (
    Aim("A: seconds, of everything in GPU", 1.12, _against("A", IN_GPU)),
    Aim("A: seconds, of vLLM fs", 0.8, _against("A", "fs")),
    Aim("A: time per token of later turns, of everything in GPU", 1.1, _against("A", IN_GPU, "token")),
    Aim("B: seconds, of vLLM's CPU tier", 1.03, _against("B", "cpu")),
    Aim("C: seconds, of vLLM fs", 0.87, _against("C", "fs")),
    Aim("D: mean time to the first token, ms", 60, _own("D", "first", 1000)),
    Aim("D: P99, ms", 75, _own("D", "first_p99", 1000)),
    Aim("E: mean time to the first token, of computing", 0.5, _against("E", "none", "first")),
    Aim(
        "one prompt of 32k from the volume, of its hit in the CPU tier",
        1.3,
        _single_against("single again", "kvtier", "32768"),
    ),
    Aim("the same, of vLLM fs", 1 / 7, _single_against("single first", "fs", "32768")),
    Aim("8 users of 32k: seconds until all have a first token", 1.0, _own("users", "all_first")),
    Aim("never hits, CUDA graphs: seconds, of no offload", 1.005, _against("never", "none")),
    Aim("never hits, eager: seconds, of vLLM's CPU tier", 1.0, _against("never eager", "cpu")),
)
