# SPDX-License-Identifier: Apache-2.0
"""The picture of one hit on the volume: when its chunks were read, when they reached the GPU, when a token came.

Drawn from the trace of an engine's calls. What lies between two engine steps is known as the calls report it: a chunk
is shown as verified when the engine heard of it, a copy to the GPU as done at the end that CUDA's own clock gives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from e2e.bench import charts
from e2e.bench.journal import Record
from e2e.bench.stats import group

_READ = ("Movers.collect", "Job.settle")
_COPIED = "SingleDirectionOffloadingHandler.get_finished"
_SPANS = {
    "look-up": ("get_num_new_matched_tokens",),
    "scheduler": ("Scheduler.schedule",),
    "copies ordered": ("SingleDirectionOffloadingHandler.transfer_async",),
    "model": ("Worker.execute_model", "Worker.sample_tokens"),
}


class Timeline(NamedTuple):
    """One hit, in milliseconds since the request was handed over."""

    title: str
    spans: Mapping[str, Sequence[tuple[float, float]]]
    """Begin and length of the calls of each kind."""
    verified: Sequence[float]
    """When each chunk was in the CPU tier."""
    copied: Sequence[tuple[float, float, float]]
    """When each copy to the GPU began and ended, and its bytes."""
    first_token: float


def make_timeline(record: Record) -> Timeline:
    """Read the trace of a cell of one request."""
    request = record["requests"][0]
    began: float = record["began"]
    end = began + request["at"]

    def at(moment: float) -> float:
        return (moment - began) * 1000

    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in _SPANS}
    verified: list[float] = []
    copied: list[tuple[float, float, float]] = []
    for name, call_began, call_ended, parts in record["profile"]["trace"]:
        if call_began > end:
            continue
        for kind, names in _SPANS.items():
            if name.endswith(names):
                spans[kind].append((at(call_began), (call_ended - call_began) * 1000))
        if name in _READ:
            verified += [at(call_ended)] * len(parts)
        elif name == _COPIED:
            copied += [(at(call_ended) - seconds * 1000, at(call_ended), size) for seconds, size in parts]
    title = " ".join(part for part in (record["backend"], record["variant"]) if part)
    return Timeline(title, spans, sorted(verified), sorted(copied), request["at"] * 1000)


def draw(path: Path, records: Iterable[Record]) -> bool:
    """Draw the median of the longest traced hits of each variant, one below the other; False where there is none."""
    traced = [record for record in records if record["cell"] == "single first" and record["profile"]["trace"]]
    chosen = []
    for found in group((record["variant"], record) for record in traced).values():
        longest = max(record["requests"][0]["tokens"] for record in found)
        equal = [record for record in found if record["requests"][0]["tokens"] == longest]
        chosen.append(sorted(equal, key=lambda record: float(record["requests"][0]["first"]))[len(equal) // 2])
    return bool(chosen) and charts.timelines(path, [make_timeline(record) for record in chosen])
